"""What a lane is made of: what is in flight, how leases end and sends are timed, when a settler wakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from msgspec.structs import replace

from relaybox.core.event import Delivery, Event
from relaybox.core.outcome import Delivered, Outcome, Released, Retried, Retry
from relaybox.core.settings import Destination
from relaybox.errors import Locked, RowsLocked, StoreError
from relaybox.relay import batch as batches
from relaybox.relay.answer import TimedSending, Times
from relaybox.relay.batch import Batch, InFlight, size
from relaybox.relay.observer import Observer, Observers, Sends
from relaybox.relay.settle import Settler
from relaybox.stores.memory import MemoryStore
from relaybox.stores.store import Claim, Settlement, Want
from relaybox.testing.sink_contract import make_delivery
from tests.unit.deliveries import make
from tests.unit.lanes import drain, filled, shared
from tests.unit.lanes import make as make_lane
from tests.waiting import PATIENCE, await_for


class Refusing(MemoryStore):
    """A database that takes outcomes after some refusals, and makes nothing due."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    async def settle(self, settlements: Sequence[Settlement], **policy: Any) -> frozenset[UUID]:
        if self.refusals:
            self.refusals -= 1
            raise StoreError("the database is away")
        return frozenset()


class Dropping(InFlight):
    """Only notes what is settled."""

    def __init__(self, drop: Callable[[Sequence[Delivery]], None]) -> None:
        super().__init__(lambda: None)
        self.drop = drop  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("outcome", "refusals", "ordered", "woken"),
    [
        (Delivered(), 0, True, False),
        (Delivered(), 1, False, True),
        (Retried(0.01, "503"), 0, True, True),
        (Retried(60.0, "503"), 0, True, False),
    ],
    ids=["delivered", "after trouble", "again soon", "again late"],
)
async def test_a_lane_is_woken_in_time(outcome: Outcome, refusals: int, ordered: bool, woken: bool) -> None:
    destination = Destination("runner", "handler:", ordered=ordered, poll_interval="20ms")
    settled, calls = asyncio.Event(), []
    store = Refusing(refusals)
    dropping = Dropping(lambda _: settled.set())
    settler = Settler(destination, shared(store), None, dropping, lambda: calls.append(1))
    running = asyncio.create_task(settler.run())
    settler.add(Settlement(make_delivery(key="a"), outcome))
    async with asyncio.timeout(PATIENCE):
        await settled.wait()
    running.cancel()
    assert bool(calls) == woken


class Locking(MemoryStore):
    """A database where a stranger holds some rows until they are let go."""

    def __init__(self, *rows: UUID) -> None:
        super().__init__()
        self.locked = set(rows)
        self.written: list[UUID] = []
        self.waited: list[bool] = []

    async def settle(
        self, settlements: Sequence[Settlement], *, wait: bool = True, **policy: Any
    ) -> frozenset[UUID]:
        ids = [settlement.delivery.id for settlement in settlements]
        self.written += [id_ for id_ in ids if id_ not in self.locked]
        self.waited.append(wait)
        if left := self.locked.intersection(ids):
            raise RowsLocked(frozenset(left), frozenset())
        return frozenset()


async def test_only_the_row_that_somebody_has_locked_waits_for_its_settle() -> None:
    locked, *others = [replace(make_delivery(), id=uuid4(), position=n) for n in range(4)]
    store, settled = Locking(locked.id), []
    destination = Destination("runner", "handler:", poll_interval="20ms")
    settler = Settler(destination, shared(store), None, Dropping(settled.extend), lambda: None)
    running = [asyncio.create_task(work) for work in (settler.run(), settler.run_locked())]
    for delivery in (locked, *others[:2]):
        settler.add(Settlement(delivery, Delivered()))
    await await_for(lambda: settled == others[:2], "all but the locked one")
    assert settler.waits
    assert not settler.in_trouble, "the lane goes on with its claims"
    assert settler.known(locked) == Delivered()
    assert settler.known(others[0]) is None
    settler.add(Settlement(others[2], Delivered()))
    await await_for(lambda: settled == others, "what comes later")
    await await_for(lambda: store.waited.count(False) > 2, "it is tried again and again")
    store.locked.clear()
    await await_for(lambda: settled == [*others, locked], "the locked one, as soon as it is free")
    assert not settler.waits
    for task in running:
        task.cancel()
    assert sorted(store.written) == sorted(delivery.id for delivery in (locked, *others)), "each once"
    assert store.waited[:1] == [True]


async def test_the_outcome_of_a_later_lease_is_not_forgotten_for_that_of_an_earlier_one() -> None:
    earlier = replace(make_delivery(), lease_token=uuid4())
    later = replace(earlier, lease_token=uuid4())
    tries, go_on, settled = [], asyncio.Event(), []

    class Slow(Locking):
        async def settle(
            self, settlements: Sequence[Settlement], *, wait: bool = True, **policy: Any
        ) -> frozenset[UUID]:
            if not wait:
                tries.append(settlements)
                await go_on.wait()
            return await super().settle(settlements, wait=wait)

    store = Slow(earlier.id)
    destination = Destination("runner", "handler:", poll_interval="20ms")
    settler = Settler(destination, shared(store), None, Dropping(settled.extend), lambda: None)
    running = [asyncio.create_task(work) for work in (settler.run(), settler.run_locked())]
    settler.add(Settlement(earlier, Delivered()))
    await await_for(lambda: tries, "the outcome of the earlier lease is tried again")
    settler.add(Settlement(later, Delivered()))
    await await_for(lambda: store.waited == [True, True], "that of the later one meets the lock too")
    go_on.set()
    await await_for(lambda: store.waited.count(False) > 1, "the first try is over")
    store.locked.clear()
    await await_for(lambda: later in settled, "the outcome of the later lease")
    for task in running:
        task.cancel()


class HeldBack(MemoryStore):
    """A database where a stranger holds some rows when leases are to be extended."""

    def __init__(self, *rows: UUID) -> None:
        super().__init__()
        self.locked = set(rows)

    async def extend(self, deliveries: Sequence[Delivery], lease: float) -> frozenset[UUID]:
        if left := self.locked.intersection(delivery.id for delivery in deliveries):
            raise RowsLocked(frozenset(left), frozenset())
        return frozenset()


async def test_a_lease_that_could_not_be_extended_ends_when_it_did_before() -> None:
    locked, other = [replace(make(), id=uuid4(), position=n) for n in range(2)]
    store = HeldBack(locked.id)
    lane = make_lane(store, lease="60s", timeout="5s")
    began = lane._shared.clock.now()
    batch = Batch([locked, other], began + 1.0)
    lane._in_flight.add(batch)
    assert not await lane._source.extender._extend(), "it is tried again soon"
    assert batch.lease.behind == {locked.position: began + 1.0}
    assert batch.lease.until >= began + 60.0
    assert [lane._gate.may_begin(batch, delivery) for delivery in batch.deliveries] == [False, True]
    store.locked.clear()
    assert await lane._source.extender._extend()
    assert not batch.lease.behind
    assert lane._gate.may_begin(batch, locked)


class Stubborn(MemoryStore):
    """A database where a stranger holds the row that a claim is to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.locked = True

    async def claim(self, want: Want) -> Claim:
        try:
            return await super().claim(want)
        except Locked:
            [row] = self.rows.values()
            return Claim((row.delivery(),))

    async def settle(self, settlements: Sequence[Settlement], **policy: Any) -> frozenset[UUID]:
        if self.locked:
            self.locked = False
            raise Locked("another session holds a lock")
        return await super().settle(settlements, **policy)


async def test_a_delivery_that_the_claim_could_not_fail_is_failed_and_not_sent() -> None:
    store, sent = filled(1, Stubborn()), []
    [row] = store.rows.values()
    row.attempts, row.crashes, row.alone = 5, 4, True
    row.lease_token, row.leased_until = uuid4(), 0.0

    async def note(event: Event) -> None:
        sent.append(event)

    await drain(store, make_lane(store, note))
    assert (row.status, row.error_message) == ("failed", "the relay died 5 times while it held this event")
    assert not sent


@pytest.fixture
def held() -> InFlight:
    return InFlight(lambda: None)


def claimed(*positions: int) -> Batch:
    token = uuid4()
    rows = [replace(make_delivery(), position=position, lease_token=token) for position in positions]
    return Batch(rows, until=0.0)


def test_a_batch_is_done_when_all_of_it_is_settled(held: InFlight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "LIGHT", 0)
    batch = claimed(1, 2)
    held.add(batch)
    held.drop(batch.deliveries[:1])
    assert (len(held), list(held), batch.done.is_set()) == (1, [batch], False)
    assert held.bytes == size(batch.deliveries[1:]) > 0
    held.drop(batch.deliveries[1:])
    assert (len(held), list(held), batch.done.is_set(), held.bytes) == (0, [], True, 0)


def test_of_two_claims_of_a_row_the_new_one_holds_it(held: InFlight) -> None:
    old, new = claimed(1), claimed(1)
    held.add(old)
    held.add(new)
    held.drop(old.deliveries)
    assert (list(held), list(new.unsettled)) == ([new], [1])


def test_a_row_that_this_relay_claims_again_is_no_longer_held_by_the_old_claim(held: InFlight) -> None:
    old, new = claimed(1, 2), claimed(2)
    held.add(old)
    held.add(new)
    assert (list(old.unsettled), old.done.is_set()) == ([1], False)
    held.drop([old.deliveries[0], *new.deliveries])
    assert (len(held), list(held), held.bytes) == (0, [], 0)
    assert old.done.is_set()
    assert new.done.is_set()


class Judge:
    """Lets some begin, and takes all answers."""

    def __init__(self, *refused: int) -> None:
        self.refused = refused
        self.answers: list[Any] = []

    def may_begin(self, batch: Batch, delivery: Delivery) -> bool:
        return delivery.position not in self.refused

    def take(self, batch: Batch, delivery: Delivery, answer: Any) -> None:
        self.answers.append((delivery.position, answer))


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError


def deliveries(count: int) -> list[Delivery]:
    return [msgspec.structs.replace(make(), position=at) for at in range(count)]


def test_each_delivery_has_its_own_times() -> None:
    judge, seen = Judge(2), Timed()
    times = Times("runner", seen)
    first, second, third, fourth = batch = deliveries(4)
    sending = TimedSending(judge, judge, Batch(batch, 60.0), Clock(), times)  # type: ignore[arg-type]
    assert [sending.begin(one) for one in (first, second, third)] == [True, True, False]
    answers = [Retry("no"), Delivered(), Released(), Retry("the sink failed")]
    for one, answer in zip((second, first, third, fourth), answers, strict=True):
        sending.report(one, answer)
    # What never began, and failed with its batch, took no time.
    expected = ([second, first, fourth], [*answers[:2], answers[3]], [2.0, 1.0, 5.0], [3.0, 4.0, 5.0])
    times.report()
    times.report()
    assert seen.heard == [("runner", expected)]
    assert [position for position, _ in judge.answers] == [1, 0, 2, 3]


class Timed(Observer):
    timed = True

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def sent(self, destination: str, sends: Sends) -> None:
        self.heard.append((destination, sends))


def test_only_those_who_want_it_hear_of_sends() -> None:
    assert not Observers([Observer(), Observer()]).timed
    timed = Timed()
    both, nothing = Observers([Observer(), timed]), Sends([], [], [], [])
    assert both.timed
    both.sent("runner", nothing)
    assert timed.heard == [("runner", nothing)]
