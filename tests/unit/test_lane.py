"""A lane against a store in memory: what must not hang, whatever fails around it or stops it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from relaybox.core.circuit import Circuit
from relaybox.core.event import Delivery, Event, Status
from relaybox.core.outcome import Unavailable
from relaybox.core.settings import Backoff, Destination
from relaybox.errors import StoreError
from relaybox.relay import claim, shutdown
from relaybox.relay.lane import Lane
from relaybox.relay.observer import Observer, Observers
from relaybox.relay.probe import choose
from relaybox.relay.sizing import BATCHES_IN_FLIGHT
from relaybox.sinks.sink import REGARDLESS, Answer, Progress, Sink
from relaybox.stores.memory import DestinationState, MemoryStore
from relaybox.stores.store import Claim, Settlement, Want
from tests.unit.lanes import drain, filled, insert, make, nothing, open_circuit, running, shared, statuses
from tests.waiting import PATIENCE, await_for


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


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "PATIENCE_TO_SETTLE", 0.1)


@pytest.mark.parametrize("probing", [False, True])
async def test_a_lane_stops_though_the_database_is_away(probing: bool) -> None:
    store = Away()
    insert(store, count=1 if probing else 100)
    if probing:
        open_circuit(store)

    async def handler(event: Event) -> None:
        store.away = True

    async with running(make(store, handler, batch_size=5)):
        await await_for(lambda: store.away)
    assert set(statuses(store)) == {Status.PENDING}


async def test_a_circuit_whose_events_all_wait_is_reported_open_and_never_closed() -> None:
    store, seen = filled(1), []
    for row in store.rows.values():
        assert row.next_attempt_at is not None
        row.next_attempt_at += 3600
    open_circuit(store)

    class Watching(Observer):
        def claimed(self, destination: str, claim: Claim) -> None:
            seen.append(claim.held and claim.held.why)

    async with running(make(store, nothing, shared(store, Watching()))):
        await await_for(lambda: len(seen) >= 5)
    assert set(seen) == {"open"}


@pytest.mark.parametrize("after", [0, None])
async def test_a_drain_tries_an_event_once_whose_attempts_do_not_count(after: float | None) -> None:
    store, calls = filled(1), 0

    async def handler(event: Event) -> None:
        nonlocal calls
        calls += 1
        raise Unavailable("not now", after=after)

    await drain(store, make(store, handler, backoff=Backoff(base=0, cap=0)))
    assert calls == 1


async def test_a_drain_ends_though_events_keep_coming() -> None:
    store = filled(10)
    since = datetime.now(UTC) + timedelta(milliseconds=1)

    async def handler(event: Event) -> None:
        insert(store, count=2)
        await asyncio.sleep(0.02)

    async with asyncio.timeout(PATIENCE):
        await make(store, handler, concurrency=5, batch_size=5).drain(since, 1.0)
    old = [row for row in store.rows.values() if row.created_at <= since.timestamp()]
    assert {row.status for row in old} == {Status.DELIVERED}


async def test_a_probe_behind_a_long_blocked_key_reaches_the_others() -> None:
    store, seen = filled(120, key="blocked"), []
    head = next(iter(store.rows.values()))
    head.status, head.next_attempt_at = Status.FAILED, None
    insert(store, key="other")
    open_circuit(store)

    async def handler(event: Event) -> None:
        seen.append(event.aggregate_id)

    await drain(store, make(store, handler, ordered=True))
    assert (seen, store.destinations["runner"].circuit) == (["0"], "closed")


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


async def test_a_probe_looks_at_many_keys_though_only_one_may_be_under_way() -> None:
    store = Terse()
    insert(store, key="a")
    open_circuit(store)
    await drain(store, make(store, ordered=True, concurrency=1))
    assert {want.spread for want in store.wants if want.probe} == {None}
    assert {want.spread for want in store.wants if not want.probe} == {10, 1}


async def test_every_claim_of_a_drain_asks_why_it_got_nothing() -> None:
    """It may be the last one: without another look, a circuit whose time is over would stay open."""
    store = Terse()
    insert(store, count=30)
    await drain(store, make(store, batch_size=5))
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
            insert(store, key=str(len(store.wants)) if ordered else None)
            together.wake.wake("runner")
            if self.held:
                seen.append(claim.held and claim.held.why)
            elif len(store.wants) > 5 and claim.deliveries:
                self.held = True
                until = time.time() + 3600
                store.destinations["runner"] = DestinationState(circuit_until=until, **state)

    together = shared(store, Emitting())
    async with running(make(store, nothing, together, ordered=ordered, poll_interval="60s")):
        await await_for(lambda: len(seen) >= 5)
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
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default every half second, which a busy machine may skip.
    monkeypatch.setattr(claim, "LOOK_AT_ALL", 3600.0)
    store = Elsewhere(refuses=refuses)
    insert(store)
    async with running(make(store)):
        await await_for(lambda: sum(hinted for _, hinted in store.claims) >= 2)
        insert(store)
        if refuses:
            monkeypatch.setattr(claim, "LOOK_AT_ALL", 0.0)
        await await_for(lambda: statuses(store) == [Status.DELIVERED] * 2)
    at = next(index for index, (_, hinted) in enumerate(store.claims) if hinted)
    (began, _), (then, hinted) = store.claims[at : at + 2]
    assert then - began >= 0.015 if refuses else not hinted, (
        "a database that refused is left alone for a while"
    )


async def test_a_suspect_waits_for_the_line_of_its_own_destination_only() -> None:
    store, seen = MemoryStore(), asyncio.Event()
    for name in ("slow", "fast"):
        insert(store, destination=name)
    for row in store.rows.values():
        row.lease_token, row.lease_owner, row.leased_until, row.crashes = uuid4(), "dead", 0.0, 1
    store.destinations["slow"].rate_at = (await store.now()).timestamp() + 3600

    async def fast(event: Event) -> None:
        seen.set()

    together = shared(store)
    slow_lane = make(store, nothing, together, "slow", rate_limit="1/s")
    async with running(slow_lane, make(store, fast, together, "fast")), asyncio.timeout(PATIENCE):
        await seen.wait()


async def test_to_look_for_suspects_takes_no_place_in_the_line() -> None:
    store = MemoryStore()
    before = store.destinations["runner"].rate_at
    await drain(store, make(store, rate_limit="1/m"))
    assert store.destinations["runner"].rate_at == before


class Watched(MemoryStore):
    """A store that counts the looks for suspects."""

    looks = 0

    async def claim(self, want: Want) -> Claim:
        self.looks += want.suspects
        return await super().claim(want)


async def test_a_lane_that_is_full_takes_nothing_but_suspects() -> None:
    store = Watched()
    insert(store, count=100)

    async def hang(event: Event) -> None:
        await asyncio.Event().wait()

    lane = make(store, hang, shared(store, hasty=True), batch_size=1, concurrency=1)
    async with running(lane, patience=0.0):
        await await_for(lambda: store.looks >= 10, "some looks")
        assert sum(row.lease_token is not None for row in store.rows.values()) <= BATCHES_IN_FLIGHT + 1


class Odd:
    """A sink that answers, or raises, what a test says."""

    keeps_order = True

    def __init__(self, act: Callable[[Sequence[Delivery]], Sequence[Any]]) -> None:
        self._act = act

    def limit(self, concurrency: int) -> None:
        """Do nothing: it does not matter here."""

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        return self._act(deliveries)

    async def close(self) -> None:
        """Do nothing: nothing is held."""


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
    store = filled(2)
    sink: Sink = Odd(act)
    await drain(store, Lane(Destination("runner", "memory:"), sink, shared(store)))
    rows = store.rows.values()
    assert [(row.status, row.attempts, row.crashes) for row in rows] == [(Status.PENDING, 1, 0)] * 2
    assert all(row.error_message for row in rows)


async def test_an_observer_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def claimed(self, destination: str, claim: Claim) -> None:
            raise ValueError("observer")

        settled = trouble = circuit = claimed  # type: ignore[assignment]

    store = filled(3)
    await drain(store, make(store, nothing, shared(store, Observers([Broken()]))))
    assert statuses(store) == [Status.DELIVERED] * 3
    assert "the observer Broken failed" in caplog.text


async def test_nothing_begins_while_there_is_no_share() -> None:
    store, share, begun, under_way = filled(400), 10, 0, 0

    async def handler(event: Event) -> None:
        nonlocal begun, under_way
        begun += 1
        under_way += 1
        await asyncio.sleep(0.1)
        under_way -= 1

    together = shared(store, share=lambda *_: share, hasty=True)
    async with running(make(store, handler, together, concurrency=10, batch_size=400), patience=60.0):
        await await_for(lambda: begun)
        share = 0
        await await_for(lambda: not under_way)
        assert Status.PENDING in statuses(store), "it did not end because everything was sent"
        before, share = begun, 10
        await await_for(lambda: begun > before)
    assert under_way == 0


def test_a_probe_is_made_with_the_first_of_its_key_even_if_the_key_is_empty() -> None:
    store = filled(2, key="")
    for row in store.rows.values():
        row.lease_token, row.lease_owner = uuid4(), "me"
    first, second = (row.delivery() for row in store.rows.values())
    circuit = Circuit()
    circuit.fail(first.event_id)
    assert choose([first, second], circuit) == first


LITTLE = 0.1
"""Seconds that a drain has for what hangs."""


def rows(store: MemoryStore) -> list[tuple[Status, int, bool]]:
    """Return the state and the attempts of each row, and if it is leased."""
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
async def test_a_stopped_drain_has_some_patience_with_a_handler_that_hangs(
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


async def test_what_was_answered_is_settled_and_what_was_not_begun_is_given_back(hanging: Hanging) -> None:
    store = filled(20)
    lane = make(store, hanging, concurrency=3)
    assert not await stopped(lane, store, hanging.called, hanging.go_on, PATIENCE)
    assert 0 < hanging.finished <= 3
    done = [DELIVERED] * hanging.finished
    assert sorted(rows(store)) == sorted(done + [GIVEN_BACK] * (20 - hanging.finished))


@pytest.mark.parametrize("what", ["probe", "suspect"])
async def test_a_stopped_drain_gives_a_probe_or_a_suspect_back(hanging: Hanging, what: str) -> None:
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


async def test_what_a_look_for_suspects_got_while_the_relay_was_stopped_is_given_back() -> None:
    looking, go_on = asyncio.Event(), asyncio.Event()

    class Slow(MemoryStore):
        async def claim(self, want: Want) -> Claim:
            if not want.suspects:
                return Claim()
            claim = await super().claim(want)
            looking.set()
            await go_on.wait()
            return claim

    store = filled(5, Slow())
    lane = make(store)
    running = asyncio.create_task(lane.run(LITTLE))
    async with asyncio.timeout(PATIENCE):
        await looking.wait()
        lane.stop()
        await asyncio.sleep(0)
        go_on.set()
        await running
    assert rows(store) == [GIVEN_BACK] * 5


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
