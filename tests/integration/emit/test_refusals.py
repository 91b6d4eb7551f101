"""What cannot be stored is refused before anything reaches the database; the caller's transaction goes on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from relaybox import Call
from relaybox.errors import EmitError, InvalidField, PayloadError, UnknownDestination, Unrouted
from tests.integration.emit.conftest import Place, only


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@dataclass(frozen=True, slots=True)
class Refusal:
    """Arguments that differ from those of a good call, and the error they bring."""

    error: type[EmitError]
    match: str
    arguments: dict[str, Any]


def payload(value: Any, match: str) -> Refusal:
    return Refusal(PayloadError, match, {"payload": value})


def option(error: type[EmitError], match: str, **options: Any) -> Refusal:
    return Refusal(error, match, options)


REFUSALS = {
    "nan": payload({"a": [1, float("nan")]}, r"\$\.a\[1\]"),
    "infinity": payload({"a": float("inf")}, r"\$\.a"),
    "surrogate": payload({"a": "\ud800"}, r"\$\.a.*surrogate"),
    "nul": payload({"a": "x\0y"}, r"\$\.a.*NUL"),
    "nul in a key": payload({"x\0y": 1}, r"NUL"),
    "huge integer": payload({"a": 2**70}, r"\$\.a"),
    "too deep": payload(nested(501), r"nested"),
    "holds itself": payload((lambda loop: loop.append(loop) or loop)([]), r"nested"),  # type: ignore[func-returns-value]
    "not serialisable": payload({"lines": [{"price": object()}]}, r"\$\.lines\[0\]\.price"),
    "naive datetime": payload({"at": datetime(2025, 1, 1)}, r"\$\.at.*timezone"),
    "bytes inside": payload({"a": b"x"}, r"\$\.a"),
    "too large": payload({"a": "x" * 1_100_000}, r"limit"),
    "too large, binary": payload(b"x" * 1_100_000, r"limit"),
    "no aggregate type": option(InvalidField, "aggregate_type", aggregate_type=""),
    "no aggregate id": option(InvalidField, "aggregate_id", aggregate_id=""),
    "no event type": option(InvalidField, "event_type", event_type=""),
    "long aggregate type": option(InvalidField, "at most 100", aggregate_type="x" * 101),
    "long aggregate id": option(InvalidField, "at most 255", aggregate_id="x" * 256),
    "long event type": option(InvalidField, "at most 100", event_type="order." + "x" * 100),
    "long idempotency key": option(InvalidField, "at most 255", idempotency_key="x" * 256),
    "no idempotency key": option(InvalidField, "idempotency_key", idempotency_key=""),
    "aggregate id of None": option(InvalidField, "aggregate_id", aggregate_id=None),
    "aggregate id of a bool": option(InvalidField, "aggregate_id", aggregate_id=True),
    "aggregate id with a NUL": option(InvalidField, "NUL", aggregate_id="x\0"),
    "aggregate id with a surrogate": option(InvalidField, "surrogate", aggregate_id="\ud800"),
    "gigantic aggregate id": option(InvalidField, "bits", aggregate_id=10**5000),
    "event type that is not a str": option(InvalidField, "event_type", event_type=1),
    "unrouted": option(Unrouted, "no route takes", event_type="nobody.asked"),
    "unknown destination": option(UnknownDestination, "did you mean 'one'", destinations=["oen"]),
    "no destinations": option(InvalidField, "at least one", destinations=[]),
    "naive deliver_at": option(InvalidField, "time zone", deliver_at=datetime(2025, 1, 1)),
    "deliver_at that is not a datetime": option(InvalidField, "datetime", deliver_at="tomorrow"),
    "deliver_at where ordered": option(
        InvalidField, "is ordered", deliver_at=datetime(2040, 1, 1, tzinfo=UTC), event_type="ordered.x"
    ),
    "no attempts": option(InvalidField, "max_attempts", max_attempts=0),
    "attempts that are no number": option(InvalidField, "max_attempts", max_attempts=True),
    "headers that are no mapping": option(PayloadError, "headers", headers=["x"]),
    "headers that are no mapping, and a tenant": option(PayloadError, "headers", headers=["x"], tenant="t"),
    "a mark of ours": option(PayloadError, "relaybox-\\*", headers={"relaybox-shadow": True}),
    "a mark in other letters": option(PayloadError, "'Relaybox-Index'", headers={"Relaybox-Index": "x"}),
    "bad header": option(PayloadError, r"headers\.a", headers={"a": float("nan")}),
    "no tenant where ordered by it": option(InvalidField, "tenant", destinations=["by_tenant"]),
    "long tenant": option(InvalidField, "at most 255", tenant="x" * 256),
    "key that is not a str": option(InvalidField, "key", key=1, event_type="ordered.x"),
}

ONE_API_A_DATABASE = {
    ("psycopg", "postgresql-18"),
    ("asyncpg", "postgresql-15"),
    ("pymysql", "mariadb"),
    ("aiosqlite", "sqlite"),
}


async def refused(place: Place, connection: Any, refusal: Refusal) -> None:
    good = {"aggregate_type": "Order", "aggregate_id": place.id, "event_type": "order.paid", "payload": 1}
    with pytest.raises(refusal.error, match=refusal.match):
        await place.api.emit(place.outbox, connection, **good | refusal.arguments)


async def test_each_is_refused_and_the_transaction_goes_on(place: Place) -> None:
    connection = await place.begun()
    await place.emit(connection, payload={"n": "before"})
    for refusal in REFUSALS.values():
        await refused(place, connection, refusal)
    await place.emit(connection, payload={"n": "after"})
    await place.api.commit(connection)
    assert place.payloads() == [{"n": "before"}, {"n": "after"}]


@only(lambda api, kind: (api.name, kind) in ONE_API_A_DATABASE or api.name == "AsyncSession-aiosqlite")
async def test_an_error_of_several_calls_says_which(place: Place) -> None:
    connection = await place.begun()
    arguments = ("Order", place.id, "order.paid", 1)
    good: dict[str, Any] = dict(zip(Call.__struct_fields__, arguments, strict=False))
    misspelt = {"evnt_type" if name == "event_type" else name: value for name, value in good.items()}

    async def error(calls: Any) -> Any:
        with pytest.raises(EmitError) as raised:
            await place.api.emit_many(place.outbox, connection, calls)
        return raised.value

    bad_payload = await error([good, {**good, "payload": {"x": float("nan")}}])
    assert (type(bad_payload), bad_payload.path) == (PayloadError, "$.x")
    assert str(bad_payload).startswith("calls[1]: $.x: ")
    bad_field = await error([Call(**good), Call(**{**good, "aggregate_type": ""})])
    assert (type(bad_field), bad_field.field) == (InvalidField, "aggregate_type")
    assert str(bad_field).startswith("calls[1]: aggregate_type=''")
    assert str(await error([{**good, "event_type": "nobody.asked"}])).startswith("calls[0]: no route takes")
    for bad, match in ((misspelt, "did you mean 'event_type'?"), (7, "give Call objects"), ({}, "required")):
        unlike = await error([good, bad])
        assert isinstance(unlike, InvalidField)
        assert str(unlike).startswith("calls[1]")
        assert match in str(unlike)
    for lone in (Call(**good), good, 7, None, "order.paid"):
        assert "give a list of Call objects" in str(await error(lone))


async def test_one_bad_call_of_several_writes_none(place: Place) -> None:
    connection = await place.begun()
    good = {"aggregate_type": "Order", "aggregate_id": place.id, "event_type": "order.paid", "payload": 1}
    for bad in ({**good, "payload": float("nan")}, {**good, "aggregate_type": ""}, {**good, "no_such": 1}, 7):
        with pytest.raises(EmitError):
            await place.api.emit_many(place.outbox, connection, [good, bad])
    await place.api.commit(connection)
    assert place.rows() == []
