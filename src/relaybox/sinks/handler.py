"""Python functions as a destination: asynchronous ones run in the relay's loop, synchronous ones in threads.

Whatever a handler does is an answer about its event: it may raise anything, end the process, cancel itself
or never return, and the relay goes on. An asynchronous handler that is over its time is cancelled. A thread
cannot be stopped: a synchronous one keeps its place and its key until it returns, and what it does then is
the answer. After ``limit_of`` its timeout the event is failed, because nobody knows what will become of it,
and the thread is left to itself.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from relaybox.core.event import Delivery, Event
from relaybox.core.outcome import Interrupted, Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError, shorten
from relaybox.sinks.deadline import Deadline
from relaybox.sinks.sink import AT_A_STRETCH, LeftRunning, OneByOne, describe
from relaybox.sinks.threads import Threads
from relaybox.wire.envelope import event_of
from relaybox.wire.tracing import attached, sampled, stored

Handler = Callable[[Event], Any]

log = logging.getLogger("relaybox.handler")

ANSWERS = (Retry, Reject, Unavailable, asyncio.CancelledError, GeneratorExit)

TIMES, LEAST = 10, 60.0
"""A synchronous handler is waited for this many times its timeout, and no less than so many seconds."""


def limit_of(timeout: float) -> float:
    """Return the seconds after which a synchronous handler is left to itself."""
    return max(TIMES * timeout, LEAST)


class HandlerSink(OneByOne):
    """Calls a function with each event, or what ``given`` makes of it; what it returns does not matter."""

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
        """The number of synchronous handlers that are over their time and still running."""
        return self._threads.longer_than(self._deadline.seconds)

    def begin(self, delivery: Delivery, traced: bool = False) -> Awaitable[None] | None:
        """Call the handler; what is left of the call, unless it is over.

        ``traced``: the emitter's context is the current one, or there is none.
        """
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
                # It never waited, and so it needs no deadline.
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
        block = self._limit()
        try:
            with block:
                result = await self._threads.call(self._handler, event)
        except asyncio.CancelledError:
            stopped = Interrupted(
                "the relay stopped before the handler returned", after=self._deadline.seconds
            )
            raise LeftRunning(stopped) from None
        except ANSWERS:
            raise
        except BaseException as error:
            if block.expired:
                raise self._still_running(self._limit.seconds) from None
            raise self._failed(error) from error
        if inspect.isawaitable(result):
            # A synchronous function in front of an asynchronous one: the work has not begun yet.
            await self._within_its_time(result)

    def _failed(self, error: BaseException) -> Retry:
        log.warning("%s: the handler failed with %s", self._name, describe(error), exc_info=error)
        return Retry(describe(error))

    async def close(self) -> None:
        """Let the threads end; one that is still in a handler ends after it."""
        self._threads.close()

    def _limit_of(self, timeout: float) -> float:
        return limit_of(timeout)

    def _still_running(self, seconds: float) -> Exception:
        """The answer to a call in a thread that has not returned by now."""
        return Reject(f"the handler is still running after {seconds:g} s; its thread cannot be stopped")


@types.coroutine
def _resumed(work: Coroutine[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, None]:
    """Go on with a coroutine that has begun and ``waits_for`` something."""
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
        # The handler's own: it would be taken for the end of whoever waits for it.
        raise Retry(describe(error)) from error


def is_async(destination: str, handler: Handler) -> bool:
    """Told apart once, and what can be neither is refused."""
    where = f"the handler of destination {destination!r}, {shorten(handler)},"
    if not callable(handler):
        raise ConfigError(f"{where} is no function; give one that takes an Event")
    kinds = (handler, getattr(handler, "__call__", None))  # noqa: B004
    if any(inspect.isgeneratorfunction(kind) or inspect.isasyncgenfunction(kind) for kind in kinds):
        raise ConfigError(f"{where} yields, so that a call would run none of it; return instead")
    return any(inspect.iscoroutinefunction(kind) for kind in kinds)
