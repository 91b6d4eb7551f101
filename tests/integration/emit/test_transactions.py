"""An event exists if and only if its transaction, or the block ``outbox.transaction()``, committed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from relaybox.errors import (
    ConnectionClosed,
    NotInTransaction,
    SchemaError,
    TransactionFailed,
    UnsupportedConnection,
)
from tests.databases import EVERY_KIND
from tests.integration.emit.apis import PLACES
from tests.integration.emit.conftest import Place, make_outbox, only, reader, sync_engine
from tests.integration.shop import Databases


async def test_a_commit_keeps_the_event(place: Place) -> None:
    connection = await place.begun()
    emitted = await place.emit(connection)
    assert place.rows() == []
    await place.api.commit(connection)
    (row,) = place.rows()
    assert (row.event_id, row.destination, row.payload) == (emitted.event_id, "one", {"n": 1})
    assert (emitted.duplicate, emitted.destinations) == (False, ("one",))
    found = (row.aggregate_type, row.event_type, row.status, row.attempts)
    assert found == ("Order", "order.paid", "pending", 0)
    assert row.next_attempt_at is not None


async def test_a_rollback_drops_the_event_also_where_autocommit_is_allowed(place: Place) -> None:
    for options in ({}, {"autocommit": True, "idempotency_key": place.id}):
        connection = await place.begun()
        await place.emit(connection, **options)
        await place.api.rollback(connection)
        assert place.rows() == []


async def test_a_savepoint_that_is_rolled_back_drops_its_events_only(place: Place) -> None:
    connection = await place.begun()
    await place.emit(connection, payload={"n": "outer"})
    roll_back = await place.api.savepoint(connection)
    await place.emit(connection, payload={"n": "inner"})
    await roll_back()
    await place.emit(connection, payload={"n": "after"})
    await place.api.commit(connection)
    assert place.payloads() == [{"n": "outer"}, {"n": "after"}]


async def test_without_a_begin_it_works_exactly_where_the_driver_begins_by_itself(place: Place) -> None:
    connection = await place.open()
    if place.api.begins_by_itself:
        await place.emit(connection)
        assert place.rows() == []
        await place.api.commit(connection)
        assert len(place.rows()) == 1
    else:
        with pytest.raises(NotInTransaction, match=r"autocommit=True"):
            await place.emit(connection)


async def test_in_autocommit_it_refuses_and_leaves_the_connection_usable(place: Place) -> None:
    connection = await place.open(autocommit=True)
    asynchronous = "async" if place.api.asynchronous else ""
    advice = rf"`{asynchronous} ?with outbox\.transaction\(connection\):`"
    if place.api.sqlalchemy:
        call = "call await" if place.api.asynchronous else "call"
        advice = rf"{call} connection\.execution_options\(isolation_level=.*autocommit=True"
    with pytest.raises(NotInTransaction, match=advice):
        await place.emit(connection)
    assert place.rows() == []
    await place.emit(connection, autocommit=True)
    assert len(place.rows()) == 1


async def test_in_autocommit_a_transaction_begun_by_hand_is_enough(place: Place) -> None:
    connection = await place.open(autocommit=True)
    await place.api.run(connection, "BEGIN")
    await place.emit(connection)
    assert place.rows() == []
    await place.api.run(connection, "COMMIT")
    assert len(place.rows()) == 1


async def test_with_autocommit_allowed_an_event_and_its_key_are_written_together(place: Place) -> None:
    connection = await place.open(autocommit=True)
    calls = [call(place, n, idempotency_key=f"{place.id}-{n}") for n in range(3)]
    await place.api.emit_many(place.outbox, connection, calls, autocommit=True)
    assert place.payloads() == [{"n": 0}, {"n": 1}, {"n": 2}]
    again = await place.api.emit_many(place.outbox, connection, calls, autocommit=True)
    assert [emitted.duplicate for emitted in again] == [True] * 3
    with pytest.raises(NotInTransaction):
        await place.emit(connection)


async def test_with_autocommit_allowed_a_key_is_not_kept_without_its_event(place: Place) -> None:
    half = make_outbox(place.url, prefix="half_")
    half.tables.idempotency.create(sync_engine(place.url), checkfirst=True)
    connection = await place.open(autocommit=True)
    with pytest.raises(SchemaError):
        await place.emit(connection, outbox=half, autocommit=True, idempotency_key=place.id)
    assert reader(place.url).execute(sa.select(half.tables.idempotency)).all() == []
    await place.emit(connection, autocommit=True)
    assert len(place.rows()) == 1


@only(lambda api, kind: kind.startswith("postgresql"))
async def test_a_transaction_in_error_is_refused_until_it_is_rolled_back(place: Place) -> None:
    connection = await place.begun()
    with pytest.raises(Exception, match="no_such_table"):
        await place.api.run(connection, "SELECT * FROM no_such_table")
    with pytest.raises(TransactionFailed, match="roll it back"):
        await place.emit(connection)
    if place.api.name.startswith("psycopg"):
        with pytest.raises(TransactionFailed):
            await place.emit_and_fail(connection)
    await place.api.rollback(connection)
    await place.api.begin(connection)
    await place.emit(connection)
    await place.api.commit(connection)
    assert len(place.rows()) == 1


@only(lambda api, kind: api.can_be_closed)  # a session that was closed opens again
async def test_a_closed_connection_is_refused(place: Place) -> None:
    connection = await place.open()
    await place.api.close(connection)
    with pytest.raises(ConnectionClosed, match="closed"):
        await place.emit(connection)
    if not place.api.sqlalchemy:
        with pytest.raises(ConnectionClosed):
            await place.emit_and_fail(connection)


async def test_events_of_one_call_stand_in_its_order(place: Place) -> None:
    connection = await place.begun()
    calls = [call(place, n, idempotency_key=f"{place.id}-{-n}") for n in range(20)]
    emitted = await place.api.emit_many(place.outbox, connection, calls)
    await place.api.commit(connection)
    assert place.payloads() == [{"n": n} for n in range(20)]
    assert [row.event_id for row in place.rows()] == [one.event_id for one in emitted]


def call(place: Place, n: int, **options: Any) -> dict[str, Any]:
    return {
        "aggregate_type": "Order",
        "aggregate_id": place.id,
        "event_type": "order.paid",
        "payload": {"n": n},
        **options,
    }


async def test_a_block_commits_at_its_end(place: Place) -> None:
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


async def test_a_block_rolls_back_when_it_raises_and_can_be_used_again(place: Place) -> None:
    connection = await place.open()
    await place.emit_and_fail(connection, payload={"n": "dropped"})
    assert place.rows() == []
    async with place.block(connection):
        await place.emit(connection)
    assert len(place.rows()) == 1


@only(lambda api, kind: not api.sqlalchemy)
async def test_in_autocommit_a_block_is_a_transaction_and_autocommit_is_back_afterwards(place: Place) -> None:
    connection = await place.open(autocommit=True)
    await place.emit_and_fail(connection, payload={"n": "dropped"})
    async with place.block(connection):
        await place.emit(connection, payload={"n": "kept"})
        assert place.rows() == []
    assert place.payloads() == [{"n": "kept"}]
    with pytest.raises(NotInTransaction):
        await place.emit(connection)


@only(lambda api, kind: api.sqlalchemy)
async def test_sqlalchemy_in_autocommit_has_no_block_and_the_message_says_what_helps(place: Place) -> None:
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


async def test_inside_an_open_transaction_a_block_is_a_savepoint(place: Place) -> None:
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


async def test_with_and_async_with_are_not_mixed_up(place: Place) -> None:
    connection = await place.open()
    transaction = place.outbox.transaction(connection)
    if place.api.asynchronous:
        with pytest.raises(UnsupportedConnection, match="write `async with`"):
            transaction.__enter__()
    else:
        with pytest.raises(UnsupportedConnection, match="write `with`"):
            await transaction.__aenter__()


KILLED = """
import asyncio, sys, time
from tests.integration.emit.apis import APIS
from tests.integration.emit.conftest import make_outbox

async def main():
    kept = []
    for line in sys.stdin:
        name, url = line.split()
        api = next(api for api in APIS if api.name == name)
        connection = await api.open(url)
        await api.begin(connection)
        await api.emit(make_outbox(url), connection, "Order", name, "order.killed", {}, idempotency_key=name)
        kept.append(connection)
    print("emitted", flush=True)
    time.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_process_killed_before_its_commit_leaves_nothing(
    kind: str, migrated_database: Databases, pytestconfig: pytest.Config
) -> None:
    names = [api.name for api, place in PLACES if place == kind]
    # SQLite lets one transaction write at a time, so each API gets a file.
    urls = {name: migrated_database(kind) for name in (names if kind == "sqlite" else names[:1])}
    lines = "".join(f"{name} {urls.get(name, next(iter(urls.values())))}\n" for name in names)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=pytestconfig.rootpath,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(pytestconfig.rootpath)},
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(lines)
        process.stdin.close()
        assert process.stdout.readline() == "emitted\n"
        process.send_signal(signal.SIGKILL)
    for url in urls.values():
        outbox = make_outbox(url)
        with Session(sync_engine(url)) as session, session.begin():
            # A key that a dead transaction still held would be waited for, and be new once it is gone.
            for name in names if len(urls) == 1 else [name for name in names if urls[name] == url]:
                emitted = outbox.emit(session, "Order", name, "order.killed", 1, idempotency_key=name)
                assert not emitted.duplicate
        with sync_engine(url).connect() as connection:
            found = connection.scalar(sa.select(sa.func.count()).select_from(outbox.tables.event))
        assert found == (len(names) if len(urls) == 1 else 1)
