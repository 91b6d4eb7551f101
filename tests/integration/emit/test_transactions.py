"""An event exists if and only if the transaction that emitted it committed, whatever the API."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from relaybox.errors import ConnectionClosed, NotInTransaction, SchemaError, TransactionFailed
from tests.integration.emit.conftest import Place, make_outbox, only, reader, sync_engine


async def test_a_commit_keeps_the_event(place: Place) -> None:
    connection = await place.begun()
    emitted = await place.emit(connection)
    assert place.rows() == []
    await place.api.commit(connection)
    (row,) = place.rows()
    assert (row.event_id, row.destination, row.payload) == (emitted.event_id, "one", {"n": 1})
    assert (emitted.duplicate, emitted.destinations) == (False, ("one",))
    assert (row.aggregate_type, row.event_type, row.status, row.attempts) == (
        "Order",
        "order.paid",
        "pending",
        0,
    )
    assert row.next_attempt_at is not None


async def test_a_rollback_drops_the_event(place: Place) -> None:
    connection = await place.begun()
    await place.emit(connection)
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
        await place.api.emit(
            half, connection, "Order", 1, "order.paid", {}, autocommit=True, idempotency_key=place.id
        )
    assert reader(place.url).execute(sa.select(half.tables.idempotency)).all() == []
    await place.emit(connection, autocommit=True)
    assert len(place.rows()) == 1


async def test_with_autocommit_allowed_an_open_transaction_is_still_the_callers(place: Place) -> None:
    connection = await place.begun()
    await place.emit(connection, autocommit=True, idempotency_key=place.id)
    await place.api.rollback(connection)
    assert place.rows() == []


@only(lambda api, kind: kind.startswith("postgresql"))
async def test_a_transaction_in_error_is_refused_until_it_is_rolled_back(place: Place) -> None:
    connection = await place.begun()
    with pytest.raises(Exception, match="no_such_table"):
        await place.api.run(connection, "SELECT * FROM no_such_table")
    with pytest.raises(TransactionFailed, match="roll it back"):
        await place.emit(connection)
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
