"""Call Python functions as a destination: async functions in the relay's loop, others in threads.

A handler may raise anything, exit, cancel itself or never return: that is the answer about its event, and the
relay goes on. An async handler is cancelled after its timeout. A synchronous one keeps its place and key
until it returns. After ``limit_of(timeout)`` seconds the event fails, as the result is unknown, and the
thread is abandoned.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from relaybox.core.event import Delivery, Event
from relaybox.core.outcome import Interrupted, Reject, Retry, Unavailable, unfinished
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError, shorten
from relaybox.sinks.deadline import Deadline
from relaybox.sinks.sink import (
    AT_A_STRETCH,
    DELIVERED,
    Answer,
    CancelledWithAnswer,
    OneByOne,
    answer_of,
    describe,
)
from relaybox.sinks.threads import Call, Threads
from relaybox.wire.envelope import event_of
from relaybox.wire.tracing import attached, sampled, stored

Handler = Callable[[Event], Any]

log = logging.getLogger("relaybox.handler")

ANSWERS = (Retry, Reject, Unavailable, asyncio.CancelledError, GeneratorExit)

TIMES, LEAST = 10, 60.0
"""Wait for a synchronous handler ``TIMES`` its timeout, and at least ``LEAST`` seconds."""


def limit_of(timeout: float) -> float:
    """Return the seconds after which the thread of a synchronous handler is abandoned."""
    return max(TIMES * timeout, LEAST)


class HandlerSink(OneByOne):
    """Calls a function with each event, or with ``given(delivery)``; its return value is ignored."""

    def __init__(
        self,
        destination: Destination,
        handler: Callable[[Any], Any],
        given: Callable[[Delivery], Any] = event_of,
    ) -> None:
        super().__init__(destination.concurrency)
        self._name = destination.name
        self._handler = handler
        self._given = given
        self._deadline = Deadline(destination.timeout)
        self._limit = Deadline(self._limit_of(destination.timeout))
        self._in_loop = is_async(destination.name, handler)
        self._threads = Threads(destination.name)

    @property
    def overdue(self) -> int:
        """Return the number of synchronous handlers that are past their timeout and still running."""
        return self._threads.longer_than(self._deadline.seconds)

    def begin(self, delivery: Delivery, traced: bool = False) -> Awaitable[None] | None:
        """Call the handler; return what is left to await, if any. ``traced``: its trace context is active."""
        headers = delivery.headers
        if not traced and headers != "{}" and sampled(headers):
            return self._within_trace(stored(headers), delivery)
        event = self._given(delivery)
        if not self._in_loop:
            self._threads.check_room()
            return self._in_thread(event)
        try:
            work = self._handler(event)
            try:
                waits_for = _step(work.send, None)
            except StopIteration:
                # The handler never waited, so it needs no deadline.
                return None
        except ANSWERS:
            raise
        except BaseException as error:
            raise self._failed(error) from error
        return self._within_its_time(_resumed(work, waits_for))

    async def _within_trace(self, context: Any, delivery: Delivery) -> None:
        with attached(context):
            left = self.begin(delivery, traced=True)
            if left is not None:
                await left
        if left is None and not delivery.position % AT_A_STRETCH:
            await asyncio.sleep(0)

    async def _within_its_time(self, work: Awaitable[None]) -> None:
        block = self._deadline()
        try:
            with block:
                await work
        except ANSWERS:
            raise
        except BaseException as error:
            if block.expired:
                raise Retry(f"handler took longer than {self._deadline.seconds:g}s") from None
            raise self._failed(error) from error

    async def _in_thread(self, event: Any) -> None:
        call = self._threads.start(self._handler, event)
        try:
            with self._limit():
                await self._threads.wait(call)
        except asyncio.CancelledError:
            raise CancelledWithAnswer(self._known_of(call)) from None
        except TimeoutError:
            if not call.ended:
                raise self._still_running(self._limit.seconds) from None
        result = self._result(call)
        if inspect.isawaitable(result):
            # A synchronous function that returns a coroutine: the work has not begun yet.
            await self._within_its_time(result)

    def _known_of(self, call: Call) -> Answer:
        """Return the answer of a call that the relay does not wait for any longer; it may have ended."""
        if not call.ended:
            return self._stopped()
        try:
            return self._stopped() if unfinished(self._result(call)) else DELIVERED
        except Exception as error:
            return answer_of(error)

    def _result(self, call: Call) -> Any:
        try:
            return call.result()
        except ANSWERS:
            raise
        except BaseException as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> Retry:
        log.warning("%s: the handler failed with %s", self._name, describe(error), exc_info=error)
        return Retry(describe(error))

    async def close(self) -> None:
        """Stop the threads; one that is still in a handler stops after it."""
        self._threads.close()

    def _limit_of(self, timeout: float) -> float:
        return limit_of(timeout)

    def _stopped(self) -> Answer:
        """Return the answer of a handler that the relay stopped waiting for."""
        return Interrupted("the relay stopped before the handler returned", after=self._deadline.seconds)

    def _still_running(self, seconds: float) -> Exception:
        return Reject(f"the handler is still running after {seconds:g} s; its thread cannot be stopped")


@types.coroutine
def _resumed(work: Coroutine[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, None]:
    while True:
        try:
            try:
                sent = yield waits_for
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:
                waits_for = _step(work.throw, error)
            else:
                waits_for = _step(work.send, sent)
        except StopIteration:
            return


def _step(go_on: Callable[[Any], Any], given: Any) -> Any:
    try:
        return go_on(given)
    except GeneratorExit as error:
        # Raised by the handler itself; it must not look as if our own coroutine is being closed.
        raise Retry(describe(error)) from error


def is_async(destination: str, handler: Handler) -> bool:
    """True if the handler is async; raise ``ConfigError`` if it cannot be a handler."""
    where = f"the handler of destination {destination!r}, {shorten(handler)},"
    if not callable(handler):
        raise ConfigError(f"{where} is not a function; give one that takes an Event")
    kinds = (handler, getattr(handler, "__call__", None))  # noqa: B004
    if any(inspect.isgeneratorfunction(kind) or inspect.isasyncgenfunction(kind) for kind in kinds):
        raise ConfigError(f"{where} yields, so that a call would run none of it; return instead")
    return any(inspect.iscoroutinefunction(kind) for kind in kinds)
