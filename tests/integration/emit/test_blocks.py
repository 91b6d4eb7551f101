"""``outbox.transaction(connection)``: one transaction block for every API."""

from __future__ import annotations

import pytest

from relaybox.errors import ConnectionClosed, NotInTransaction, TransactionFailed, UnsupportedConnection
from tests.integration.emit.conftest import Place, only


async def test_it_commits_at_the_end(place: Place) -> None:
    connection = await place.open()
    for n in range(2):
        async with place.block(connection):
            await place.emit(connection, payload={"n": n})
            assert len(place.rows()) == n
    await place.api.begin(connection)
    await place.emit(connection, payload={"n": "after the blocks"})
    assert place.payloads() == [{"n": 0}, {"n": 1}]
    await place.api.rollback(connection)
    assert place.payloads() == [{"n": 0}, {"n": 1}]


async def test_it_rolls_back_when_the_block_raises_and_can_be_used_again(place: Place) -> None:
    connection = await place.open()
    await place.emit_and_fail(connection, payload={"n": "dropped"})
    assert place.rows() == []
    async with place.block(connection):
        await place.emit(connection)
    assert len(place.rows()) == 1


@only(lambda api, kind: not api.sqlalchemy)
async def test_in_autocommit_it_is_a_transaction_and_autocommit_is_back_afterwards(place: Place) -> None:
    connection = await place.open(autocommit=True)
    await place.emit_and_fail(connection, payload={"n": "dropped"})
    async with place.block(connection):
        await place.emit(connection, payload={"n": "kept"})
        assert place.rows() == []
    assert place.payloads() == [{"n": "kept"}]
    with pytest.raises(NotInTransaction):
        await place.emit(connection)


@only(lambda api, kind: api.sqlalchemy)
async def test_sqlalchemy_in_autocommit_has_no_transaction_and_the_message_says_what_helps(
    place: Place,
) -> None:
    level = "SERIALIZABLE" if place.kind == "sqlite" else "READ COMMITTED"
    connection = await place.open(autocommit=True)
    for _ in range(2):
        with pytest.raises(NotInTransaction, match=rf'execution_options\(isolation_level="{level}"\)'):
            async with place.block(connection):
                pytest.fail("the block was entered")
        # The second time SQLAlchemy has begun, where a savepoint would be tried.
        await place.api.run(connection, "SELECT 1")
    await place.api.rollback(connection)
    await follow_the_advice(place, level)


async def follow_the_advice(place: Place, level: str) -> None:
    connection = await place.open(autocommit=True)
    if "Connection" in place.api.name:
        changed = connection.execution_options(isolation_level=level)
        if place.api.asynchronous:
            await changed
    else:
        connection.bind = connection.bind.execution_options(isolation_level=level)
    await place.emit_and_fail(connection, payload={"n": "dropped"})
    async with place.block(connection):
        await place.emit(connection)
        assert place.rows() == []
    assert len(place.rows()) == 1


@only(lambda api, kind: api.sqlalchemy and "ession" in api.name and kind == "postgresql-18")
async def test_a_sessions_connection_can_still_be_given_options_in_the_block(place: Place) -> None:
    session = await place.open()
    async with place.block(session):
        taken = session.connection(execution_options={"isolation_level": "SERIALIZABLE"})
        if place.api.asynchronous:
            await taken
        assert await place.api.run(session, "SHOW transaction_isolation") == [("serializable",)]


async def test_inside_an_open_transaction_it_is_a_savepoint(place: Place) -> None:
    connection = await place.begun()
    await place.emit(connection, payload={"n": "outer"})
    await place.emit_and_fail(connection, payload={"n": "dropped"})
    async with place.block(connection):
        await place.emit(connection, payload={"n": "inner"})
        async with place.block(connection):
            await place.emit(connection, payload={"n": "innermost"})
    assert place.rows() == []
    await place.api.commit(connection)
    assert place.payloads() == [{"n": "outer"}, {"n": "inner"}, {"n": "innermost"}]


@only(lambda api, kind: not api.sqlalchemy)
async def test_a_closed_connection_has_no_transaction(place: Place) -> None:
    connection = await place.open()
    await place.api.close(connection)
    with pytest.raises(ConnectionClosed):
        async with place.block(connection):
            pass


@only(lambda api, kind: api.name in ("psycopg", "psycopg2", "psycopg-async"))
async def test_a_transaction_in_error_has_no_savepoint(place: Place) -> None:
    connection = await place.begun()
    with pytest.raises(Exception, match="no_such_table"):
        await place.api.run(connection, "SELECT * FROM no_such_table")
    with pytest.raises(TransactionFailed):
        async with place.block(connection):
            pass


async def test_with_and_async_with_are_not_mixed_up(place: Place) -> None:
    connection = await place.open()
    transaction = place.outbox.transaction(connection)
    if place.api.asynchronous:
        with pytest.raises(UnsupportedConnection, match="write `async with`"):
            transaction.__enter__()
    else:
        with pytest.raises(UnsupportedConnection, match="write `with`"):
            await transaction.__aenter__()
