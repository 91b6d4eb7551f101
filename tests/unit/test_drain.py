"""A drain that is stopped, against a store in memory: it ends in time, and what it held is given back."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
from uuid_utils.compat import uuid7

from relaybox.config import Destination
from relaybox.errors import StoreError
from relaybox.event import Event, Status
from relaybox.observe import Observer
from relaybox.relay import lane as lane_module
from relaybox.relay.clock import MonotonicClock
from relaybox.relay.lane import Lane
from relaybox.relay.shared import Shared
from relaybox.sinks.handler import HandlerSink
from relaybox.store import Claim, Settlement, Want
from relaybox.stores.memory import MemoryStore
from relaybox.wakes.local import LocalWake

PATIENCE = 0.1


def insert(store: MemoryStore, count: int, *, key: str | None = None) -> None:
    for n in range(count):
        event = ("Order", str(n), "order.paid", "{}", None, None, "{}")
        store.insert([(str(uuid7()), str(uuid7()), "runner", *event, key, str(uuid7()), 5, None)])


def make(store: MemoryStore, handler: Callable[[Event], Any], **options: Any) -> Lane:
    destination = Destination("runner", "handler:", poll_interval="20ms", **options)
    shared = Shared(store, LocalWake(), Observer(), MonotonicClock(), random.random, "me")
    return Lane(destination, HandlerSink(destination, handler), shared)


def rows(store: MemoryStore) -> list[tuple[Status, int, bool]]:
    """The state and the attempts of each row, and whether it is leased."""
    return [(row.status, row.attempts, row.lease_token is not None) for row in store.rows.values()]


class Hanging:
    """A handler that does not answer, and tells that it was called."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def __call__(self, event: Event) -> None:
        self.called.set()
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "PATIENCE_TO_SETTLE", 0.1)


async def stopped(lane: Lane, store: MemoryStore, when: asyncio.Event) -> bool:
    """Stop a drain when something happened; what it says, if it ends in time."""
    draining = asyncio.create_task(lane.drain(await store.now(), PATIENCE))
    async with asyncio.timeout(10):
        await when.wait()
        began = time.monotonic()
        lane.stop()
        drained = await draining
    assert time.monotonic() - began < 2
    return drained


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_drain_that_is_stopped_has_patience_with_a_handler_that_hangs_and_no_more(
    ordered: bool,
) -> None:
    store, hanging = MemoryStore(), Hanging()
    insert(store, 30, key="a" if ordered else None)
    assert not await stopped(make(store, hanging, ordered=ordered, concurrency=5), store, hanging.called)
    assert rows(store) == [(Status.PENDING, 0, False)] * 30


async def test_a_thread_that_hangs_is_left_to_itself() -> None:
    store, called, go_on = MemoryStore(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    insert(store, 2)

    def handler(event: Event) -> None:
        loop.call_soon_threadsafe(called.set)
        go_on.wait(10)

    try:
        assert not await stopped(make(store, handler, concurrency=1), store, called)
        assert rows(store) == [(Status.PENDING, 0, False)] * 2
    finally:
        go_on.set()


async def test_what_was_answered_in_time_is_settled_and_what_was_not_begun_is_given_back() -> None:
    store, begun, finished = MemoryStore(), asyncio.Event(), 0
    insert(store, 20)

    async def handler(event: Event) -> None:
        nonlocal finished
        begun.set()
        await asyncio.sleep(PATIENCE / 4)
        finished += 1

    assert not await stopped(make(store, handler, concurrency=3), store, begun)
    done = [(Status.DELIVERED, 1, False)] * finished
    assert sorted(rows(store)) == sorted(done + [(Status.PENDING, 0, False)] * (20 - finished))
    assert 0 < finished < 20


async def test_a_drain_that_is_stopped_while_it_probes_gives_the_probe_back() -> None:
    store, hanging = MemoryStore(), Hanging()
    insert(store, 3)
    store.destinations["runner"].circuit = "open"
    store.destinations["runner"].circuit_until = 0.0
    assert not await stopped(make(store, hanging), store, hanging.called)
    assert rows(store) == [(Status.PENDING, 0, False)] * 3


async def test_a_drain_that_is_stopped_with_a_suspect_in_flight_gives_it_back() -> None:
    store, hanging = MemoryStore(), Hanging()
    insert(store, 1)
    [row] = store.rows.values()
    row.lease_token, row.lease_owner, row.leased_until, row.attempts = uuid4(), "dead", 0.0, 1
    row.crashes = 1
    assert not await stopped(make(store, hanging), store, hanging.called)
    assert rows(store) == [(Status.PENDING, 0, False)]


async def test_a_drain_that_is_stopped_does_not_wait_for_a_database_that_is_away() -> None:
    class Away(MemoryStore):
        async def settle(self, settlements: Sequence[Settlement], **policy: Any) -> frozenset[UUID]:
            raise StoreError("the database is away")

    store, answered = Away(), asyncio.Event()
    insert(store, 3)

    async def handler(event: Event) -> None:
        answered.set()

    assert not await stopped(make(store, handler), store, answered)
    assert {row.lease_owner for row in store.rows.values()} == {"me"}, "the leases run out"


async def test_what_a_claim_got_while_the_drain_was_stopped_is_given_back() -> None:
    claiming, go_on = asyncio.Event(), asyncio.Event()

    class Slow(MemoryStore):
        async def claim(self, want: Want) -> Claim:
            claim = await super().claim(want)
            claiming.set()
            await go_on.wait()
            return claim

    store, hanging = Slow(), Hanging()
    insert(store, 5)
    lane = make(store, hanging)
    draining = asyncio.create_task(lane.drain(await store.now(), PATIENCE))
    async with asyncio.timeout(10):
        await claiming.wait()
        lane.stop()
        go_on.set()
        assert not await draining
    assert rows(store) == [(Status.PENDING, 0, False)] * 5
    assert not hanging.called.is_set()


async def test_a_round_that_is_stopped_ends_too() -> None:
    store, hanging = MemoryStore(), Hanging()
    insert(store, 5)
    lane = make(store, hanging)
    running = asyncio.create_task(lane.once(PATIENCE))
    async with asyncio.timeout(10):
        await hanging.called.wait()
        lane.stop()
        await running
    assert rows(store) == [(Status.PENDING, 0, False)] * 5


async def test_a_drain_that_came_to_its_end_says_so() -> None:
    store = MemoryStore()
    insert(store, 5)

    async def handler(event: Event) -> None:
        return

    assert await make(store, handler).drain(await store.now(), PATIENCE)
    assert rows(store) == [(Status.DELIVERED, 1, False)] * 5
