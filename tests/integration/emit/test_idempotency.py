"""A second event of the same type and key writes nothing, returns the first's id, and raises nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from relaybox import Call, Destination, Emitted, Route
from relaybox.errors import EmitError
from tests.integration.emit.conftest import DESTINATIONS, ROUTES, Place, make_outbox, only

not_sqlite = only(lambda api, kind: kind != "sqlite")
RETRYABLE = ("40001", "40P01", "1213", "1205", "1020", "locked")


async def in_background(place: Place, awaitable: Awaitable[Any]) -> asyncio.Task[Any]:
    """Run it apart; a synchronous API would hold up the event loop, so it gets a thread with a loop."""
    if place.api.asynchronous:
        return asyncio.ensure_future(awaitable)  # type: ignore[arg-type]
    return asyncio.ensure_future(asyncio.to_thread(asyncio.run, awaitable))  # type: ignore[arg-type]


def is_retryable(error: BaseException) -> bool:
    """True if it is a database's own error that callers know to retry, not one of ours."""
    beneath: Any = getattr(error, "orig", None) or error
    code = getattr(beneath, "sqlstate", None) or getattr(beneath, "pgcode", None) or beneath.args[0]
    return not isinstance(error, EmitError) and any(known in str(code) for known in RETRYABLE)


async def test_twice_in_one_transaction(place: Place) -> None:
    connection = await place.begun()
    first = await place.emit(connection, payload={"n": 1}, idempotency_key=place.id)
    second = await place.emit(connection, payload={"n": 2}, idempotency_key=place.id)
    await place.api.commit(connection)
    assert second == Emitted(first.event_id, True, ())
    assert place.payloads() == [{"n": 1}]
    assert [row.idempotency_key for row in place.rows()] == [place.id]


async def test_twice_in_one_call(place: Place) -> None:
    connection = await place.begun()
    calls = [Call("Order", place.id, "order.x", n, idempotency_key=place.id) for n in range(3)]
    emitted = await place.api.emit_many(place.outbox, connection, calls)
    await place.api.commit(connection)
    assert [one.duplicate for one in emitted] == [False, True, True]
    assert {one.event_id for one in emitted} == {emitted[0].event_id}
    assert place.payloads() == [0]


@pytest.mark.parametrize("commits", [True, False])
async def test_a_key_is_kept_by_a_commit_and_forgotten_by_a_rollback(place: Place, commits: bool) -> None:
    connection = await place.begun()
    first = await place.emit(connection, idempotency_key=place.id)
    await (place.api.commit if commits else place.api.rollback)(connection)
    await place.api.begin(connection)
    second = await place.emit(connection, idempotency_key=place.id)
    await place.api.commit(connection)
    assert second.duplicate is (second.event_id == first.event_id) is commits
    assert [row.event_id for row in place.rows()] == [second.event_id]


@pytest.mark.parametrize("commits", [True, False])
async def test_a_duplicate_waits_and_is_new_unless_the_first_transaction_commits(
    place: Place, commits: bool
) -> None:
    one, two = await place.begun(), await place.begun()
    first = await place.emit(one, payload={"n": 1}, idempotency_key=place.id)
    second = await in_background(place, place.emit(two, payload={"n": 2}, idempotency_key=place.id))
    await place.wait_until_blocked()
    await (place.api.commit if commits else place.api.rollback)(one)
    emitted = await second
    assert emitted == Emitted(first.event_id, True, ()) if commits else not emitted.duplicate
    await place.api.commit(two)
    assert place.payloads() == [{"n": 1 if commits else 2}]


async def test_keys_belong_to_their_event_type(place: Place) -> None:
    connection = await place.begun()
    for event_type in ("order.paid", "order.sent", "order.paid"):
        await place.emit(connection, event_type, idempotency_key=place.id)
    await place.api.commit(connection)
    assert [row.event_type for row in place.rows()] == ["order.paid", "order.sent"]


async def test_keys_that_differ_in_case_blanks_or_accents_are_different(place: Place) -> None:
    keys = [place.id + end for end in ("a", "A", "a ", " a", "ä", "a\u0308", "á", "ß", "ss")]
    connection = await place.begun()
    for key in keys:
        emitted = await place.emit(connection, idempotency_key=key)
        assert not emitted.duplicate, key
    await place.api.commit(connection)
    assert [row.idempotency_key for row in place.rows()] == keys


async def test_a_destination_added_in_between_does_not_get_the_first_event_again(place: Place) -> None:
    later = make_outbox(
        place.url,
        destinations=[*DESTINATIONS, Destination("three", "memory:")],
        routes=[*ROUTES, Route("order.*", to="three")],
    )
    connection = await place.begun()
    first = await place.emit(connection, idempotency_key=place.id)
    second = await place.emit(connection, outbox=later, idempotency_key=place.id)
    fresh = await place.emit(connection, outbox=later, idempotency_key=f"{place.id}!")
    await place.api.commit(connection)
    assert second == Emitted(first.event_id, True, ())
    assert fresh.destinations == ("one", "three")
    assert [row.destination for row in place.rows()] == ["one", "one", "three"]


@not_sqlite
async def test_opposite_orders_in_two_calls_do_not_deadlock(place: Place) -> None:
    holder, one, two = await place.begun(), await place.begun(), await place.begun()
    calls = [Call("Order", place.id, "order.x", n, idempotency_key=f"{place.id}-{n}") for n in range(3)]
    # Both stop in the middle, each with the keys it took first.
    await place.api.emit_many(place.outbox, holder, calls[1:2])
    first = await in_background(place, place.api.emit_many(place.outbox, one, calls))
    await place.wait_until_blocked(1)
    second = await in_background(place, place.api.emit_many(place.outbox, two, calls[::-1]))
    await place.wait_until_blocked(2)
    await place.api.rollback(holder)
    ids = [emitted.event_id for emitted in await first]
    await place.api.commit(one)
    assert [emitted.event_id for emitted in await second] == ids[::-1]
    await place.api.commit(two)
    assert place.payloads() == [0, 1, 2]


@not_sqlite
async def test_opposite_orders_in_single_calls_end_in_success_or_a_retryable_error(place: Place) -> None:
    one, two = await place.begun(), await place.begun()
    if place.kind != "mariadb":
        for connection in (one, two):
            await place.api.run(connection, "SET LOCAL deadlock_timeout = '10ms'")
    await place.emit(one, idempotency_key=f"{place.id}-a")
    await place.emit(two, idempotency_key=f"{place.id}-b")
    first = await in_background(place, place.emit(one, idempotency_key=f"{place.id}-b"))
    await place.wait_until_blocked()
    second = await in_background(place, place.emit(two, idempotency_key=f"{place.id}-a"))
    results: list[Any] = [None, None]
    for index in (0, 1):
        # Whichever the database gives up rolls back, and lets the other one go on.
        done, _ = await asyncio.wait({first, second} - set(results), return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        results[index] = task
        connection = one if task is first else two
        await (place.api.rollback if task.exception() else place.api.commit)(connection)
    errors = [error for task in (first, second) if (error := task.exception())]
    assert errors
    assert all(is_retryable(error) for error in errors)
    assert len(place.rows()) == 2


@not_sqlite
async def test_under_repeatable_read_it_is_the_first_id_or_a_retryable_error(place: Place) -> None:
    one, two = await place.open(), await place.open()
    for connection in (one, two):
        await repeatable_read(place, connection)
    await place.api.run(two, "SELECT count(*) FROM outbox_event")  # fixes its snapshot
    first = await place.emit(one, payload={"n": 1}, idempotency_key=place.id)
    second = await in_background(place, place.emit(two, payload={"n": 2}, idempotency_key=place.id))
    await place.wait_until_blocked()
    await place.api.commit(one)
    try:
        assert await second == Emitted(first.event_id, True, ())
        await place.api.commit(two)
    except Exception as error:
        if not is_retryable(error):
            raise
        await place.api.rollback(two)
    assert place.payloads() == [{"n": 1}]


async def repeatable_read(place: Place, connection: Any) -> None:
    if place.kind == "mariadb":  # where it is the default
        assert "REPEATABLE-READ" in str(await place.api.run(connection, "SELECT @@tx_isolation"))
        return
    await place.api.begin(connection)
    await place.api.run(connection, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
