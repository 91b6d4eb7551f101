"""Slow keys of an ordered destination: they take no room that other keys could use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relaybox.core.event import Event, Status
from relaybox.core.outcome import Reject, Retry
from relaybox.core.settings import Destination
from relaybox.errors import StoreError
from relaybox.relay import room
from relaybox.relay.batch import Batch, InFlight
from relaybox.relay.sizing import DOUBTS, Sizing
from relaybox.stores.memory import MemoryStore
from tests.unit.deliveries import make as delivery
from tests.unit.lanes import insert, make, running, statuses
from tests.waiting import await_for

OTHERS = {f"other {n}" for n in range(20)}


def crowded(keys: int = 4, each: int = 50, store: MemoryStore | None = None) -> MemoryStore:
    """Return a store where a few keys have many events, and after them many keys have one."""
    store = store or MemoryStore()
    for key in (f"slow {n}" for n in range(keys)):
        insert(store, count=each, key=key)
    for key in OTHERS:
        insert(store, key=key)
    return store


@pytest.mark.parametrize("was_fast", [False, True])
async def test_keys_that_hang_leave_room_for_the_others(
    was_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PATIENCE_FOR_ROOM", 0.02)
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
        lane._source.claims.sizing._run = 1000
    async with running(lane, patience=0.0):
        await await_for(lambda: came == OTHERS, "what is not slow")


async def test_what_was_given_back_is_not_sent_though_the_answer_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = asyncio.Event()

    class Loses(MemoryStore):
        async def release(self, *given: Any, **options: Any) -> Any:
            await super().release(*given, **options)
            released.set()
            raise StoreError("the connection was lost")

    monkeypatch.setattr(room, "PATIENCE_FOR_ROOM", 0.02)
    store = crowded(store=Loses())
    ids = {row.values[1]: row for row in store.rows.values()}
    leased: list[bool] = []

    async def handler(event: Event) -> None:
        row = ids[str(event.id)]
        if row.key not in OTHERS:
            await released.wait()
        leased.append(row.lease_token is not None)

    lane = make(store, handler, ordered=True, batch_size=10, concurrency=8)
    lane._source.claims.sizing._run = 1000
    async with running(lane):
        await await_for(lambda: set(statuses(store)) == {Status.DELIVERED}, "all events")
    assert all(leased)
    assert len(leased) == len(ids)


@pytest.mark.parametrize("answer", [Retry("not yet", after=0), Reject("never")], ids=["retried", "rejected"])
async def test_the_rest_of_a_key_whose_event_failed_does_not_wait_for_other_keys_of_its_batch(
    answer: Exception,
) -> None:
    store = MemoryStore()
    for key, count in (("slow", 1), ("failing", 3)):
        insert(store, count=count, key=key)
    ids = {row.values[1]: row for row in store.rows.values()}
    came: list[int] = []
    failed: list[Exception] = [answer]

    async def handler(event: Event) -> None:
        row = ids[str(event.id)]
        if row.key == "slow":
            await asyncio.Event().wait()
        if failed:
            raise failed.pop()
        came.append(row.position)

    lane = make(store, handler, ordered=True, batch_size=10, concurrency=3, on_failed="skip")
    async with running(lane, patience=0.0):
        await await_for(lambda: came[-2:] == [3, 4], "the rest of the key")


async def test_a_failed_event_does_not_keep_slow_keys_in_the_room_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "PATIENCE_FOR_ROOM", 0.02)
    store = MemoryStore()
    insert(store, count=3, key="failing")
    for key in (f"slow {n}" for n in range(4)):
        insert(store, count=50, key=key)
    for key in OTHERS:
        insert(store, key=key)
    ids = {row.values[1]: row.key for row in store.rows.values()}
    came: set[str | None] = set()

    async def handler(event: Event) -> None:
        key = ids[str(event.id)]
        if key == "failing":
            raise Retry("not yet", after=60)
        if key not in OTHERS:
            await asyncio.Event().wait()
        came.add(key)

    lane = make(store, handler, ordered=True, batch_size=10, concurrency=8)
    lane._source.claims.sizing._run = 1000
    async with running(lane, patience=0.0):
        await await_for(lambda: came == OTHERS, "what is not slow")


@pytest.mark.parametrize("options", [{"rate_limit": "40/s"}, {"batch_size": 1}], ids=["rate", "batch"])
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
async def test_slow_events_leave_room_for_others_where_claims_are_small(
    options: dict[str, object], ordered: bool
) -> None:
    store = MemoryStore()
    for key in (*(f"slow {n}" for n in range(16)), *OTHERS):
        insert(store, key=key)
    ids = {row.values[1]: row.key for row in store.rows.values()}
    came: set[str | None] = set()

    async def handler(event: Event) -> None:
        key = ids[str(event.id)]
        if key not in OTHERS:
            await asyncio.Event().wait()
        came.add(key)

    lane = make(store, handler, ordered=ordered, concurrency=50, **options)
    async with running(lane, patience=0.0):
        await await_for(lambda: came == OTHERS, "what is not slow")
    assert lane._source.claims.sizing.narrow


def in_flight(*batches: Batch) -> InFlight:
    """Return these batches as in flight, claimed at the seconds 1, 2 and so on."""
    made = InFlight(lambda: None)
    for number, batch in enumerate(batches, 1):
        batch.lease.began = float(number)
        made.add(batch)
    return made


def run_of(key: str | None, begun: int = 0, count: int = 3, **options: object) -> Batch:
    """Return a batch of one key, of which so many are being sent."""
    batch = Batch([delivery(ordering_key=key, **options) for _ in range(count)], 60.0)
    batch.begun.update(d.position for d in batch.deliveries[:begun])
    return batch


def test_what_waits_behind_one_that_is_being_sent_can_be_given_back() -> None:
    slow, young = run_of("slow", begun=1), run_of("young", begun=1)
    held = in_flight(slow, young, run_of(None, begun=3))
    assert held.behind(1.5) == list(slow.deliveries[1:]), "the young ones have not waited long"
    assert held.behind(0.5) == []
    slow.answered.add(slow.deliveries[0].position)
    assert held.behind(1.5) == [], "the next of the key may begin now"


@pytest.mark.parametrize("key", ["waits", None])
def test_nothing_is_given_back_while_the_first_of_a_key_waits_for_a_place_or_the_rate_limit(
    key: str | None,
) -> None:
    assert in_flight(run_of("slow", begun=1), run_of(key)).behind(9.0) == []


def test_a_suspect_that_waits_for_others_does_not_keep_slow_keys_in_their_place() -> None:
    slow = run_of("slow", begun=1)
    assert in_flight(slow, run_of("suspect", crashes=2)).behind(9.0) == list(slow.deliveries[1:])


def test_what_is_being_sent_is_begun_and_neither_answered_nor_lost() -> None:
    batch = run_of("slow", begun=2)
    held = in_flight(batch, run_of("waits"))
    assert held.sending() == 2
    batch.answered.add(batch.deliveries[0].position)
    assert held.sending() == 1
    batch.unsettled.clear()
    assert held.sending() == 0


def test_what_is_behind_a_failed_one_is_looked_for_once_for_each_key() -> None:
    batch = run_of("failing", count=4)
    first, second, third, fourth = batch.deliveries
    batch.answered.add(third.position)
    assert batch.after(first) == [second, fourth]
    assert batch.after(second) == [], "all of them are known"


def test_a_lost_or_repeated_answer_gives_back_the_rest_of_its_key_once() -> None:
    lane = make(MemoryStore(), ordered=True)
    batch = run_of("failing")
    first, second, third = batch.deliveries
    del batch.unsettled[first.position]
    for one in (first, second, second):
        lane._sender._answers.take(batch, one, Retry("busy"))
    assert [settlement.delivery for settlement in lane._source.settler._waiting] == [second, third]


def test_rows_are_taken_to_be_light_until_they_do_not_fit() -> None:
    sizing = Sizing(Destination("runner", "handler:"))
    assert sizing.light
    sizing.learn(10, 10 * 10_000, 0, 1.0)
    assert not sizing.light, "a thousand of these do not fit"
    for now in range(2, 12):
        sizing.learn(10, 10 * 100, 0, float(now))
    assert sizing.light
    sizing.doubt_light()
    for now in range(12, 12 + DOUBTS):
        assert not sizing.light
        sizing.learn(10, 10 * 100, 0, float(now))
    assert sizing.light


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
