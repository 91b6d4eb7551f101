"""Slow keys of an ordered destination: they take no room that other keys could use."""

from __future__ import annotations

import asyncio

import pytest

from relaybox.config import Destination
from relaybox.event import Event
from relaybox.relay import lane as lane_module
from relaybox.relay.sizing import Sizing
from relaybox.stores.memory import MemoryStore
from tests.unit.deliveries import make as delivery
from tests.unit.lanes import insert, make, running
from tests.waiting import await_for

OTHERS = {f"other {n}" for n in range(20)}


def crowded(keys: int = 4, each: int = 50) -> MemoryStore:
    """Return a store where a few keys have many events, and after them many keys have one."""
    store = MemoryStore()
    for key in (f"slow {n}" for n in range(keys)):
        insert(store, count=each, key=key)
    for key in OTHERS:
        insert(store, key=key)
    return store


@pytest.mark.parametrize("was_fast", [False, True])
async def test_keys_that_hang_leave_room_for_the_others(
    was_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "PATIENCE_FOR_ROOM", 0.02)
    store = crowded()
    came: set[str | None] = set()
    ids = {row.values[1]: row.key for row in store.rows.values()}

    async def handler(event: Event) -> None:
        key = ids[str(event.id)]
        if key not in OTHERS:
            await asyncio.Event().wait()
        came.add(key)

    lane = make(store, handler, ordered=True, batch_size=10, concurrency=8)
    if was_fast:
        lane._sizing._run = 1000
    async with running(lane, patience=0.0):
        await await_for(lambda: came == OTHERS, "what is not slow")


async def test_keys_keep_their_runs_while_every_place_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "PATIENCE_FOR_ROOM", 0.02)
    store = crowded()
    begun, go_on = 0, asyncio.Event()

    async def handler(event: Event) -> None:
        nonlocal begun
        begun += 1
        await go_on.wait()

    lane = make(store, handler, ordered=True, batch_size=10, concurrency=4)
    lane._sizing._run = 1000
    async with running(lane, patience=0.0):
        await await_for(lambda: begun == 4, "the first of each slow key")
        held = len(lane._in_flight)
        await lane._make_room()
        assert len(lane._in_flight) == held, "nothing else could be sent"
        go_on.set()


def test_a_run_grows_while_such_runs_are_fast() -> None:
    sizing = Sizing(Destination("runner", "handler:", ordered=True, batch_size=100, concurrency=50))
    assert sizing.run == 6, "with fewer keys than places in flight there is room for one more claim"
    one, run = delivery(ordering_key="k"), [delivery(ordering_key="k")] * 1000
    sizing.learn_run([one], 0.001)
    sizing.learn_run([delivery(ordering_key=None)] * 10, 0.001)
    assert sizing.run == 6, "nothing is known of longer runs"
    for seconds, longer in ((0.001, 24), (0.1, 96), (0.5, 96), (0.1, 384), (0.1, 1000), (1.5, 6)):
        sizing.learn_run(run, seconds)
        assert sizing.run == longer
