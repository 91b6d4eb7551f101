"""A lane goes on while a function hangs, a stranger locks a row, or outcomes cannot be written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import pytest

from relaybox.core.event import Delivery, Event, Status
from relaybox.core.outcome import Delivered, Unavailable
from relaybox.core.settings import Backoff
from relaybox.errors import RowsLocked, StoreError
from relaybox.relay import quarantine, send, shutdown
from relaybox.relay.batch import Batch
from relaybox.stores.memory import MemoryStore
from relaybox.stores.store import Settlement, Want
from tests.unit.lanes import filled, make, nothing, open_circuit, running, statuses, suspects
from tests.waiting import PATIENCE, await_for


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "PATIENCE_TO_SETTLE", 0.05)
    for name in ("PATIENCE_FOR_A_SETTLE", "PROBE_MARGIN"):
        monkeypatch.setattr(send, name, 0.05)
    monkeypatch.setattr(quarantine, "PATIENCE", 0.02)
    monkeypatch.setattr(quarantine, "APART", 0.0)


class Hung:
    """A plain function that hangs with the first event, and ends with others once it has that one."""

    def __init__(self) -> None:
        self.called, self.go_on = threading.Event(), threading.Event()
        self.away = False

    def __call__(self, event: Event) -> None:
        if event.aggregate_id == "0" and not self.go_on.is_set():
            self.called.set()
            self.go_on.wait(2 * PATIENCE)
            raise Unavailable("late")
        self.called.wait(PATIENCE)
        if self.away:
            raise Unavailable("503")


@pytest.fixture
def hung() -> Iterator[Hung]:
    handler = Hung()
    yield handler
    handler.go_on.set()


class Locking(MemoryStore):
    """A database where a stranger holds the first row that was delivered, until it lets go."""

    held: UUID | None = None
    free = False

    async def settle(self, settlements: Sequence[Settlement], **policy: Any) -> frozenset[UUID]:
        delivered = [s.delivery.id for s in settlements if isinstance(s.outcome, Delivered)]
        if self.held is None and delivered:
            self.held = delivered[0]
        left = [s for s in settlements if self.free or s.delivery.id != self.held]
        lost = await super().settle(left, **policy)
        if len(left) < len(settlements):
            assert self.held is not None
            raise RowsLocked(frozenset({self.held}), lost)
        return lost


def all_but_one(store: MemoryStore) -> bool:
    """True if one row is left, in any state, and all others are delivered."""
    return statuses(store).count(Status.DELIVERED) == len(store.rows) - 1


async def test_a_circuit_is_probed_though_a_function_hangs(hung: Hung) -> None:
    store, hung.away = filled(10), True
    lane = make(store, hung, timeout="100ms", backoff=Backoff(base=0, cap=0))
    async with running(lane, patience=0.0):
        await await_for(lambda: store.destinations["runner"].circuit == "open")
        hung.away = False
        store.destinations["runner"].circuit_until = 0.0
        await await_for(lambda: all_but_one(store), "all but the one that hangs")
        assert statuses(store)[0] is Status.PENDING, "it hangs still"
        assert store.destinations["runner"].circuit == "closed"


async def test_the_late_answer_of_a_probe_is_one_like_any_other(hung: Hung) -> None:
    store = filled(10)
    open_circuit(store)
    lane = make(store, hung, timeout="100ms", backoff=Backoff(base=0, cap=0))
    async with running(lane, patience=0.0):
        await await_for(lambda: all_but_one(store), "what another probe let through")
        hung.go_on.set()
        await await_for(lambda: set(statuses(store)) == {Status.DELIVERED})


async def test_a_circuit_closes_though_a_stranger_has_locked_the_row_of_its_probe() -> None:
    store = filled(10, Locking())
    open_circuit(store)
    async with running(make(store)):
        await await_for(lambda: all_but_one(store), "all but the locked one")
        assert store.destinations["runner"].circuit == "closed"
        store.free = True
        await await_for(lambda: set(statuses(store)) == {Status.DELIVERED})


@pytest.mark.parametrize("locked", [False, True])
async def test_a_suspect_that_hangs_or_is_locked_keeps_no_others_waiting(hung: Hung, locked: bool) -> None:
    store = Locking() if locked else MemoryStore()
    handler: Callable[[Event], Any] = nothing if locked else hung
    suspects(store, "runner", 40)
    async with running(make(store, handler, timeout="100ms"), patience=0.0):
        await await_for(lambda: all_but_one(store), "three groups, but for one of the first")
        assert set(statuses(store)) == {Status.DELIVERED, Status.PENDING}


class Unwritable(MemoryStore):
    """A database that takes no outcomes for a while."""

    away = True
    refused = 0

    async def settle(self, settlements: Sequence[Settlement], **policy: Any) -> frozenset[UUID]:
        if self.away:
            self.refused += 1
            raise StoreError("the database is away")
        return await super().settle(settlements, **policy)


async def test_nothing_is_sent_again_though_its_lease_ended_before_its_outcome_was_written() -> None:
    store, seen = filled(10, Unwritable()), list[str]()

    async def handler(event: Event) -> None:
        seen.append(event.aggregate_id)

    lane = make(store, handler)
    async with running(lane):
        await await_for(lambda: store.refused)
        for row in store.rows.values():
            row.leased_until = 0.0
        await lane._suspects._examine()
        store.away = False
        await await_for(lambda: set(statuses(store)) == {Status.DELIVERED})
    assert sorted(seen) == [str(n) for n in range(10)]


async def test_a_lane_that_failed_goes_on_though_outcomes_could_not_be_written() -> None:
    store = filled(3, Unwritable())
    lane = make(store, lease="1s", timeout="500ms")

    async def fail() -> None:
        raise RuntimeError("a defect")

    async with running(lane):
        await await_for(lambda: lane._source.settler.in_trouble, "an outcome that is not written")
        lane._in_flight.tasks.create_task(fail())
        store.away = False
        await await_for(lambda: set(statuses(store)) == {Status.DELIVERED})


async def test_what_a_stranger_has_locked_stays_in_flight_when_the_rest_is_given_back() -> None:
    store, go_on = filled(3, key="k"), asyncio.Event()
    release = store.release

    async def release_but_the_last(deliveries: Sequence[Delivery], **policy: Any) -> None:
        await release(deliveries[:-1], **policy)
        raise RowsLocked(frozenset({deliveries[-1].id}), frozenset())

    async def handler(event: Event) -> None:
        await go_on.wait()

    lane = make(store, handler, ordered=True)
    async with running(lane):
        await await_for(lambda: any(batch.begun for batch in lane._in_flight), "the first of the key")
        store.release = release_but_the_last  # type: ignore[method-assign]
        assert await lane._source.releases.give_back(lane._in_flight.unbegun())
        assert len(lane._in_flight) == 2, "the one that is sent, and the locked one"
        store.release = release  # type: ignore[method-assign]
        go_on.set()
        await await_for(lambda: set(statuses(store)) == {Status.DELIVERED})


async def test_a_thread_that_asks_meanwhile_begins_nothing_of_a_give_back_whose_answer_was_lost() -> None:
    store, go_on = filled(3, key="k"), asyncio.Event()
    release = store.release

    async def ask_and_lose_the_answer(deliveries: Sequence[Delivery], **policy: Any) -> None:
        await release(deliveries, **policy)
        # As a thread does that is in the midst of ``may_begin``.
        batch.begun.update(delivery.position for delivery in deliveries)
        raise StoreError("the connection was lost")

    async def handler(event: Event) -> None:
        await go_on.wait()

    lane = make(store, handler, ordered=True)
    async with running(lane):
        await await_for(lambda: any(batch.begun for batch in lane._in_flight), "the first of the key")
        [batch] = lane._in_flight
        waiting = batch.unbegun()
        store.release = ask_and_lose_the_answer  # type: ignore[method-assign]
        await lane._source.releases.give_back(waiting)
        store.release = release  # type: ignore[method-assign]
        batch.begun.difference_update(delivery.position for delivery in waiting)
        assert not any(lane._gate.may_begin(batch, delivery) for delivery in waiting)
        go_on.set()
        await await_for(lambda: set(statuses(store)) == {Status.DELIVERED})


class Interrupted(set[int]):
    """Marks of what has begun; a thread that sets one is held up until it may go on."""

    def __init__(self, marks: set[int]) -> None:
        super().__init__(marks)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def add(self, mark: int) -> None:
        self.reached.set()
        assert self.go_on.wait(PATIENCE)
        super().add(mark)


async def test_a_thread_that_is_held_up_while_it_asks_begins_nothing_that_was_given_back() -> None:
    store = filled(2, key="k")
    lane = make(store, ordered=True)
    release = store.release
    claim = await store.claim(Want("runner", "me", 10, 60.0, ordered=True, run=10))
    first, second = claim.deliveries
    batch = Batch(claim.deliveries, lane._shared.clock.now() + 60.0)
    batch.begun = marks = Interrupted({first.position})
    lane._in_flight.add(batch)
    begins = list[bool]()
    thread = threading.Thread(target=lambda: begins.append(lane._gate.may_begin(batch, second)))

    async def release_while_the_thread_goes_on(deliveries: Sequence[Delivery], **policy: Any) -> None:
        marks.go_on.set()
        await asyncio.to_thread(thread.join)
        await release(deliveries, **policy)

    store.release = release_while_the_thread_goes_on  # type: ignore[method-assign, assignment]
    thread.start()
    assert await asyncio.to_thread(marks.reached.wait, PATIENCE)
    assert await lane._source.releases.give_back([second])
    assert begins == [False]
