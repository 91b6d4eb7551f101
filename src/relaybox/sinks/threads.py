"""Threads for functions of the application that are not asynchronous.

A thread cannot be stopped. One whose function does not return in time is left to itself, and another takes
its place, as long as there are not too many of those. They are counted for the whole process, by destination:
a drain that ends leaves its threads behind. All are daemons, so that none holds up an exit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any, NamedTuple

from relaybox.core.outcome import Retry, Unreachable
from relaybox.sinks.sink import describe

log = logging.getLogger("relaybox.handler")

MOST_LEFT = 10
"""Threads that may be left to themselves before no other call is begun."""

_left: defaultdict[str, set[_Worker]] = defaultdict(set)
"""By destination, the threads of this process that were left to themselves."""


def _forget_left() -> None:
    for workers in _left.values():
        workers.clear()


# No thread but the one that forks lives on in a child process.
os.register_at_fork(after_in_child=_forget_left)


class Threads:
    """As many as there are calls at once; those that are idle are kept for the next."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._left = _left[name]

    @property
    def left(self) -> int:
        """The number of threads that were left to themselves and are still in their function."""
        # A copy is looked at: another relay of this process may run in a thread of its own.
        self._left -= {worker for worker in list(self._left) if not worker.running}
        return len(self._left)

    def longer_than(self, seconds: float) -> int:
        """Return the number of functions that have run for longer, of those left to themselves too."""
        limit = time.monotonic() - seconds
        return sum(worker.began < limit for worker in (*self._busy, *self._left) if worker.running)

    def check_room(self) -> None:
        """Raise ``Unreachable`` while too many threads are left to themselves."""
        if self._left and self.left >= MOST_LEFT:
            raise Unreachable(
                f"{self.left} calls that were given up are still running, and threads cannot be stopped: "
                "no other begins before one of them ends, or the relay is started again"
            )

    async def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Return or raise what the function does; a caller that is cancelled leaves the thread to itself."""
        worker = self._idle.pop() if self._idle else _Worker(self._name)
        self._busy.add(worker)
        try:
            return await worker.call(function, given)
        except asyncio.CancelledError:
            if worker.busy:
                self._left.add(worker)
                worker.leave()
            raise
        finally:
            self._busy.discard(worker)
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

    def __init__(self, name: str) -> None:
        self._name = name
        self.left = False
        """Whether nobody waits for its call any more."""
        self.busy = False
        """Whether the thread is still in a call, as its loop sees it."""
        self.running = False
        """The same, as the thread sees it: its loop may have ended before."""
        self.began = 0.0
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=self._run, name="relaybox-handler", daemon=True).start()

    def call(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Awaitable[Any]:
        """Run it; what it returns or raises."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self.busy = self.running = True
        self.began = time.monotonic()
        self._calls.put(_Call(function, given, copy_context(), loop, answer))
        return answer

    def stop(self) -> None:
        """End the thread after the call it is in."""
        self._calls.put(None)

    def leave(self) -> None:
        """Leave it to its call, and say when that ends."""
        self.left = True
        self.stop()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            result, error = None, None
            try:
                result = call.context.run(call.function, *call.given)
            except BaseException as raised:
                error = raised
            self.running = False
            if self.left:
                self._report(call, error)
            # The loop may have ended before a function that was left to itself.
            with suppress(RuntimeError):
                call.loop.call_soon_threadsafe(self._answer, call.answer, result, error)

    def _report(self, call: _Call, error: BaseException | None) -> None:
        """Say how a call ended that was given up: its event may be waiting for an operator to decide."""
        event = getattr(call.given[0], "id", None) if call.given else None
        about = "" if event is None else f" for event {event}"
        ended = "it returned" if error is None else describe(error)
        after = f"ended after {time.monotonic() - self.began:.0f} s"
        log.warning("%s: the call%s that was given up %s: %s", self._name, about, after, ended)

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
