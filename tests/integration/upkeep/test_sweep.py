"""Parked rows that have nothing before them are made due, and no others."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox.config import Destination
from relaybox.maintenance.sweep import Sweep
from relaybox.outcome import Delivered, Failed
from relaybox.relay.clock import MonotonicClock
from relaybox.store import Settlement, Want
from relaybox.stores.upkeep import SqlUpkeep
from relaybox.upkeep import Slice
from tests.integration.upkeep.bench import Bench, go_on, leading, some
from tests.locks import waiters
from tests.waiting import await_for


async def swept(bench: Bench, *destinations: Destination) -> int:
    upkeep = bench.upkeep()
    round_ = await Sweep(upkeep, destinations, MonotonicClock(), go_on)(await leading(upkeep))
    assert round_.led
    return round_.changed


ORDERED = Destination("shop", "console:", ordered=True)
SKIPPING = Destination("shop", "console:", ordered=True, on_failed="skip")
UNORDERED = Destination("shop", "console:")
LEASED = {"lease_token": uuid4(), "lease_owner": "r"}


async def test_a_parked_head_is_made_due_and_what_is_behind_it_stays_parked(bench: Bench) -> None:
    heads = {bench.park("shop", key) for key in "ab"}
    behind = {bench.park("shop", key) for key in "aab"}
    elsewhere = bench.park("other", "a")
    assert await swept(bench, ORDERED) == 2
    assert bench.parked() == {*behind, elsewhere}
    assert await swept(bench, ORDERED) == 0
    claim = await bench.store().claim(Want("shop", "r", ordered=True))
    assert {delivery.id for delivery in claim.deliveries} == {*heads, *behind}


async def test_rows_behind_a_head_that_is_busy_stay_parked(bench: Bench) -> None:
    future = datetime.now(UTC) + timedelta(hours=1)
    bench.put("shop", ordering_key="due")
    bench.put("shop", ordering_key="backs off", next_attempt_at=future)
    bench.put("shop", ordering_key="leased", leased_until=future, **LEASED)
    bench.park("shop", "in flight", leased_until=future, **LEASED)
    bench.put("shop", "failed", ordering_key="failed")
    for key in ("due", "backs off", "leased", "in flight", "failed"):
        bench.park("shop", key)
    before = bench.parked()
    assert await swept(bench, ORDERED) == 0
    assert bench.parked() == before


async def test_a_parked_head_is_made_due_after_its_lease_and_behind_what_is_final(bench: Bench) -> None:
    bench.park("shop", "leased", leased_until=datetime.now(UTC) - timedelta(seconds=1), **LEASED)
    for status in ("delivered", "discarded"):
        bench.put("shop", status, ordering_key="final")
    bench.park("shop", "final")
    assert await swept(bench, ORDERED) == 2


async def test_where_failed_events_no_longer_block_the_next_of_their_key_is_made_due(bench: Bench) -> None:
    bench.put("shop", "failed", ordering_key="k")
    head, behind = bench.park("shop", "k"), bench.park("shop", "k")
    assert await swept(bench, ORDERED) == 0
    assert await swept(bench, SKIPPING) == 1
    assert bench.parked() == {behind}
    claim = await bench.store().claim(Want("shop", "r", ordered=True, on_failed="skip"))
    assert [delivery.id for delivery in claim.deliveries] == [head, behind]


async def test_a_destination_that_is_no_longer_ordered_has_nothing_parked(bench: Bench) -> None:
    future = datetime.now(UTC) + timedelta(hours=1)
    bench.put("shop", "failed", ordering_key="k")
    for key in ("k", "k", "other"):
        bench.park("shop", key)
    in_flight = bench.park("shop", "k", leased_until=future, **LEASED)
    elsewhere = bench.park("nowhere", "k")
    assert await swept(bench, UNORDERED) == 3
    assert bench.parked() == {in_flight, elsewhere}
    assert len((await bench.store().claim(Want("shop", "r"))).deliveries) == 3


async def test_a_sweep_goes_on_behind_the_rows_it_has_seen(bench: Bench) -> None:
    upkeep, term = await bench.leader()
    bench.put("shop", "failed", ordering_key="blocked")
    for _ in range(3):
        bench.park("shop", "blocked")
    bench.park("shop", "free")
    first = some(await upkeep.sweep(term, "shop", True, None, 2))
    assert first.changed == 0
    assert await upkeep.sweep(term, "shop", True, first.after, 3) == Slice(1, None)


async def test_a_sweep_waits_for_a_settle_of_the_same_destination(bench: Bench) -> None:
    if not bench.locks_rows:
        pytest.skip("SQLite has one writer at a time anyway")
    bench.park("shop", "k")
    destination = bench.tables.destination
    bench.execute(sa.insert(destination).values(name="shop"))
    with bench.engine.begin() as connection:
        connection.execute(sa.select(destination.c.name).with_for_update())
        sweeping = asyncio.create_task(swept(bench, ORDERED))
        await await_for(lambda: waiters(bench.engine), "the sweep waits")
        assert not sweeping.done()
    assert await sweeping == 1


async def test_nobody_follows_a_leader_in_the_middle_of_what_it_does(bench: Bench) -> None:
    """The lease of a leader runs out while its sweep waits: the next term begins when the sweep has ended."""
    if not bench.locks_rows:
        pytest.skip("SQLite has one writer at a time anyway")
    bench.park("shop", "k")
    upkeep, other, destination = bench.upkeep(), bench.upkeep(), bench.tables.destination
    bench.execute(sa.insert(destination).values(name="shop"))
    with bench.engine.begin() as connection:
        connection.execute(sa.select(destination.c.name).with_for_update())
        term, sweeping = await sweep_that_waits(bench, upkeep)
        following = asyncio.create_task(follow(other))
        await await_for(lambda: waiters(bench.engine) == 2, "the next leader waits for the sweep")
        assert not sweeping.done()
    assert isinstance(await sweeping, Slice)
    assert await following == term + 1


async def sweep_that_waits(bench: Bench, upkeep: SqlUpkeep) -> tuple[int, asyncio.Task[Any]]:
    """Begin a sweep under a lease that runs out soon, but not before the sweep has begun."""
    for seconds in (1.0, 5.0, 20.0):
        term = some(await upkeep.lead("one", seconds))
        sweeping = asyncio.create_task(upkeep.sweep(term, "shop", True, None, 10))
        await await_for(lambda task=sweeping: task.done() or waiters(bench.engine), "the sweep waits")
        if not sweeping.done():
            break
    return term, sweeping


async def follow(upkeep: SqlUpkeep) -> int:
    return int(await await_for(lambda: upkeep.lead("other", 60.0)))


async def test_sweeps_beside_claims_and_settles_keep_the_order_and_lose_nothing(bench: Bench) -> None:
    rows = [bench.put("shop", ordering_key=f"k{n % 3}") for n in range(60)]
    keys = {id_: n % 3 for n, id_ in enumerate(rows)}
    store, upkeep, seen = bench.store(), bench.upkeep(), []
    term = await leading(upkeep)
    round_ = Sweep(upkeep, [SKIPPING], MonotonicClock(), go_on)

    async def deliver() -> None:
        while len(seen) < len(rows):
            claim = await store.claim(Want("shop", "r", limit=7, ordered=True, on_failed="skip"))
            outcomes = [Failed("no") if len(seen) % 5 == 4 else Delivered()] * len(claim.deliveries)
            settlements = list(map(Settlement, claim.deliveries, outcomes))
            assert not await store.settle(settlements, on_failed="skip")
            seen.extend(delivery.id for delivery in claim.deliveries)

    async def tidy() -> None:
        while len(seen) < len(rows):
            await round_(term)

    async with asyncio.timeout(60):
        await asyncio.gather(deliver(), tidy())
    for key in range(3):
        assert [i for i in seen if keys[i] == key] == [i for i in rows if keys[i] == key]
