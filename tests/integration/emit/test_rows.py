"""What a call becomes in the table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from uuid import uuid4

import pytest

from relaybox import Call
from tests.integration.emit.conftest import Place, make_outbox, only

each_driver = only(
    lambda api, kind: (
        kind != "postgresql-15" and (not api.sqlalchemy or api.name.startswith(("Session", "AsyncSession")))
    )
)


@each_driver
async def test_an_event_for_several_destinations_is_a_row_for_each(place: Place) -> None:
    connection = await place.begun()
    emitted = await place.emit(connection, "both.paid")
    await place.api.commit(connection)
    first, second = place.rows()
    assert emitted.destinations == (first.destination, second.destination) == ("one", "two")
    assert emitted.event_id == first.event_id == second.event_id
    assert first.id != second.id
    assert first.idempotency_key == second.idempotency_key == str(emitted.event_id)


@each_driver
async def test_the_ordering_key_follows_the_strategy(place: Place) -> None:
    names = ["one", "by_aggregate", "by_tenant", "by_type", "by_nothing", "by_function"]
    rows = await place.write({"destinations": names, "tenant": "acme"})
    assert {row.destination: row.ordering_key for row in rows} == {
        "one": None,
        "by_aggregate": f"Order:{place.id}",
        "by_tenant": "acme",
        "by_type": "order.paid",
        "by_nothing": None,
        "by_function": f"f-{place.id}",
    }


@each_driver
async def test_a_key_that_is_given_goes_before_the_strategy(place: Place) -> None:
    given = ["mine", None, "k" * 300, "k" * 300 + "!"]
    rows = await place.write(*({"key": key} for key in given), event_type="ordered.x")
    keys = [row.ordering_key for row in rows]
    assert keys[:2] == ["mine", None]
    assert len(keys[2]) == len(keys[3]) == 255
    assert keys[2] != keys[3]


@each_driver
async def test_what_is_given_arrives_as_it_was(place: Place) -> None:
    payload = {"text": "ä ☃ 🐘 %s :x $1 ? {y} \\ ' \"", "list": [1, 1.5, None, True], "big": 2**63 - 1}
    headers = {"trace": "00-ab", "n": 1}
    data = bytes(range(256)) + b"%s ' \\ \x00"
    at = datetime(2040, 1, 31, 12, 30, 15, 123456, tzinfo=timezone(timedelta(hours=5)))
    empty = [None, 0, "", [], {}, False]
    text, binary, *rest = await place.write(
        {"payload": payload, "headers": headers, "tenant": "acme", "deliver_at": at},
        {"payload": data},
        *({"payload": nothing} for nothing in empty),
    )
    assert (text.payload, text.headers) == (payload, {**headers, "tenant": "acme"})
    assert text.next_attempt_at.replace(tzinfo=text.next_attempt_at.tzinfo or UTC) == at
    assert (binary.payload, bytes(binary.payload_data), binary.payload_encoding) == (None, data, "binary")
    assert [row.payload for row in rest] == empty


@each_driver
async def test_attempts_are_the_calls_else_the_destinations_else_five(place: Place) -> None:
    rows = await place.write({"max_attempts": 3}, {}, event_type="both.x")
    found = [(row.destination, row.max_attempts) for row in rows]
    assert found == [("one", 3), ("two", 3), ("one", 5), ("two", 9)]


@each_driver
async def test_ids_may_be_integers_and_uuids(place: Place) -> None:
    connection = await place.begun()
    event_type, uuid = f"order.{place.id}", uuid4()
    calls = [Call("Order", id_, event_type, {}) for id_ in (7, uuid, "text")]
    await place.api.emit_many(place.outbox, connection, calls)
    query = "SELECT event_type, aggregate_id FROM outbox_event ORDER BY position"
    rows = await place.api.run(connection, query)
    await place.api.commit(connection)
    assert [row[1] for row in rows if row[0] == event_type] == ["7", str(uuid), "text"]


@each_driver
async def test_many_events_are_split_into_statements_in_order(place: Place) -> None:
    connection = await place.begun()
    calls = [Call("Order", place.id, "both.x", {"n": n}) for n in range(600)]
    emitted = await place.api.emit_many(place.outbox, connection, calls)
    await place.api.commit(connection)
    assert [row.payload["n"] for row in place.rows()] == [n for n in range(600) for _ in ("one", "two")]
    assert len({one.event_id for one in emitted}) == 600


@only(lambda api, kind: not api.sqlalchemy and kind != "postgresql-15")
async def test_many_large_events_fit_whatever_the_server_takes_at_once(place: Place) -> None:
    connection = await place.begun()
    calls = [Call("Order", place.id, "order.x", {"n": n, "text": "'" * 900_000}) for n in range(12)]
    await place.api.emit_many(place.outbox, connection, calls)
    await place.api.commit(connection)
    assert [row.payload["n"] for row in place.rows()] == list(range(12))


@each_driver
async def test_no_events_are_no_statement(place: Place) -> None:
    connection = await place.begun()
    assert await place.api.emit_many(place.outbox, connection, []) == []


@each_driver
async def test_an_event_that_no_route_takes_can_be_stored(place: Place) -> None:
    connection = await place.begun()
    outbox = make_outbox(place.url, unrouted="store")
    emitted = await place.emit(connection, "nobody.asked", outbox=outbox)
    await place.api.commit(connection)
    assert emitted.destinations == ("",)
    assert [row.destination for row in place.rows()] == [""]


@each_driver
async def test_the_limit_of_a_payload_is_a_setting(place: Place) -> None:
    outbox = make_outbox(place.url, max_payload="10B")
    connection = await place.begun()
    with pytest.raises(ValueError, match="limit of 10 bytes"):
        await place.emit(connection, payload={"a": "12345678"}, outbox=outbox)
    await place.emit(connection, payload={"a": 1}, outbox=outbox)
    await place.api.commit(connection)
    assert place.payloads() == [{"a": 1}]
