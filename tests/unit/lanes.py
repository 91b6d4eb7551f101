"""Lanes against a store in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from uuid_utils.compat import uuid7

from relaybox.core.clock import MonotonicClock
from relaybox.core.event import Event, Status
from relaybox.core.settings import Destination
from relaybox.emit.wakes.local import LocalWake
from relaybox.relay.lane import Lane
from relaybox.relay.observer import Observer
from relaybox.relay.shared import Shared
from relaybox.sinks.handler import HandlerSink
from relaybox.stores.memory import MemoryStore, Row
from tests.waiting import PATIENCE


class HastyClock(MonotonicClock):
    """A clock by which no sleep is long."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.02))


async def nothing(event: Event) -> None:
    """Handle an event."""


def insert(
    store: MemoryStore, *headers: str, count: int = 1, destination: str = "runner", key: str | None = None
) -> None:
    """Add so many events, or one for each of the headers."""
    for n, text in enumerate(headers or ["{}"] * count):
        event = ("Order", str(n), "order.paid", "{}", None, None, text)
        store.insert([(str(uuid7()), str(uuid7()), destination, *event, key, str(uuid7()), 5, None)])


def filled(count: int, store: MemoryStore | None = None, *, key: str | None = None) -> MemoryStore:
    """Return a store that holds so many events."""
    store = store or MemoryStore()
    insert(store, count=count, key=key)
    return store


def suspects(store: MemoryStore, destination: str, count: int = 1, deaths: int = 2) -> list[Row]:
    """Add events whose relays died so often; return all rows of the destination."""
    insert(store, count=count, destination=destination)
    rows = [row for row in store.rows.values() if row.destination == destination]
    for row in rows:
        row.attempts, row.crashes = 1, deaths - 1
        row.lease_token, row.lease_owner, row.leased_until = uuid4(), "dead", 0.0
    return rows


def open_circuit(store: MemoryStore) -> None:
    """Open the circuit; its probe is due."""
    store.destinations["runner"].circuit = "open"
    store.destinations["runner"].circuit_until = 0.0


def shared(
    store: MemoryStore, observer: Observer | None = None, *, hasty: bool = False, **options: Any
) -> Shared:
    """Return what lanes have in common; ``hasty``: none of them sleeps for long."""
    clock = HastyClock() if hasty else MonotonicClock()
    return Shared(store, LocalWake(), observer or Observer(), clock, random.random, "me", **options)


def make(
    store: MemoryStore,
    handler: Callable[[Event], Any] = nothing,
    together: Shared | None = None,
    name: str = "runner",
    **options: Any,
) -> Lane:
    """Return a lane that gives its events to a handler."""
    destination = Destination(name, "handler:", **{"poll_interval": "20ms", **options})
    return Lane(destination, HandlerSink(destination, handler), together or shared(store))


@asynccontextmanager
async def running(*lanes: Lane, patience: float = 1.0) -> AsyncIterator[None]:
    """Run lanes; afterwards stop them and wait for their end."""
    tasks = [asyncio.create_task(lane.run(patience)) for lane in lanes]
    try:
        yield
    finally:
        for lane in lanes:
            lane.stop()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*tasks)


async def drain(store: MemoryStore, lane: Lane, patience: float = 1.0) -> bool:
    """Drain a lane of what is there now."""
    async with asyncio.timeout(PATIENCE):
        return await lane.drain(await store.now(), patience)


def statuses(store: MemoryStore) -> list[Status]:
    """Return the state of each row."""
    return [row.status for row in store.rows.values()]
