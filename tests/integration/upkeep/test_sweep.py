"""Parked rows that have nothing before them are made due, and no others."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox.core.clock import MonotonicClock
from relaybox.core.outcome import Delivered, Failed
from relaybox.core.settings import Destination
from relaybox.relay.upkeep.agreement import Agreement
from relaybox.relay.upkeep.sweep import Sweep
from relaybox.stores.store import Settlement, Want
from tests.integration.upkeep.bench import Bench, go_on
from tests.locks import waiters
from tests.waiting import await_for


async def swept(bench: Bench, *destinations: Destination) -> int:
    upkeep = bench.upkeep()
    agreement = Agreement(upkeep.reports, destinations, "me")
    await upkeep.reports.outdate("me")
    return (await Sweep(upkeep.sweep, agreement, MonotonicClock(), go_on)()).changed


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


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_a_sweep_goes_on_behind_the_keys_it_has_seen(bench: Bench, limit: int) -> None:
    upkeep = bench.upkeep()
    for key in ("", "a", "b", "c", "ü", "ÿ\u2028"):
        bench.put("shop", "failed", ordering_key=key)
        for _ in range(3):
            bench.park("shop", key)
    heads = {bench.park("shop", key) for key in ("'a", "aa", "z", "𐀀")}
    before, changed = bench.parked(), 0
    after = None
    while (slice_ := await upkeep.sweep.make_due("shop", True, after, limit)).after is not None:
        changed += slice_.changed
        after = slice_.after
    assert changed + slice_.changed == 4
    assert before - bench.parked() == heads


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


async def test_sweeps_beside_claims_and_settles_keep_the_order_and_lose_nothing(bench: Bench) -> None:
    rows = [bench.put("shop", ordering_key=f"k{n % 3}") for n in range(60)]
    keys = {id_: n % 3 for n, id_ in enumerate(rows)}
    store, seen = bench.store(), []
    upkeep = bench.upkeep()
    round_ = Sweep(upkeep.sweep, Agreement(upkeep.reports, [SKIPPING], "me"), MonotonicClock(), go_on)

    async def deliver() -> None:
        while len(seen) < len(rows):
            claim = await store.claim(Want("shop", "r", limit=7, ordered=True, on_failed="skip"))
            outcomes = [Failed("no") if len(seen) % 5 == 4 else Delivered()] * len(claim.deliveries)
            settlements = list(map(Settlement, claim.deliveries, outcomes))
            assert not await store.settle(settlements, on_failed="skip")
            seen.extend(delivery.id for delivery in claim.deliveries)

    async def tidy() -> None:
        while len(seen) < len(rows):
            await round_()

    async with asyncio.timeout(60):
        await asyncio.gather(deliver(), tidy())
    for key in range(3):
        assert [i for i in seen if keys[i] == key] == [i for i in rows if keys[i] == key]
