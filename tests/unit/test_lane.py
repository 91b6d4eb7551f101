"""A lane against a store in memory: what must not hang, whatever fails around it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from uuid_utils.compat import uuid7

from relaybox.circuit import Circuit
from relaybox.config import Backoff, Destination
from relaybox.errors import StoreError
from relaybox.event import Delivery, Event, Status
from relaybox.observe import Observer
from relaybox.observers.several import Observers
from relaybox.outcome import Unavailable
from relaybox.relay import lane as lane_module
from relaybox.relay.clock import MonotonicClock
from relaybox.relay.lane import Lane
from relaybox.relay.probe import choose
from relaybox.relay.shared import Shared
from relaybox.sink import REGARDLESS, Answer, Progress, Sink
from relaybox.sinks.handler import HandlerSink
from relaybox.store import Claim, Settlement, Want
from relaybox.stores.memory import DestinationState, MemoryStore
from relaybox.wakes.local import LocalWake

Handler = Callable[[Event], Any]


class Away(MemoryStore):
    """A database that can go away."""

    away = False

    async def claim(self, want: Want) -> Claim:
        self._check()
        return await super().claim(want)

    async def settle(self, settlements: Sequence[Settlement], **policy: Any) -> frozenset[UUID]:
        self._check()
        return await super().settle(settlements, **policy)

    def _check(self) -> None:
        if self.away:
            raise StoreError("the database is away")


def insert(store: MemoryStore, count: int, *, destination: str = "runner", key: str | None = None) -> None:
    for n in range(count):
        event = ("Order", str(n), "order.paid", "{}", None, None, "{}")
        store.insert([(str(uuid7()), str(uuid7()), destination, *event, key, str(uuid7()), 5, None)])


def shared(store: MemoryStore, observer: Observer | None = None, **options: Any) -> Shared:
    parts = (LocalWake(), observer or Observer(), MonotonicClock(), random.random, "me")
    return Shared(store, *parts, **options)


def make(store: MemoryStore, handler: Handler, **options: Any) -> Lane:
    destination = Destination("runner", "handler:", poll_interval="20ms", **options)
    return Lane(destination, HandlerSink(destination, handler), shared(store))


def statuses(store: MemoryStore) -> list[Status]:
    return [row.status for row in store.rows.values()]


async def nothing(event: Event) -> None:
    return


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "PATIENCE_TO_SETTLE", 0.1)


async def test_a_full_lane_stops_though_the_database_is_away() -> None:
    store = Away()
    insert(store, 100)

    async def handler(event: Event) -> None:
        store.away = True

    lane = make(store, handler, batch_size=5)
    running = asyncio.create_task(lane.run(1.0))
    async with asyncio.timeout(10):
        while not store.away:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        lane.stop()
        await running
    assert Status.DELIVERED not in statuses(store)


async def test_a_lane_stops_in_a_probe_though_the_database_is_away() -> None:
    store = Away()
    insert(store, 1)
    store.destinations["runner"].circuit = "open"
    store.destinations["runner"].circuit_until = 0.0

    async def handler(event: Event) -> None:
        store.away = True

    lane = make(store, handler)
    running = asyncio.create_task(lane.run(1.0))
    async with asyncio.timeout(10):
        while not store.away:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        lane.stop()
        await running
    assert statuses(store) == [Status.PENDING]


async def test_a_circuit_whose_events_all_wait_is_told_to_be_open_and_never_closed() -> None:
    store, seen = MemoryStore(), []
    insert(store, 1)
    for row in store.rows.values():
        assert row.next_attempt_at is not None
        row.next_attempt_at += 60
    store.destinations["runner"].circuit = "open"
    store.destinations["runner"].circuit_until = 0.0

    class Watching(Observer):
        def claimed(self, destination: str, claim: Claim) -> None:
            seen.append(claim.held and claim.held.why)

    destination = Destination("runner", "handler:", poll_interval="20ms")
    lane = Lane(destination, HandlerSink(destination, nothing), shared(store, Watching()))
    running = asyncio.create_task(lane.run(1.0))
    async with asyncio.timeout(10):
        while len(seen) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        lane.stop()
        await running
    assert set(seen) == {"open"}


@pytest.mark.parametrize("after", [0, None])
async def test_a_drain_does_not_go_round_with_an_event_whose_attempts_do_not_count(
    after: float | None,
) -> None:
    store, calls = MemoryStore(), 0
    insert(store, 1)

    async def handler(event: Event) -> None:
        nonlocal calls
        calls += 1
        raise Unavailable("not now", after=after)

    lane = make(store, handler, backoff=Backoff(base=0, cap=0))
    async with asyncio.timeout(10):
        await lane.drain(await store.now(), 1.0)
    assert calls == 1


async def test_a_drain_ends_though_events_keep_coming() -> None:
    store = MemoryStore()
    insert(store, 10)
    since = datetime.now(UTC) + timedelta(milliseconds=1)

    async def handler(event: Event) -> None:
        insert(store, 2)
        await asyncio.sleep(0.02)

    async with asyncio.timeout(20):
        await make(store, handler, concurrency=5, batch_size=5).drain(since, 1.0)
    old = [row for row in store.rows.values() if row.created_at <= since.timestamp()]
    assert {row.status for row in old} == {Status.DELIVERED}


async def test_a_probe_behind_a_long_blocked_key_reaches_the_others() -> None:
    store, seen = MemoryStore(), []
    insert(store, 120, key="blocked")
    head = next(iter(store.rows.values()))
    head.status, head.next_attempt_at = Status.FAILED, None
    insert(store, 1, key="other")
    store.destinations["runner"].circuit = "open"
    store.destinations["runner"].circuit_until = 0.0

    async def handler(event: Event) -> None:
        seen.append(event.aggregate_id)

    async with asyncio.timeout(10):
        await make(store, handler, ordered=True).drain(await store.now(), 1.0)
    assert (seen, store.destinations["runner"].circuit) == (["0"], "closed")


async def test_a_probe_looks_at_many_keys_though_only_one_may_be_under_way() -> None:
    class Asked(MemoryStore):
        async def claim(self, want: Want) -> Claim:
            wants.append(want)
            return await super().claim(want)

    wants: list[Want] = []
    store = Asked()
    insert(store, 1, key="a")
    store.destinations["runner"].circuit = "open"
    store.destinations["runner"].circuit_until = 0.0
    async with asyncio.timeout(10):
        await make(store, nothing, ordered=True, concurrency=1).drain(await store.now(), 1.0)
    assert {want.spread for want in wants if want.probe} == {None}
    assert 1 in {want.spread for want in wants if not want.probe and want.limit == 1}


class Terse(MemoryStore):
    """Says why a claim got nothing only where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.wants: list[Want] = []

    async def claim(self, want: Want) -> Claim:
        self.wants.append(want)
        await asyncio.sleep(0)
        claim = await super().claim(want)
        return claim if want.explain else replace(claim, held=None)


async def test_every_claim_of_a_drain_asks_why_it_got_nothing() -> None:
    """It may be the last one: nobody would look again, and a circuit whose time is over would stay open."""
    store = Terse()
    insert(store, 30)
    async with asyncio.timeout(10):
        await make(store, nothing, batch_size=5).drain(await store.now(), 1.0)
    assert statuses(store) == [Status.DELIVERED] * 30
    assert {want.explain for want in store.wants} == {True}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("why", "state"), [("paused", {"paused_at": 0.0}), ("open", {"circuit": "open"})])
async def test_what_holds_a_destination_up_is_noticed_by_the_second_claim_though_wakes_keep_coming(
    why: str, state: dict[str, Any], ordered: bool
) -> None:
    store, seen = Terse(), []

    class Emitting(Observer):
        held = False

        def claimed(self, destination: str, claim: Claim) -> None:
            insert(store, 1, key=str(len(store.wants)) if ordered else None)
            together.wake.wake("runner")
            if self.held:
                seen.append(claim.held and claim.held.why)
            elif len(store.wants) > 5 and claim.deliveries:
                self.held = True
                until = time.time() + 60
                store.destinations["runner"] = DestinationState(circuit_until=until, **state)

    destination = Destination("runner", "handler:", ordered=ordered, poll_interval="60s")
    together = shared(store, Emitting())
    lane = Lane(destination, HandlerSink(destination, nothing), together)
    running = asyncio.create_task(lane.run(1.0))
    async with asyncio.timeout(10):
        while len(seen) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        lane.stop()
        await running
    assert seen[1:5] == [why] * 4


class Elsewhere(MemoryStore):
    """All that is due was due before the claims look there, unless they look at all; or it refuses those."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.refuses = refuses
        self.claims: list[tuple[float, bool]] = []

    async def claim(self, want: Want) -> Claim:
        self.claims.append((time.monotonic(), want.since is not None))
        if want.since is None:
            return await super().claim(want)
        if self.refuses:
            raise StoreError("the database is away")
        return Claim()


@pytest.mark.parametrize("refuses", [False, True])
async def test_what_was_due_before_the_last_claim_is_found_at_once_unless_the_database_refuses(
    refuses: bool,
) -> None:
    store = Elsewhere(refuses=refuses)
    lane = make(store, nothing)
    insert(store, 1)
    running = asyncio.create_task(lane.run(1.0))
    async with asyncio.timeout(10):
        for count in (1, 2):
            insert(store, count - 1)
            while statuses(store) != [Status.DELIVERED] * count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        lane.stop()
        await running
    at = next(index for index, (_, hinted) in enumerate(store.claims) if hinted)
    (began, _), (then, hinted) = store.claims[at : at + 2]
    assert then - began >= 0.015 if refuses else not hinted, (
        "a database that refused is left alone for a while"
    )


async def test_a_suspect_waits_for_the_line_of_its_own_destination_only() -> None:
    store, seen = MemoryStore(), asyncio.Event()
    for name in ("slow", "fast"):
        insert(store, 1, destination=name)
    for row in store.rows.values():
        row.lease_token, row.lease_owner, row.leased_until, row.crashes = uuid4(), "dead", 0.0, 1
    store.destinations["slow"].rate_at = (await store.now()).timestamp() + 60

    async def fast(event: Event) -> None:
        seen.set()

    together = shared(store)
    limits = {"slow": "1/s", "fast": None}
    lanes = []
    for name, handler in (("slow", nothing), ("fast", fast)):
        destination = Destination(name, "handler:", rate_limit=limits[name], poll_interval="20ms")
        lanes.append(Lane(destination, HandlerSink(destination, handler), together))
    running = [asyncio.create_task(lane.run(1.0)) for lane in lanes]
    async with asyncio.timeout(10):
        await seen.wait()
        for lane in lanes:
            lane.stop()
        await asyncio.gather(*running)
    assert seen.is_set()


async def test_to_look_for_suspects_takes_no_place_in_the_line() -> None:
    store = MemoryStore()
    before = store.destinations["runner"].rate_at
    lane = make(store, nothing, rate_limit="1/m")
    await lane.drain(await store.now(), 1.0)
    assert store.destinations["runner"].rate_at == before


class Odd:
    """A sink that answers, or raises, whatever it is told to."""

    keeps_order = True

    def __init__(self, act: Callable[[Sequence[Delivery]], Sequence[Any]]) -> None:
        self._act = act

    def limit(self, concurrency: int) -> None:
        """Not of interest."""

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        return self._act(deliveries)

    async def close(self) -> None:
        """Nothing is held."""


def leak_cancellation(deliveries: Sequence[Delivery]) -> Sequence[Any]:
    raise asyncio.CancelledError


def exit_the_process(deliveries: Sequence[Delivery]) -> Sequence[Any]:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "act",
    [lambda deliveries: [None] * len(deliveries), lambda deliveries: [], leak_cancellation, exit_the_process],
    ids=["nonsense", "too few", "cancelled", "exit"],
)
async def test_whatever_a_sink_answers_the_rows_are_tried_again(act: Any) -> None:
    store = MemoryStore()
    insert(store, 2)
    destination = Destination("runner", "memory:")
    sink: Sink = Odd(act)
    async with asyncio.timeout(10):
        await Lane(destination, sink, shared(store)).drain(await store.now(), 1.0)
    assert [(row.status, row.attempts, row.crashes) for row in store.rows.values()] == [
        (Status.PENDING, 1, 0)
    ] * 2
    assert all(row.error_message for row in store.rows.values())


async def test_an_observer_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def claimed(self, destination: str, claim: Claim) -> None:
            raise ValueError("observer")

        settled = trouble = circuit = claimed  # type: ignore[assignment]

    store = MemoryStore()
    insert(store, 3)
    destination = Destination("runner", "handler:")
    lane = Lane(destination, HandlerSink(destination, nothing), shared(store, Observers([Broken()])))
    await lane.drain(await store.now(), 1.0)
    assert statuses(store) == [Status.DELIVERED] * 3
    assert "the observer Broken failed" in caplog.text


async def test_nothing_begins_while_the_share_is_none() -> None:
    store, share, under_way = MemoryStore(), 10, 0
    insert(store, 400)

    async def handler(event: Event) -> None:
        nonlocal under_way
        under_way += 1
        await asyncio.sleep(0.1)
        under_way -= 1

    destination = Destination("runner", "handler:", concurrency=10, poll_interval="20ms", batch_size=400)
    together = shared(store, share=lambda total: share)
    lane = Lane(destination, HandlerSink(destination, handler), together)
    running = asyncio.create_task(lane.run(5.0))
    async with asyncio.timeout(20):
        while not under_way:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        share = 0
        while under_way:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert Status.PENDING in statuses(store), "it did not end because everything was sent"
        share = 10
        while not under_way:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        lane.stop()
        await running
    assert under_way == 0


def test_a_probe_is_made_with_the_first_of_its_key_even_if_the_key_is_empty() -> None:
    store = MemoryStore()
    insert(store, 2, key="")
    first, second = (row for row in store.rows.values())
    for row in (first, second):
        row.lease_token, row.lease_owner = uuid4(), "me"
    circuit = Circuit()
    circuit.fail(first.delivery().event_id)
    assert choose([first.delivery(), second.delivery()], circuit) == first.delivery()
