"""Idempotency keys are kept as long as their event is open, and for the window beyond that."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from uuid_utils.compat import uuid7

from relaybox.core.clock import MonotonicClock
from relaybox.core.event import beside
from relaybox.core.settings import Destination
from relaybox.database.statements.upkeep import PROMPT
from relaybox.relay.upkeep.agreement import Agreement
from relaybox.relay.upkeep.prune import Prune
from relaybox.stores.upkeep import Slice
from tests.integration.upkeep.bench import DAY, Bench, go_on, leading, some

WINDOW = 30 * DAY
SHOP = Destination("shop", "console:", retention="1d")


def put_key(bench: Bench, *, age: float, event_id: UUID | None = None, key: str = "k") -> UUID:
    event_id = event_id or uuid7()
    values: dict[str, Any] = {"event_type": "order.paid", "idempotency_key": key, "event_id": event_id}
    values["created_at"] = datetime.now(UTC) - timedelta(seconds=age)
    bench.execute(sa.insert(bench.tables.idempotency).values(**values))
    return event_id


def put_row(bench: Bench, event_id: UUID, status: str = "pending", number: int = 0, **values: Any) -> UUID:
    own = {"id": beside(event_id, number), "event_id": event_id, "idempotency_key": "k"}
    bench.put("shop", status, **own | values)
    return beside(event_id, number)


def keys(bench: Bench) -> list[str]:
    return sorted(bench.column(bench.tables.idempotency.c.idempotency_key))


async def prune(bench: Bench) -> int:
    upkeep = bench.upkeep()
    job = Prune(upkeep.prune, Agreement(upkeep.reports, [SHOP], "me"), MonotonicClock(), go_on)
    return (await job(await leading(upkeep))).changed


@pytest.mark.parametrize("status", ["pending", "failed"])
@pytest.mark.parametrize("number", [0, 1, 7])
async def test_a_key_is_kept_while_any_row_of_its_event_is_open(
    status: str, number: int, bench: Bench
) -> None:
    event_id = put_key(bench, age=400 * DAY)
    row = put_row(bench, event_id, status, number, age=400 * DAY)
    if number:
        put_row(bench, event_id, "delivered", age=400 * DAY)
    await prune(bench)
    await prune(bench)
    assert keys(bench) == ["k"]
    assert bench.ids() == {row}
    event = bench.tables.event
    done = {"status": "delivered", "delivered_at": sa.func.now(), "next_attempt_at": None}
    bench.execute(sa.delete(event) if status == "failed" else sa.update(event).values(**done))
    await prune(bench)
    assert keys(bench) == ["k"], "from now on it is kept for the window"


async def test_a_key_without_an_open_event_is_removed_after_its_window(bench: Bench) -> None:
    put_key(bench, age=WINDOW + PROMPT + 60, key="old")
    put_key(bench, age=WINDOW - 60, key="young")
    event_id = put_key(bench, age=400 * DAY, key="k")
    put_row(bench, event_id, "delivered", age=WINDOW + 2 * PROMPT, created_at=sa.func.now())
    other = put_key(bench, age=400 * DAY, key="other")
    put_row(bench, uuid4(), id=beside(other, 1))
    assert await prune(bench) == 4, "three keys and a row; a row beside it is another event's"
    assert keys(bench) == ["young"]


async def test_a_key_is_kept_for_its_window_after_the_delivery_whose_row_is_removed(bench: Bench) -> None:
    event_id = put_key(bench, age=WINDOW + 20 * DAY)
    then = datetime.now(UTC) - timedelta(seconds=WINDOW + 20 * DAY)
    put_row(bench, event_id, "delivered", age=20 * DAY, created_at=then)
    assert await prune(bench) == 1, "the row, whose retention is a day"
    assert keys(bench) == ["k"]
    created = bench.tables.idempotency.c.created_at
    bench.age(created, 9 * DAY)
    assert await prune(bench) == 0
    assert keys(bench) == ["k"], "it was delivered 29 days ago"
    bench.age(created, DAY + PROMPT)
    assert await prune(bench) == 1
    assert keys(bench) == []


async def test_a_key_of_an_event_that_was_discarded_late_is_kept_too(bench: Bench) -> None:
    event_id = put_key(bench, age=400 * DAY)
    then = datetime.now(UTC) - timedelta(days=400)
    put_row(bench, event_id, "discarded", age=2 * DAY, created_at=then)
    assert await prune(bench) == 1
    assert keys(bench) == ["k"]


async def test_of_a_prompt_delivery_nothing_is_noted_at_the_key(bench: Bench) -> None:
    event_id = put_key(bench, age=20 * DAY)
    before = bench.column(bench.tables.idempotency.c.created_at)
    then = datetime.now(UTC) - timedelta(seconds=20 * DAY)
    put_row(bench, event_id, "delivered", age=20 * DAY - PROMPT / 2, created_at=then)
    assert await prune(bench) == 1
    assert bench.column(bench.tables.idempotency.c.created_at) == before


async def test_keys_that_are_kept_do_not_hold_up_those_behind_them(bench: Bench) -> None:
    upkeep, term = await bench.leader()
    for number in range(5):
        event_id = put_key(bench, age=400 * DAY - number, key=f"open {number}")
        put_row(bench, event_id)
    for number in range(3):
        put_key(bench, age=300 * DAY - number, key=f"old {number}")
    gone, after = [], None
    while not gone or after is not None:
        part = some(await upkeep.prune.keys(term, WINDOW, after, 2))
        after = part.after
        gone.append(part.changed)
    assert gone == [0, 0, 1, 2, 0]
    assert keys(bench) == [f"open {number}" for number in range(5)]
    assert await upkeep.prune.keys(term, WINDOW, None, 2) == Slice(0, None), "they are not looked at again"


async def test_a_row_that_somebody_has_locked_does_not_hold_up_its_key(bench: Bench) -> None:
    if not bench.locks_rows:
        pytest.skip("SQLite has no row locks")
    upkeep, term = await bench.leader()
    event_id, event = put_key(bench, age=400 * DAY), bench.tables.event
    put_row(bench, event_id)
    put_key(bench, age=300 * DAY, key="old")
    with bench.engine.begin() as connection:
        connection.execute(sa.select(event.c.id).with_for_update())
        async with asyncio.timeout(60):
            assert await upkeep.prune.keys(term, WINDOW, None, 10) == Slice(1, None)
    assert keys(bench) == ["k"]


async def test_only_the_leader_looks_at_keys(bench: Bench) -> None:
    upkeep, term = await bench.leader()
    put_key(bench, age=400 * DAY)
    assert await upkeep.prune.keys(term + 1, WINDOW, None, 10) is None
    assert keys(bench) == ["k"]
