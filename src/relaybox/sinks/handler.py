"""Python functions as a destination: asynchronous ones run in the relay's loop, synchronous ones in threads.

Whatever a handler does is an answer about its event: it may raise anything, end the process, cancel itself
or never return, and the relay goes on. A thread cannot be stopped, so one whose handler does not return is
left to itself and another takes its place.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from relaybox.config import Destination
from relaybox.envelope import event_of
from relaybox.errors import ConfigError, shorten
from relaybox.event import Delivery, Event
from relaybox.outcome import Reject, Retry, Unavailable
from relaybox.sink import AT_A_STRETCH, OneByOne, describe
from relaybox.sinks.deadline import Deadline
from relaybox.threads import Threads
from relaybox.tracing import attached, sampled, stored

Handler = Callable[[Event], Any]

log = logging.getLogger("relaybox.handler")

ANSWERS = (Retry, Reject, Unavailable, asyncio.CancelledError, GeneratorExit)


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
        self._in_loop = is_async(destination.name, handler)
        self._threads = Threads()

    @property
    def abandoned(self) -> int:
        """How many threads were left to a handler that had not returned."""
        return self._threads.abandoned

    def begin(self, delivery: Delivery, traced: bool = False) -> Awaitable[None] | None:
        """Call the handler; what is left of the call, unless it is over.

        ``traced``: the emitter's context is the current one, or there is none.
        """
        headers = delivery.headers
        if not traced and headers != "{}" and sampled(headers):
            return self._within_trace(stored(headers), delivery)
        event = self._given(delivery)
        if not self._in_loop:
            return self._within_its_time(self._work_in_thread(event))
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
                raise self._late(self._deadline.seconds) from None
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> Retry:
        log.warning("%s: the handler failed with %s", self._name, describe(error), exc_info=error)
        return Retry(describe(error))

    async def close(self) -> None:
        """Let the threads end; one that is still in a handler ends after it."""
        self._threads.close()

    def _late(self, seconds: float) -> Exception:
        """The answer to a call that had not returned in time."""
        return Retry(f"handler took longer than {seconds:g}s")

    async def _work_in_thread(self, event: Event) -> None:
        result = await self._threads.call(self._handler, event)
        if inspect.isawaitable(result):
            # A synchronous function in front of an asynchronous one: the work has not begun yet.
            await result


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
