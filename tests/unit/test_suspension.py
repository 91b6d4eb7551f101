"""A machine that was suspended: leases went on without it, and its relay knows."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from relaybox.core.clock import MonotonicClock, uptime
from relaybox.core.event import Event, Status
from relaybox.operate.metrics import MetricsObserver
from relaybox.operate.observers.traces import TracesObserver
from relaybox.relay.observer import Observer
from relaybox.relay.shared import Shared
from relaybox.stores.memory import MemoryStore
from relaybox.stores.store import Want
from tests.unit import lanes
from tests.waiting import await_for

LEASE = 60.0


class Machine(MonotonicClock):
    """Its clock goes on when it is suspended, its timers do not; the database is another machine."""

    def __init__(self) -> None:
        self.slept = 0.0
        self.store = MemoryStore(self.now)

    def now(self) -> float:  # type: ignore[override]
        return uptime() + self.slept


class Handler:
    """Hangs at the first event until it may go on."""

    def __init__(self) -> None:
        self.called: list[Event] = []
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, event: Event) -> None:
        self.called.append(event)
        self.begun.set()
        await self.go_on.wait()


def relay_on(machine: Machine, observer: Observer | None = None) -> Shared:
    shared = lanes.shared(machine.store, observer)
    shared.clock = machine
    return shared


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no clock here counts suspension")
def test_the_clock_of_a_relay_counts_suspension_and_observers_have_the_same() -> None:
    assert isinstance(uptime, partial)
    assert (uptime.func, uptime.args) == (time.clock_gettime, (time.CLOCK_BOOTTIME,))
    assert MonotonicClock.now is uptime
    assert MetricsObserver()._clock is TracesObserver()._clock is uptime


async def test_nothing_begins_on_a_lease_that_went_by_in_a_suspension() -> None:
    machine, handler = Machine(), Handler()
    store = lanes.filled(2, machine.store)
    lane = lanes.make(store, handler, relay_on(machine), lease=LEASE, concurrency=1)
    async with lanes.running(lane):
        await handler.begun.wait()
        machine.slept += LEASE + 1.0
        taken = await store.claim(Want("runner", "another", 10, LEASE))
        assert len(taken.deliveries) == 2
        handler.go_on.set()
        await await_for(lambda: not len(lane._in_flight), "what was in flight is given up")
    assert len(handler.called) == 1
    assert {row.lease_owner for row in store.rows.values()} == {"another"}


async def test_what_nobody_took_meanwhile_is_given_back_and_sent_under_a_new_lease() -> None:
    machine, handler = Machine(), Handler()
    store = lanes.filled(3, machine.store)
    tokens: list[object] = []
    claim = store.claim

    async def watched(want: Want) -> object:
        claimed = await claim(want)
        tokens.extend({delivery.lease_token for delivery in claimed.deliveries})
        return claimed

    store.claim = watched  # type: ignore[method-assign, assignment]
    lane = lanes.make(store, handler, relay_on(machine), lease=LEASE, concurrency=1)
    async with lanes.running(lane):
        await handler.begun.wait()
        assert len(tokens) == 1
        machine.slept += LEASE
        handler.go_on.set()
        await await_for(lambda: set(lanes.statuses(store)) == {Status.DELIVERED}, "delivered")
    assert len(handler.called) == 3
    assert len(tokens) > 1
