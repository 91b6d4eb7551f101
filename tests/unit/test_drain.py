"""A drain that is stopped, against a store in memory: it ends in time, and what it held is given back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest

from relaybox.errors import StoreError
from relaybox.event import Event, Status
from relaybox.relay import lane as lane_module
from relaybox.relay.lane import Lane
from relaybox.store import Claim, Settlement, Want
from relaybox.stores.memory import MemoryStore
from tests.unit.lanes import drain, filled, make, open_circuit
from tests.waiting import PATIENCE

LITTLE = 0.1
"""Seconds that a drain has for what hangs."""


def rows(store: MemoryStore) -> list[tuple[Status, int, bool]]:
    """The state and the attempts of each row, and whether it is leased."""
    return [(row.status, row.attempts, row.lease_token is not None) for row in store.rows.values()]


GIVEN_BACK = (Status.PENDING, 0, False)
DELIVERED = (Status.DELIVERED, 1, False)


class Hanging:
    """A handler that does not answer before it may, and tells that it was called."""

    def __init__(self) -> None:
        self.called, self.go_on = asyncio.Event(), asyncio.Event()
        self.finished = 0

    async def __call__(self, event: Event) -> None:
        self.called.set()
        await self.go_on.wait()
        self.finished += 1


@pytest.fixture
def hanging() -> Hanging:
    return Hanging()


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "PATIENCE_TO_SETTLE", 0.1)


async def stopped(
    lane: Lane,
    store: MemoryStore,
    when: asyncio.Event,
    then: asyncio.Event | None = None,
    patience: float = LITTLE,
) -> bool:
    """Stop a drain when something happened, and then let something happen; what it says in the end."""
    draining = asyncio.create_task(drain(store, lane, patience))
    async with asyncio.timeout(PATIENCE):
        await when.wait()
        lane.stop()
        if then is not None:
            then.set()
        return await draining


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_drain_that_is_stopped_has_patience_with_a_handler_that_hangs_and_no_more(
    hanging: Hanging, ordered: bool
) -> None:
    store = filled(30, key="a" if ordered else None)
    lane = make(store, hanging, ordered=ordered, concurrency=5, timeout="1h", lease="2h")
    assert not await stopped(lane, store, hanging.called)
    assert rows(store) == [GIVEN_BACK] * 30


async def test_a_thread_that_hangs_is_left_to_itself() -> None:
    store, called, go_on = filled(2), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def handler(event: Event) -> None:
        loop.call_soon_threadsafe(called.set)
        go_on.wait(PATIENCE)

    try:
        assert not await stopped(make(store, handler, concurrency=1), store, called)
        assert rows(store) == [GIVEN_BACK] * 2
    finally:
        go_on.set()


async def test_what_was_answered_in_time_is_settled_and_what_was_not_begun_is_given_back(
    hanging: Hanging,
) -> None:
    store = filled(20)
    lane = make(store, hanging, concurrency=3)
    assert not await stopped(lane, store, hanging.called, hanging.go_on, PATIENCE)
    assert 0 < hanging.finished <= 3
    done = [DELIVERED] * hanging.finished
    assert sorted(rows(store)) == sorted(done + [GIVEN_BACK] * (20 - hanging.finished))


@pytest.mark.parametrize("what", ["probe", "suspect"])
async def test_a_drain_that_is_stopped_gives_a_probe_or_a_suspect_in_flight_back(
    hanging: Hanging, what: str
) -> None:
    store = filled(3 if what == "probe" else 1)
    if what == "probe":
        open_circuit(store)
    else:
        [row] = store.rows.values()
        row.lease_token, row.lease_owner, row.leased_until, row.attempts = uuid4(), "dead", 0.0, 1
        row.crashes = 1
    assert not await stopped(make(store, hanging), store, hanging.called)
    assert set(rows(store)) == {GIVEN_BACK}


async def test_a_drain_that_is_stopped_does_not_wait_for_a_database_that_is_away() -> None:
    class Away(MemoryStore):
        async def settle(self, settlements: Sequence[Settlement], **policy: Any) -> frozenset[UUID]:
            raise StoreError("the database is away")

    store, answered = filled(3, Away()), asyncio.Event()

    async def handler(event: Event) -> None:
        answered.set()

    assert not await stopped(make(store, handler), store, answered)
    assert {row.lease_owner for row in store.rows.values()} == {"me"}, "the leases run out"


async def test_what_a_claim_got_while_the_drain_was_stopped_is_given_back(hanging: Hanging) -> None:
    claiming, go_on = asyncio.Event(), asyncio.Event()

    class Slow(MemoryStore):
        async def claim(self, want: Want) -> Claim:
            claim = await super().claim(want)
            claiming.set()
            await go_on.wait()
            return claim

    store = filled(5, Slow())
    assert not await stopped(make(store, hanging), store, claiming, go_on)
    assert rows(store) == [GIVEN_BACK] * 5
    assert not hanging.called.is_set()


async def test_a_round_that_is_stopped_ends_too(hanging: Hanging) -> None:
    store = filled(5)
    lane = make(store, hanging)
    running = asyncio.create_task(lane.once(LITTLE))
    async with asyncio.timeout(PATIENCE):
        await hanging.called.wait()
        lane.stop()
        await running
    assert rows(store) == [GIVEN_BACK] * 5


async def test_a_drain_that_came_to_its_end_says_so() -> None:
    store = filled(5)
    assert await drain(store, make(store))
    assert rows(store) == [DELIVERED] * 5
