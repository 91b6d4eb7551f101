"""Run synchronous functions of the application in daemon threads, which do not delay an exit.

A thread cannot be stopped: if its function runs too long it is abandoned, up to ``MOST_LEFT`` of them. They
are counted by destination for the whole process, because a drain that ends leaves its threads behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any

from relaybox.core.outcome import Retry, Unreachable
from relaybox.sinks.sink import describe

log = logging.getLogger("relaybox.handler")

MOST_LEFT = 10
"""Start no more calls while this many threads are abandoned."""

_left: defaultdict[str, set[_Worker]] = defaultdict(set)


def _forget_left() -> None:
    for workers in _left.values():
        workers.clear()


# A child process has no thread but the one that forked.
os.register_at_fork(after_in_child=_forget_left)


class Threads:
    """A pool with one thread for each call in progress; idle threads are kept."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._left = _left[name]

    @property
    def left(self) -> int:
        """Return the number of abandoned threads that are still in their function."""
        # Iterate over a copy: another relay of this process may run in another thread.
        self._left -= {worker for worker in list(self._left) if worker.call.ended}
        return len(self._left)

    def longer_than(self, seconds: float) -> int:
        """Return the number of functions that have run for longer, including those in abandoned threads."""
        limit = time.monotonic() - seconds
        calls = [worker.call for worker in (*self._busy, *self._left)]
        return sum(call.began < limit for call in calls if not call.ended)

    def check_room(self) -> None:
        """Raise ``Unreachable`` while too many threads are abandoned."""
        if self._left and self.left >= MOST_LEFT:
            raise Unreachable(
                f"{self.left} calls that were given up are still running, and threads cannot be stopped: "
                "no other begins before one of them ends, or the relay is started again"
            )

    async def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Run the function in a thread; if the caller is cancelled, abandon the thread."""
        call = self.start(function, *given)
        await self.wait(call)
        return call.result()

    def start(self, function: Callable[..., Any], *given: Any) -> Call:
        """Start the function in a thread. ``wait`` must follow."""
        worker = self._idle.pop() if self._idle else _Worker(self._name)
        self._busy.add(worker)
        return worker.start(function, given)

    async def wait(self, call: Call) -> None:
        """Return when the call has ended; if the caller is cancelled before that, abandon the thread."""
        worker = call.worker
        try:
            await call.notified
        except asyncio.CancelledError:
            if not call.ended:
                self._left.add(worker)
                worker.leave()
            raise
        finally:
            self._busy.discard(worker)
            if call.ended and not worker.left:
                self._idle.append(worker)

    def close(self) -> None:
        """Stop the threads; one that is still in a call stops after it."""
        while self._idle:
            self._idle.pop().stop()


class Call:
    """A call of a function in a thread. The thread stores the result, then notifies the event loop."""

    def __init__(self, worker: _Worker, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
        self.worker = worker
        self.given = given
        self.began = time.monotonic()
        self.ended = False
        self.notified: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._function = function
        self._context = copy_context()
        self._value: Any = None
        self._error: BaseException | None = None

    def result(self) -> Any:
        """Return what the function returned, or raise what it raised. Call this once, after the end."""
        error, self._error = self._error, None
        if error is None:
            return self._value
        try:
            if isinstance(error, StopIteration) or not isinstance(error, Exception):
                # The awaiting task would take these for the end of an iteration, or for an exit.
                raise Retry(describe(error))
            raise error
        finally:
            # Avoid a reference cycle from the traceback to the exception, which only a collection would free.
            del error

    def run(self) -> None:
        """Call the function, in the thread."""
        error = None
        try:
            self._value = self._context.run(self._function, *self.given)
        except BaseException as raised:
            error = self._error = raised
        # First: the description of a strange error may fail.
        self.ended = True
        if self.worker.left:
            self._report(error)
        del error
        # The event loop may have ended before an abandoned function returns.
        with suppress(RuntimeError):
            self.notified.get_loop().call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if not self.notified.done():
            self.notified.set_result(None)

    def _report(self, error: BaseException | None) -> None:
        """Log how an abandoned call ended: an operator may have to decide about its event."""
        how = "it returned" if error is None else describe(error)
        event = getattr(self.given[0], "id", None) if self.given else None
        about = "" if event is None else f" for event {event}"
        after = f"ended after {time.monotonic() - self.began:.0f} s"
        log.warning("%s: the call%s that was given up %s: %s", self.worker.name, about, after, how)


class _Worker:
    call: Call
    """The last call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.left = False
        """True if the thread is abandoned."""
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        threading.Thread(target=self._run, name="relaybox-handler", daemon=True).start()

    def start(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Call:
        self.call = Call(self, function, given)
        self._calls.put(self.call)
        return self.call

    def stop(self) -> None:
        self._calls.put(None)

    def leave(self) -> None:
        self.left = True
        self.stop()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call
