"""Python functions as a destination, the well-behaved and the others."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import pytest

from relaybox.core.event import Event
from relaybox.core.outcome import Delivered, Reject, Retry, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError
from relaybox.sinks.handler import HandlerSink
from relaybox.sinks.sink import Answer
from relaybox.testing.sink_contract import deliveries, make_delivery
from tests.waiting import PATIENCE


@asynccontextmanager
async def sink_for(handler: Any, **settings: Any) -> AsyncIterator[HandlerSink]:
    sink = HandlerSink(Destination("shop", "handler:", **{"timeout": "60s", **settings}), handler)
    try:
        yield sink
    finally:
        await sink.close()


def reason(said: Answer) -> str:
    """Why it is to be tried again."""
    assert type(said) is Retry
    return said.reason


async def send(handler: Any, **settings: Any) -> Answer:
    async with sink_for(handler, **settings) as sink:
        [said] = await sink.send([make_delivery()])
        return said


def both(function: Callable[[Event], Any]) -> list[Any]:
    """Return the function as a synchronous and as an asynchronous handler."""

    async def asynchronous(event: Event) -> Any:
        return function(event)

    return [function, asynchronous]


@pytest.mark.parametrize("handler_kind", [0, 1])
async def test_a_handler_gets_the_event(handler_kind: int) -> None:
    seen: list[Event] = []
    delivery = make_delivery(headers='{"tenant": "acme"}', attempts=3)
    async with sink_for(both(seen.append)[handler_kind]) as sink:
        assert await sink.send([delivery]) == [Delivered()]
    [event] = seen
    assert (event.id, event.type, event.payload) == (delivery.event_id, "order.paid", {"total": 42})
    assert (event.attempt, event.headers) == (3, {"tenant": "acme"})


class Sync:
    def __call__(self, event: Event) -> None:
        self.thread = threading.current_thread()


class Async:
    async def __call__(self, event: Event) -> None:
        self.thread = threading.current_thread()

    async def method(self, event: Event) -> None:
        self.thread = threading.current_thread()


@pytest.mark.parametrize(
    ("owner", "name", "in_loop"),
    [(Sync(), "__call__", False), (Async(), "__call__", True), (Async(), "method", True)],
)
async def test_a_handler_may_be_any_callable(owner: Any, name: str, in_loop: bool) -> None:
    for handler in (owner if name == "__call__" else owner.method, functools.partial(getattr(owner, name))):
        assert await send(handler) == Delivered()
        assert (owner.thread is threading.current_thread()) is in_loop


async def test_a_synchronous_function_that_returns_a_coroutine_is_awaited() -> None:
    done: list[str] = []

    async def work(event: Event) -> None:
        await asyncio.sleep(0)
        done.append(event.type)

    assert await send(lambda event: work(event)) == Delivered()
    assert done == ["order.paid"]


def yields(event: Event) -> Any:
    yield event


async def ayields(event: Event) -> Any:
    yield event


@pytest.mark.parametrize("handler", [None, "shop.handlers:paid", 7, yields, ayields])
def test_an_object_that_is_not_a_handler_is_refused_at_the_start(handler: Any) -> None:
    with pytest.raises(ConfigError, match="the handler of destination 'shop'"):
        HandlerSink(Destination("shop", "handler:"), handler)


@pytest.mark.parametrize("result", [None, 0, False, "no", {"a": 1}, object(), Reject("returned")])
@pytest.mark.parametrize("kind", [0, 1])
async def test_what_a_handler_returns_does_not_matter(result: Any, kind: int) -> None:
    assert await send(both(lambda event: result)[kind]) == Delivered()


class Odd(BaseException):
    """What no handler should raise."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such order"), "ValueError: no such order"),
        (KeyError("id"), "KeyError: 'id'"),
        (AssertionError(), "AssertionError"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit(), "SystemExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError(), "CancelledError"),
        (asyncio.CancelledError("stop"), "CancelledError: stop"),
        (TimeoutError("theirs"), "TimeoutError: theirs"),
        (MemoryError(), "MemoryError"),
        (RecursionError("deep"), "RecursionError: deep"),
        (Unprintable(), "Unprintable"),
        (Odd("odd"), "Odd: odd"),
        (BaseExceptionGroup("many", [Odd()]), "BaseExceptionGroup: many (1 sub-exception)"),
        (ExceptionGroup("many", [ValueError("a")]), "ExceptionGroup: many (1 sub-exception)"),
    ],
)
async def test_whatever_a_handler_raises_is_tried_again(
    error: BaseException, expected: str, kind: int
) -> None:
    def handler(event: Event) -> NoReturn:
        raise error

    async with sink_for(both(handler)[kind]) as sink:
        for _ in range(2):
            [said] = await sink.send([make_delivery()])
            assert reason(said) == expected
    assert sink.overdue == 0


async def test_ends_that_only_a_thread_can_come_to_are_tried_again() -> None:
    for error in (StopIteration(1), GeneratorExit(), StopAsyncIteration()):

        def handler(event: Event, error: BaseException = error) -> NoReturn:
            raise error

        assert type(await send(handler)) is Retry


class Exhausted(functools.partial[Any]):
    """Taken for an asynchronous function; a call ends before there is a coroutine."""

    def __call__(self, event: Event) -> Any:
        return next(iter(()))


async def test_a_call_that_stops_before_there_is_a_coroutine_is_not_a_success() -> None:
    async with sink_for(Exhausted(Async().method)) as sink:
        assert sink._in_loop
        [said] = await sink.send([make_delivery()])
    assert reason(said) == "StopIteration"


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize(
    "outcome", [Retry("later", after=7), Reject("never"), Unavailable("down", after=7), Unreachable("gone")]
)
async def test_an_outcome_that_is_raised_is_the_answer(outcome: Exception, kind: int) -> None:
    def handler(event: Event) -> NoReturn:
        raise outcome

    assert await send(both(handler)[kind]) is outcome


async def test_a_payload_that_does_not_decode_is_rejected() -> None:
    async with sink_for(print) as sink:
        [said] = await sink.send([make_delivery("{")])
    assert type(said) is Reject


@pytest.mark.parametrize("error", [None, ValueError("cleaning up")])
async def test_an_asynchronous_handler_that_hangs_is_cancelled_whatever_it_raises_then(
    error: Exception | None,
) -> None:
    cancelled = asyncio.Event()

    async def handler(event: Event) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as cancellation:
            cancelled.set()
            raise error or cancellation from None

    assert reason(await send(handler, timeout="50ms")) == "handler took longer than 0.05s"
    assert cancelled.is_set()


async def test_threads_are_used_again_and_no_more_than_the_concurrency() -> None:
    threads: set[threading.Thread] = set()
    async with sink_for(lambda event: threads.add(threading.current_thread()), concurrency=3) as sink:
        batches = [deliveries(20) for _ in range(3)]
        await asyncio.gather(*map(sink.send, batches))
    assert 1 <= len(threads) <= 3
    for thread in threads:
        assert thread.daemon
        await asyncio.to_thread(thread.join, PATIENCE)
        assert not thread.is_alive()


async def test_a_handler_in_a_thread_sees_the_context_of_the_relay() -> None:
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("of the relay")
    seen: list[str] = []
    await send(lambda event: seen.append(variable.get()))
    assert seen == ["of the relay"]


def test_one_sink_serves_a_loop_after_the_other() -> None:
    async def handler(event: Event) -> None:
        await asyncio.sleep(0)

    async def send_twice() -> list[Any]:
        return await asyncio.gather(*(sink.send(deliveries(3)) for _ in range(2)))

    sink = HandlerSink(Destination("shop", "handler:", concurrency=1), handler)
    for _ in range(3):
        assert asyncio.run(send_twice()) == [[Delivered()] * 3] * 2


def test_a_handler_that_hangs_does_not_hold_up_the_exit_of_the_process() -> None:
    program = """
        import asyncio, threading
        from relaybox.core.settings import Destination
        from relaybox.sinks import handler as handlers
        from relaybox.sinks.handler import HandlerSink
        from relaybox.testing.sink_contract import deliveries, make_delivery

        def handler(event):
            threading.Event().wait()

        async def main():
            handlers.LEAST = 0.1
            sink = HandlerSink(Destination("shop", "handler:", timeout="10ms"), handler)
            [said] = await sink.send([make_delivery()])
            print(said.reason)
            await sink.close()

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout == "the handler is still running after 0.1 s; its thread cannot be stopped\n"
    assert done.stderr == ""


async def test_after_a_send_is_cancelled_nothing_more_is_tried() -> None:
    tried: list[Event] = []
    begun = asyncio.Event()

    async def handler(event: Event) -> None:
        tried.append(event)
        begun.set()
        await asyncio.Event().wait()

    async with sink_for(handler, concurrency=1) as sink:
        sending = asyncio.ensure_future(sink.send(deliveries(3)))
        await begun.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert len(tried) == 1


async def test_a_handler_that_cancels_its_own_task_is_answered_with_a_retry() -> None:
    async def handler(event: Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    sink = HandlerSink(Destination("runner", "handler:"), handler)
    batch = deliveries(3)
    answers = await sink.send(batch)
    assert [type(answer) for answer in answers] == [Retry] * 3
