"""A lane whose share of the destination's concurrency changes while it holds deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from relaybox.core.event import Event, Status
from relaybox.errors import StoreError
from relaybox.relay import settle
from relaybox.stores.memory import MemoryStore
from tests.unit.lanes import filled, insert, make, running, shared, statuses
from tests.waiting import await_for


class Scene:
    """Five events, of which the lane begins one; then its share falls to none."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = filled(5, store)
        self.share = 1
        self.begun: list[str] = []
        self.go_on = asyncio.Event()
        together = shared(self.store, share=lambda *_: self.share, hasty=True)
        self.lane = make(self.store, self.handle, together, lease="1h", concurrency=1)

    async def handle(self, event: Event) -> None:
        self.begun.append(event.aggregate_id)
        self.share = 0
        await self.go_on.wait()

    def leased(self) -> list[str]:
        return [row.values[4] for row in self.store.rows.values() if row.lease_token is not None]

    def holds_what_it_began(self) -> bool:
        return bool(self.begun) and self.leased() == self.begun

    def with_a_share(self, condition: Callable[[], bool]) -> Callable[[], bool]:
        """Return the condition, checked while the lane has its share again."""

        def asked() -> bool:
            self.share = 1
            return condition()

        return asked


async def test_what_has_not_begun_is_given_to_those_who_have_a_share() -> None:
    scene = Scene()
    async with running(scene.lane, patience=0.1):
        await await_for(scene.holds_what_it_began)
        scene.lane.stop()
        scene.go_on.set()
    assert scene.leased() == []
    assert [row.attempts for row in scene.store.rows.values()] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("released", [False, True], ids=["refused", "the answer is lost"])
async def test_what_could_not_be_given_back_is_not_begun_under_the_same_lease(released: bool) -> None:
    class Fails(MemoryStore):
        failed = False

        async def release(self, *given: Any, **options: Any) -> Any:
            if released:
                await super().release(*given, **options)
            self.failed = True
            raise StoreError("away")

    store = Fails()
    scene = Scene(store)
    async with running(scene.lane):
        await await_for(lambda: store.failed)
        scene.go_on.set()
        await await_for(scene.with_a_share(lambda: set(statuses(store)) == {Status.DELIVERED}))
    assert sorted(scene.begun) == list("01234")


async def test_while_something_is_given_back_what_else_is_claimed_is_sent() -> None:
    """The connection on which it is given back may be half-open, and another one well."""

    class Hangs(MemoryStore):
        called = False

        async def release(self, *given: Any, **options: Any) -> Any:
            self.called = True
            await asyncio.Event().wait()

    store = Hangs()
    scene = Scene(store)
    lane = asyncio.create_task(scene.lane.run(0.1))
    await await_for(lambda: store.called)
    scene.go_on.set()
    insert(store, count=3)
    await await_for(scene.with_a_share(lambda: len(scene.begun) == 4))
    lane.cancel()
    await asyncio.wait([lane])
    assert scene.begun == ["0", "0", "1", "2"]


async def test_a_lane_without_a_share_stops_at_once() -> None:
    """The lane does not wait for what still waits for a place."""
    scene = Scene()
    async with running(scene.lane, patience=3600.0):
        await await_for(scene.holds_what_it_began)
        scene.go_on.set()
        await await_for(lambda: scene.leased() == [])
    assert len(scene.begun) == 1


async def test_the_outcome_of_a_suspect_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspects come one after the other: each would else wait for the gap between two settles."""
    monkeypatch.setattr(settle, "GAP", 3600.0)
    store = filled(10)
    for row in store.rows.values():
        row.crashes = 2
    async with running(make(store)):
        await await_for(lambda: set(statuses(store)) == {Status.DELIVERED})
    assert [row.attempts for row in store.rows.values()] == [1] * 10
