"""What is pruned, what is kept, and that only the leader does it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa

from relaybox.core.clock import MonotonicClock
from relaybox.core.settings import Destination
from relaybox.relay.upkeep.agreement import Agreement
from relaybox.relay.upkeep.prune import Prune
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.upkeep import Minute, Slice
from tests.integration.upkeep.bench import DAY, LONG_AGO, Bench, go_on, leading, some


def prune(upkeep: SqlUpkeep, *destinations: Destination) -> Prune:
    return Prune(upkeep.prune, Agreement(upkeep.reports, destinations, "me"), MonotonicClock(), go_on)


@pytest.fixture
def everything(bench: Bench) -> dict[str, UUID]:
    """Rows of every status, all of them very old."""
    return {
        "pending": bench.put("shop", age=LONG_AGO),
        "parked": bench.park("shop", "k", age=LONG_AGO),
        "failed": bench.put("shop", "failed", age=LONG_AGO, ordering_key="k"),
        "delivered": bench.put("shop", "delivered", age=LONG_AGO),
        "discarded": bench.put("shop", "discarded", age=LONG_AGO),
    }


@pytest.mark.parametrize("retention", [0, "1s", "1h", "399d"])
async def test_old_rows_that_are_final_are_pruned_and_no_other_is(
    retention: Any, bench: Bench, everything: dict[str, UUID]
) -> None:
    upkeep = bench.upkeep()
    round_ = await prune(upkeep, Destination("shop", "console:", retention=retention))(await leading(upkeep))
    assert (round_.changed, round_.done, round_.led) == (2, True, True)
    assert bench.ids() == {everything[name] for name in ("pending", "parked", "failed")}


@pytest.mark.parametrize("retention", ["401d", "3650d", "36500d"])
async def test_what_is_too_young_is_kept(retention: str, bench: Bench, everything: dict[str, UUID]) -> None:
    upkeep = bench.upkeep()
    destination = Destination("shop", "console:", retention=retention)
    assert (await prune(upkeep, destination)(await leading(upkeep))).changed == 0
    assert bench.ids() == set(everything.values())


async def test_each_destination_has_its_own_retention_and_what_nobody_knows_is_kept(bench: Bench) -> None:
    upkeep = bench.upkeep()
    kept = {
        bench.put("short", "delivered", age=30),
        bench.put("long", "delivered", age=8 * DAY),
        bench.put("long", "discarded", age=8 * DAY),
        bench.put("unknown", "delivered", age=LONG_AGO),
        bench.put("unknown", "discarded", age=LONG_AGO),
        bench.put("", "discarded", age=6 * DAY),
    }
    for status in ("delivered", "discarded"):
        bench.put("short", status, age=90)
    bench.put("", "discarded", age=8 * DAY)
    destinations = [
        Destination("short", "console:", retention="1m"),
        Destination("long", "console:", retention="30d"),
    ]
    assert (await prune(upkeep, *destinations)(await leading(upkeep))).changed == 3
    assert bench.ids() == kept


async def test_attempts_go_with_their_delivery_and_orphans_too(bench: Bench) -> None:
    upkeep = bench.upkeep()
    failed = bench.put("shop", "failed", age=LONG_AGO)
    for delivery in (failed, bench.put("shop", "delivered", age=LONG_AGO), uuid4()):
        bench.attempt(delivery)
    await prune(upkeep, Destination("shop", "console:"))(await leading(upkeep))
    assert bench.column(bench.tables.attempt.c.delivery_id) == [failed]


async def test_the_side_tables_are_pruned_by_age(bench: Bench) -> None:
    upkeep, now = bench.upkeep(), datetime.now(UTC)
    for days in (29, 31):
        then = now - timedelta(days=days)
        await upkeep.record([Minute(then, "shop", str(days), 1, 0, 0, {})])
    for days in (6, 8):
        for consumer in ("billing", "shipping"):
            mark = {"consumer": consumer, "message_id": str(days)}
            then = now - timedelta(days=days)
            bench.execute(sa.insert(bench.tables.inbox).values(**mark, processed_at=then))
    for days in (364, 366):
        values = {"actor": str(days), "action": "retry", "details": {}, "at": now - timedelta(days=days)}
        bench.execute(sa.insert(bench.tables.audit).values(**values))
    round_ = await prune(upkeep)(await leading(upkeep))
    assert round_.changed == 4
    assert bench.column(bench.tables.inbox.c.message_id) == ["6", "6"]
    assert bench.column(bench.tables.stats.c.relay) == ["29"]
    assert bench.column(bench.tables.audit.c.actor) == ["364"]


async def test_the_inbox_remembers_for_its_window(bench: Bench) -> None:
    upkeep, now = bench.upkeep(), datetime.now(UTC)
    for hours in range(5):
        values = {"consumer": "c", "message_id": str(hours), "processed_at": now - timedelta(hours=hours)}
        bench.execute(sa.insert(bench.tables.inbox).values(**values))
    nothing = Agreement(upkeep.reports, [], "me")
    pruned = Prune(upkeep.prune, nothing, MonotonicClock(), go_on, inbox_window=2.5 * 3600)
    assert (await pruned(await leading(upkeep))).changed == 2
    assert sorted(bench.column(bench.tables.inbox.c.message_id)) == ["0", "1", "2"]


async def test_a_batch_removes_the_oldest_first_and_the_next_goes_on_where_it_ended(bench: Bench) -> None:
    upkeep, term = await bench.leader()
    rows = [bench.put("shop", "delivered", age=100 - n) for n in range(5)]
    first = some(await upkeep.prune.delivered(term, "shop", 0.0, None, 2))
    assert (first.changed, bench.ids()) == (2, set(rows[2:]))
    earlier = bench.put("shop", "delivered", age=200)
    assert await upkeep.prune.delivered(term, "shop", 0.0, first.after, 10) == Slice(3, None)
    assert bench.ids() == {earlier}, "it is left to the next round"


async def test_a_time_of_delivery_that_is_not_text_does_not_stop_a_batch(bench: Bench) -> None:
    spoil(bench, "delivered", "delivered_at = CAST('2020' || x'ff' AS TEXT)")
    upkeep, term = await bench.leader()
    step = some(await upkeep.prune.delivered(term, "shop", 0.0, None, 2))
    assert (step.changed, bench.ids()) == (2, set())


async def test_a_walk_goes_on_after_an_id_that_is_not_a_uuid(bench: Bench) -> None:
    spoil(bench, "discarded", "id = '~'")
    upkeep, term = await bench.leader()
    step = some(await upkeep.prune.discarded(term, lambda _: 0.0, None, 2))
    assert step.changed == 2
    assert step.after is not None


def spoil(bench: Bench, status: str, values: str) -> None:
    """Put two old rows and edit the first by hand."""
    if bench.engine.dialect.name != "sqlite":
        pytest.skip("only SQLite keeps a value of another type than that of the column")
    spoilt, _ = (bench.put("shop", status, age=LONG_AGO) for _ in range(2))
    with bench.engine.begin() as connection:
        connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        update = f"UPDATE outbox_event SET {values} WHERE id = ?"  # noqa: S608
        connection.exec_driver_sql(update, (spoilt.hex,))


async def test_walks_go_through_the_whole_table_step_by_step(bench: Bench) -> None:
    upkeep, term = await bench.leader()
    for status in ("discarded", "pending", "discarded", "failed", "discarded"):
        bench.attempt(bench.put("shop", status, age=100))
        bench.attempt(uuid4())
    assert await walk(partial(prune_discarded, upkeep, term)) == (3, 3)
    assert await walk(partial(upkeep.prune.orphans, term, limit=2)) == (5, 4)
    assert set(bench.column(bench.tables.attempt.c.delivery_id)) == bench.ids()
    assert len(bench.ids()) == 2


async def walk(step: Callable[..., Awaitable[Slice[UUID] | None]]) -> tuple[int, int]:
    """Walk from end to end; return the rows changed and the steps taken."""
    changed, steps, after = 0, 0, None
    while steps == 0 or after is not None:
        walked = some(await step(after=after))
        after, changed, steps = walked.after, changed + walked.changed, steps + 1
    return changed, steps


async def prune_discarded(upkeep: SqlUpkeep, term: int, after: UUID | None = None) -> Slice[UUID] | None:
    return await upkeep.prune.discarded(term, lambda _: 0.0, after, 2)


async def test_rows_that_somebody_has_locked_are_stepped_over(bench: Bench) -> None:
    if not bench.locks_rows:
        pytest.skip("SQLite has no row locks")
    upkeep, event = bench.upkeep(), bench.tables.event
    term = await leading(upkeep)
    locked, _ = (bench.put("shop", "delivered", age=100) for _ in range(2))
    with bench.engine.begin() as connection:
        connection.execute(sa.select(event.c.id).where(event.c.id == locked).with_for_update())
        async with asyncio.timeout(60):
            assert await upkeep.prune.delivered(term, "shop", 0.0, None, 10) == Slice(1, None)
    assert bench.ids() == {locked}


async def test_what_a_former_leader_does_has_no_effect(bench: Bench, everything: dict[str, UUID]) -> None:
    zombie, upkeep = bench.upkeep(), bench.upkeep()
    old = await leading(zombie, "zombie")
    bench.age(bench.tables.leader.c.leads_until, 61)
    stuck = bench.park("shop", "other")
    before = snapshot(bench)
    assert await tell_all(zombie, old) == [None] * 7, "its lease is over, though nobody followed"
    assert await leading(upkeep, "new") > old
    assert await tell_all(zombie, old) == [None] * 7, "another leads"
    assert not (await prune(zombie)(old)).led
    assert snapshot(bench) == before
    assert stuck in bench.parked()


async def tell_all(upkeep: SqlUpkeep, term: int) -> list[Any]:
    """Return every job of the leader."""
    histories = ("inbox", "stats", "audit")
    return [
        await upkeep.prune.delivered(term, "shop", 0.0, None, 10),
        await prune_discarded(upkeep, term),
        await upkeep.prune.orphans(term, None, 10),
        await upkeep.prune.keys(term, 0.0, None, 10),
        *[await upkeep.prune.history(term, name, 0.0, 10) for name in histories],
    ]


def snapshot(bench: Bench) -> list[Any]:
    event = bench.tables.event.c
    query = sa.select(event.id, event.status, event.next_attempt_at, event.updated_at).order_by(event.id)
    with bench.engine.connect() as connection:
        return list(connection.execute(query).all())
