"""Python functions as a destination: asynchronous ones run in the relay's loop, synchronous ones in threads.

Whatever a handler does is an answer about its event: it may raise anything, end the process, cancel itself
or never return, and the relay goes on. A thread cannot be stopped, so one whose handler does not return is
left to itself and another takes its place.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any, NamedTuple

from relaybox.config import Destination
from relaybox.envelope import event_of
from relaybox.errors import ConfigError, shorten
from relaybox.event import Delivery, Event
from relaybox.outcome import Reject, Retry, Unavailable
from relaybox.sink import OneByOne, describe
from relaybox.sinks.deadline import Deadline

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
        self.abandoned = 0
        """How many threads were left to a handler that had not returned."""
        self._name = destination.name
        self._handler = handler
        self._given = given
        self._deadline = Deadline(destination.timeout)
        self._in_loop = is_async(destination.name, handler)
        self._idle: list[_Worker] = []

    def begin(self, delivery: Delivery) -> Awaitable[None] | None:
        """Call the handler; what is left of the call, unless it is over."""
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
        while self._idle:
            self._idle.pop().stop()

    def _late(self, seconds: float) -> Exception:
        """The answer to a call that had not returned in time."""
        return Retry(f"handler took longer than {seconds:g}s")

    async def _work_in_thread(self, event: Event) -> None:
        worker = self._idle.pop() if self._idle else _Worker()
        try:
            result = await worker.call(self._handler, event)
        except asyncio.CancelledError:
            if worker.busy:
                self.abandoned += 1
                worker.stop()
            raise
        finally:
            if not worker.busy:
                self._idle.append(worker)
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


class _Call(NamedTuple):
    handler: Handler
    event: Event
    context: Context
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]


class _Worker:
    """A thread that runs one call after the other: a daemon, so that one that hangs holds up no exit."""

    def __init__(self) -> None:
        self.busy = False
        """Whether the thread is still in a call, as its loop sees it."""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=self._run, name="relaybox-handler", daemon=True).start()

    def call(self, handler: Handler, event: Event) -> Awaitable[Any]:
        """Run it; what it returns or raises."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self.busy = True
        self._calls.put(_Call(handler, event, copy_context(), loop, answer))
        return answer

    def stop(self) -> None:
        """End the thread after the call it is in."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            result, error = None, None
            try:
                result = call.context.run(call.handler, call.event)
            except BaseException as raised:
                error = raised
            # The loop may have ended before a handler that was left to itself.
            with suppress(RuntimeError):
                call.loop.call_soon_threadsafe(self._answer, call.answer, result, error)

    def _answer(self, answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self.busy = False
        if answer.done():
            return
        if error is None:
            answer.set_result(result)
        elif isinstance(error, StopIteration) or not isinstance(error, Exception):
            # Raised out of a future, these would mean something else to whoever waits for it.
            answer.set_exception(Retry(describe(error)))
        else:
            answer.set_exception(error)


def is_async(destination: str, handler: Handler) -> bool:
    """Told apart once, and what can be neither is refused."""
    where = f"the handler of destination {destination!r}, {shorten(handler)},"
    if not callable(handler):
        raise ConfigError(f"{where} is no function; give one that takes an Event")
    kinds = (handler, getattr(handler, "__call__", None))  # noqa: B004
    if any(inspect.isgeneratorfunction(kind) or inspect.isasyncgenfunction(kind) for kind in kinds):
        raise ConfigError(f"{where} yields, so that a call would run none of it; return instead")
    return any(inspect.iscoroutinefunction(kind) for kind in kinds)
