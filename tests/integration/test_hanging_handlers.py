"""Synchronous handlers over their time: a thread cannot be stopped, so it keeps its place and its key."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from relaybox.core.event import Delivery, Event, Status
from relaybox.core.outcome import Delivered, Interrupted, Reject, Retry, Unreachable
from relaybox.core.settings import Destination
from relaybox.relay.decide import FORGIVEN_STOPS
from relaybox.relay.observer import Observer
from relaybox.sinks import handler as handlers
from relaybox.sinks import threads
from relaybox.sinks.handler import HandlerSink, limit_of
from relaybox.sinks.sink import Answer, Regardless
from relaybox.stores.memory import MemoryStore
from relaybox.testing.sink_contract import deliveries, make_delivery
from tests.unit import lanes
from tests.waiting import PATIENCE, await_for, cancel, wait_for


class Hanging:
    """A handler that does not return while it is held, unless its event is another."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.called: list[Any] = []
        self.ended: list[Any] = []
        self.threads: set[threading.Thread] = set()
        self.raises: Exception | None = None
        self._lock = threading.Lock()
        self._now = 0
        self.at_once = 0

    def __call__(self, event: Event) -> None:
        with self._lock:
            self.threads.add(threading.current_thread())
            self.called.append(event.payload)
            self._now += 1
            self.at_once = max(self.at_once, self._now)
        if event.payload != "another":
            self.go_on.wait(PATIENCE)
        with self._lock:
            self._now -= 1
            self.ended.append(event.payload)
        if self.raises is not None:
            raise self.raises


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    one = Hanging()
    yield one
    one.go_on.set()
    wait_for(lambda: len(one.ended) == len(one.called), "the calls to end")


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "LEAST", 0.2)


@asynccontextmanager
async def sink_for(handler: Callable[[Event], Any], **settings: Any) -> AsyncIterator[HandlerSink]:
    sink = HandlerSink(Destination("shop", "handler:", **{"timeout": "10ms", **settings}), handler)
    try:
        yield sink
    finally:
        await sink.close()


def key_of(payload: str) -> Delivery:
    return make_delivery(f'"{payload}"', key="k")


async def test_it_keeps_its_place_and_its_key_and_what_it_does_then_is_the_answer(hanging: Hanging) -> None:
    async with sink_for(hanging, concurrency=1) as sink:
        sending = asyncio.ensure_future(sink.send([key_of("1"), key_of("2"), make_delivery('"another"')]))
        await await_for(lambda: sink.overdue, "the first is over its time")
        assert (hanging.called, sending.done()) == (["1"], False)
        hanging.go_on.set()
        assert await sending == [Delivered()] * 3
        assert sink.overdue == 0
    assert sorted(hanging.ended) == ["1", "2", "another"]
    assert hanging.ended.index("1") < hanging.ended.index("2")
    assert (hanging.at_once, len(hanging.threads)) == (1, 1)


async def test_what_it_raises_in_the_end_is_the_answer(hanging: Hanging) -> None:
    hanging.raises = ValueError("late")
    async with sink_for(hanging) as sink:
        sending = asyncio.ensure_future(sink.send([make_delivery()]))
        await await_for(lambda: sink.overdue, "it is over its time")
        hanging.go_on.set()
        [said] = await sending
    assert isinstance(said, Retry)
    assert said.reason == "ValueError: late"


def test_the_limit_is_ten_times_the_timeout_and_a_minute_at_least() -> None:
    assert (limit_of(30.0), limit_of(0.1)) == (300.0, 60.0)


async def test_after_the_limit_the_event_is_failed_and_its_place_is_free(
    hanging: Hanging, short_limit: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with sink_for(hanging, concurrency=1) as sink:
        [said] = await sink.send([hung := make_delivery()])
        assert isinstance(said, Reject)
        assert said.reason == "the handler is still running after 0.2 s; its thread cannot be stopped"
        assert sink.overdue == 1
        assert await sink.send([make_delivery('"another"')]) == [Delivered()]
        assert sink.overdue == 1
        with caplog.at_level(logging.WARNING, "relaybox.handler"):
            hanging.go_on.set()
            await await_for(lambda: caplog.records, "the log")
        assert sink.overdue == 0
    assert f"the call for event {hung.event_id} that was given up ended" in caplog.text
    assert "it returned" in caplog.text


async def test_while_too_many_run_on_no_other_is_begun(
    hanging: Hanging, short_limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "MOST_LEFT", 3)
    async with sink_for(hanging, concurrency=2) as sink:
        answers = await sink.send(deliveries(20))
        assert [type(said) for said in answers] == [Reject] * 4 + [Unreachable] * 16
        assert "calls that were given up are still running" in str(answers[-1])
        assert len(hanging.threads) == 4
        hanging.go_on.set()
        await await_for(lambda: not sink.overdue, "they end")
        assert await sink.send(deliveries(5)) == [Delivered()] * 5


class Reports(Regardless):
    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def report(self, delivery: Delivery, answer: Answer) -> None:
        self.answers.append(answer)


async def test_a_send_that_is_cancelled_reports_what_runs_on(hanging: Hanging) -> None:
    reports = Reports()
    async with sink_for(hanging, concurrency=1) as sink:
        sending = asyncio.ensure_future(sink.send(deliveries(2), reports))
        await await_for(lambda: hanging.called, "a call")
        await cancel(sending)
    [said] = reports.answers
    assert isinstance(said, Interrupted)
    assert said.reason == "the relay stopped before the handler returned"
    assert len(hanging.called) == 1


async def end_unheard(sink: HandlerSink, hanging: Hanging) -> None:
    """Let the one call end while the event loop is blocked, so that the loop does not hear of it."""
    await await_for(lambda: hanging.called, "a call")
    [worker] = sink._threads._busy
    hanging.go_on.set()
    wait_for(lambda: worker.call.ended, "the end of the call")


@pytest.mark.parametrize(
    ("raised", "answer"), [(None, Delivered), (Reject("no"), Reject), (ValueError("bad"), Retry)]
)
async def test_a_function_that_has_ended_is_not_called_again_because_the_relay_stops(
    hanging: Hanging, raised: Exception | None, answer: type
) -> None:
    hanging.raises, reports = raised, Reports()
    async with sink_for(hanging, concurrency=1) as sink:
        sending = asyncio.ensure_future(sink.send([make_delivery()], reports))
        await end_unheard(sink, hanging)
        await cancel(sending)
        assert [type(said) for said in reports.answers] == [answer]
        hanging.raises = None
        assert await sink.send([make_delivery()]) == [Delivered()]
    assert len(hanging.threads) == 1


async def test_a_function_that_ends_at_its_limit_has_ended(hanging: Hanging, short_limit: None) -> None:
    async with sink_for(hanging, concurrency=1) as sink:
        sending = asyncio.ensure_future(sink.send([make_delivery()]))
        await end_unheard(sink, hanging)
        limit = asyncio.get_running_loop().time() + 0.2
        wait_for(lambda: asyncio.get_running_loop().time() > limit, "the limit")
        assert await sending == [Delivered()]


async def test_a_coroutine_of_a_plain_function_that_a_stop_cuts_off_has_not_run(hanging: Hanging) -> None:
    reports = Reports()

    async def work() -> None:
        raise AssertionError

    def plain(event: Event) -> Any:
        hanging(event)
        return work()

    async with sink_for(plain, concurrency=1) as sink:
        sending = asyncio.ensure_future(sink.send([make_delivery()], reports))
        await end_unheard(sink, hanging)
        await cancel(sending)
    assert [type(said) for said in reports.answers] == [Interrupted]


class Overdue(Observer):
    def __init__(self) -> None:
        self.count = 0

    def overdue(self, destination: str, count: int) -> None:
        self.count = count


async def test_a_lane_holds_the_key_and_the_lease_of_a_handler_over_its_time(hanging: Hanging) -> None:
    store = lanes.filled(3, key="k")
    watch = Overdue()
    together = lanes.shared(store, watch, hasty=True)
    lane = lanes.make(store, hanging, together, ordered=True, timeout="10ms", lease="1s", concurrency=5)
    async with lanes.running(lane):
        await await_for(lambda: watch.count, "over its time")
        first = next(iter(store.rows.values()))
        before = first.leased_until
        await await_for(lambda: first.leased_until != before, "its lease is extended")
        assert (len(hanging.called), first.attempts) == (1, 1)
        hanging.go_on.set()
        await await_for(lambda: set(lanes.statuses(store)) == {Status.DELIVERED}, "delivered")
        await await_for(lambda: not watch.count, "no longer")
    assert (hanging.at_once, len(hanging.called)) == (1, 3)


@pytest.mark.parametrize("on_failed", ["skip", "block"])
async def test_a_key_goes_on_after_the_limit_as_after_any_failure(
    hanging: Hanging, short_limit: None, on_failed: str
) -> None:
    store = lanes.filled(1, key="k")
    lane = lanes.make(store, hanging, ordered=True, on_failed=on_failed, timeout="10ms")
    [first] = store.rows.values()
    async with lanes.running(lane):
        await await_for(lambda: first.status is Status.FAILED, "failed")
        hanging.go_on.set()
        lanes.insert(store, key="k")
        if on_failed == "skip":
            await await_for(lambda: lanes.statuses(store)[1] is Status.DELIVERED, "the key goes on")
    assert "still running after 0.2 s" in str(first.error_message)
    assert first.attempts == 1
    assert lanes.statuses(store)[1] is (Status.DELIVERED if on_failed == "skip" else Status.PENDING)


async def test_a_relay_that_stops_does_not_wait_and_does_not_say_that_it_was_not_tried(
    hanging: Hanging,
) -> None:
    store = lanes.filled(2)
    lane = lanes.make(store, hanging, concurrency=1, timeout="10ms")
    async with lanes.running(lane, patience=0.05):
        await await_for(lambda: hanging.called, "a call")
    rows = sorted((row.attempts, row.error_message or "") for row in store.rows.values())
    assert rows == [(0, ""), (0, "the relay stopped before the handler returned")]
    assert set(lanes.statuses(store)) == {Status.PENDING}
    assert [row.lease_token for row in store.rows.values()] == [None, None]
    assert len(hanging.called) == 1


async def test_a_probe_that_a_stop_interrupts_leaves_the_circuit_open(hanging: Hanging) -> None:
    store = lanes.filled(1)
    lanes.open_circuit(store)
    async with lanes.running(lanes.make(store, hanging, timeout="10ms"), patience=0.05):
        await await_for(lambda: hanging.called, "the probe")
    assert store.destinations["runner"].circuit == "open"


async def interrupted_drain(store: MemoryStore, hanging: Hanging) -> None:
    """Stop a drain while it calls the handler."""
    lane = lanes.make(store, hanging, ordered=True, on_failed="skip", timeout="1ms")
    draining = asyncio.ensure_future(lanes.drain(store, lane, patience=0.01))
    calls = len(hanging.called)
    await await_for(lambda: len(hanging.called) > calls, "a call")
    lane.stop()
    await draining


async def test_a_function_that_no_drain_waits_out_is_failed_in_the_end_and_its_threads_are_capped(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = FORGIVEN_STOPS + 5
    monkeypatch.setattr(threads, "MOST_LEFT", calls)
    store = lanes.filled(2, key="k")
    first, second = store.rows.values()
    for _ in range(calls):
        await await_for(lambda: first.free(time.time()), "its next attempt")
        await interrupted_drain(store, hanging)
    assert first.status is Status.FAILED
    assert first.error_message == "the relay stopped before the handler returned"
    assert second.status is Status.PENDING
    assert await lanes.drain(store, lanes.make(store, hanging, ordered=True, on_failed="skip"))
    assert (len(hanging.threads), store.destinations["runner"].circuit) == (calls, "open")


async def test_suspects_are_tried_by_a_drain_that_a_function_outlasts(hanging: Hanging) -> None:
    store, tried = MemoryStore(), []

    def work(event: Event) -> None:
        tried.append(event.aggregate_id)
        if event.aggregate_id == "1":
            hanging(event)

    lanes.insert(store, count=2)
    suspect, _ = store.rows.values()
    suspect.crashes = FORGIVEN_STOPS
    lane = lanes.make(store, work, concurrency=2, timeout="10ms")
    draining = asyncio.ensure_future(lanes.drain(store, lane, patience=0.01))
    await await_for(lambda: suspect.status is Status.DELIVERED, "the suspect, beside the function")
    lane.stop()
    assert not await draining
    assert sorted(tried) == ["0", "1"]


async def test_a_child_process_forgets_the_threads_that_its_parent_left_to_themselves(
    hanging: Hanging, short_limit: None
) -> None:
    async with sink_for(hanging) as sink:
        await sink.send([make_delivery()])
        assert sink.overdue == 1
        if not (child := os.fork()):
            os._exit(sink.overdue)
        assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
        assert sink.overdue == 1


async def test_a_drain_ends_though_every_handler_hangs(
    hanging: Hanging, short_limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "MOST_LEFT", 3)
    store = lanes.filled(20)
    assert await lanes.drain(store, lanes.make(store, hanging, concurrency=2, timeout="10ms"))
    assert lanes.statuses(store).count(Status.FAILED) == 4
    assert lanes.statuses(store).count(Status.PENDING) == 16
    assert store.destinations["runner"].circuit == "open"
    assert "calls that were given up are still running" in str(store.destinations["runner"].circuit_reason)
    assert len(hanging.threads) == 4


async def test_a_destination_whose_handlers_hang_does_not_hold_up_another(
    hanging: Hanging, short_limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "MOST_LEFT", 1)
    store, seen = MemoryStore(), []
    lanes.insert(store, count=10, destination="hangs")
    together = lanes.shared(store)
    hangs = lanes.make(store, hanging, together, "hangs", concurrency=2, timeout="10ms")
    other = lanes.make(store, lambda event: seen.append(event), together, "other", concurrency=2)
    async with lanes.running(hangs, other, patience=0.05):
        await await_for(lambda: store.destinations["hangs"].circuit == "open", "too many hang")
        lanes.insert(store, count=10, destination="other")
        await await_for(lambda: len(seen) == 10, "the other's")
