"""A lane whose share of the destination's concurrency changes while it holds deliveries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relaybox.config import Destination
from relaybox.errors import StoreError
from relaybox.event import Event, Status
from relaybox.relay import settle
from relaybox.relay.lane import Lane
from relaybox.sinks.handler import HandlerSink
from relaybox.stores.memory import MemoryStore
from tests.unit.test_lane import insert, shared, statuses


class Scene:
    """Five events, of which the lane begins one; then its share falls to none."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.share = 1
        self.begun: list[str] = []
        self.go_on = asyncio.Event()
        insert(store, 5)
        destination = Destination("runner", "handler:", poll_interval="20ms", lease="60s", concurrency=1)
        parts = shared(store, share=lambda total: self.share)
        self.lane = Lane(destination, HandlerSink(destination, self.handle), parts)

    async def handle(self, event: Event) -> None:
        self.begun.append(event.aggregate_id)
        self.share = 0
        await self.go_on.wait()

    def leased(self) -> list[str]:
        return [row.values[4] for row in self.store.rows.values() if row.lease_token is not None]

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(10):
            while not what():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_what_has_not_begun_is_given_to_those_who_have_a_share() -> None:
    scene = Scene(MemoryStore())
    running = asyncio.create_task(scene.lane.run(0.1))
    await scene.until(lambda: scene.begun and scene.leased() == scene.begun)
    scene.lane.stop()
    scene.go_on.set()
    await asyncio.wait_for(running, 20)
    assert scene.leased() == []
    assert [row.attempts for row in scene.store.rows.values()] == [1, 0, 0, 0, 0]


async def test_what_could_not_be_given_back_is_sent_when_there_is_a_share_again() -> None:
    class Refuses(MemoryStore):
        refused = False

        async def release(self, *given: Any, **options: Any) -> Any:
            self.refused = True
            raise StoreError("away")

    store = Refuses()
    scene = Scene(store)
    running = asyncio.create_task(scene.lane.run(0.1))
    await scene.until(lambda: store.refused)
    assert len(scene.leased()) == 5
    scene.go_on.set()
    scene.handle = None  # type: ignore[assignment]
    scene.share = 1

    def again() -> bool:
        scene.share = 1
        return len(scene.begun) == 5

    await scene.until(again)
    scene.lane.stop()
    await asyncio.wait_for(running, 20)
    assert scene.leased() == []


async def test_while_something_is_given_back_what_else_is_claimed_is_sent() -> None:
    """The connection on which it is given back may be half-open, and another one well."""

    class Hangs(MemoryStore):
        called = False

        async def release(self, *given: Any, **options: Any) -> Any:
            self.called = True
            await asyncio.Event().wait()

    store = Hangs()
    scene = Scene(store)
    running = asyncio.create_task(scene.lane.run(0.1))
    await scene.until(lambda: store.called)
    scene.go_on.set()
    insert(store, 3)

    def new_ones_came() -> bool:
        scene.share = 1
        return len(scene.begun) == 4

    await scene.until(new_ones_came)
    running.cancel()
    await asyncio.wait([running])
    assert scene.begun == ["0", "0", "1", "2"]


async def test_a_lane_without_a_share_stops_at_once() -> None:
    """What still waits for a place is not waited for."""
    scene = Scene(MemoryStore())
    running = asyncio.create_task(scene.lane.run(60.0))
    await scene.until(lambda: scene.begun and scene.leased() == scene.begun)
    scene.go_on.set()
    await scene.until(lambda: scene.leased() == [])
    scene.lane.stop()
    await asyncio.wait_for(running, 10)
    assert len(scene.begun) == 1


async def test_the_outcome_of_a_suspect_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspects come one after the other: each would else wait for the gap between two settles."""
    monkeypatch.setattr(settle, "GAP", 3600.0)
    store = MemoryStore()
    insert(store, 10)
    for row in store.rows.values():
        row.crashes = 2
    destination = Destination("runner", "handler:", poll_interval="20ms")

    async def handle(event: Event) -> None:
        return

    lane = Lane(destination, HandlerSink(destination, handle), shared(store))
    running = asyncio.create_task(lane.run(1.0))
    async with asyncio.timeout(10):
        while set(statuses(store)) != {Status.DELIVERED}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    lane.stop()
    await running
    assert [row.attempts for row in store.rows.values()] == [1] * 10
