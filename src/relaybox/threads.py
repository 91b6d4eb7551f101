"""Threads for functions of the application that are not asynchronous.

A thread cannot be stopped. One whose function does not return in time is left to itself, and another takes
its place. All of them are daemons, so that one that hangs holds up no exit.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any, NamedTuple

from relaybox.outcome import Retry
from relaybox.sink import describe


class Threads:
    """As many as there are calls at once; those that are idle are kept for the next."""

    def __init__(self) -> None:
        self.abandoned = 0
        """How many were left to a function that had not returned."""
        self._idle: list[_Worker] = []

    async def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """What it returns or raises there; whoever cancels this leaves the thread to itself."""
        worker = self._idle.pop() if self._idle else _Worker()
        try:
            return await worker.call(function, given)
        except asyncio.CancelledError:
            if worker.busy:
                self.abandoned += 1
                worker.stop()
            raise
        finally:
            if not worker.busy:
                self._idle.append(worker)

    def close(self) -> None:
        """Let them end; one that is still in a call ends after it."""
        while self._idle:
            self._idle.pop().stop()


class _Call(NamedTuple):
    function: Callable[..., Any]
    given: tuple[Any, ...]
    context: Context
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]


class _Worker:
    """A thread that runs one call after the other."""

    def __init__(self) -> None:
        self.busy = False
        """Whether the thread is still in a call, as its loop sees it."""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=self._run, name="relaybox-handler", daemon=True).start()

    def call(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Awaitable[Any]:
        """Run it; what it returns or raises."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self.busy = True
        self._calls.put(_Call(function, given, copy_context(), loop, answer))
        return answer

    def stop(self) -> None:
        """End the thread after the call it is in."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            result, error = None, None
            try:
                result = call.context.run(call.function, *call.given)
            except BaseException as raised:
                error = raised
            # The loop may have ended before a function that was left to itself.
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
