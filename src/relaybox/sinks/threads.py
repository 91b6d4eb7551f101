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
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any, NamedTuple

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
        """The number of abandoned threads that are still in their function."""
        # Iterate over a copy: another relay of this process may run in another thread.
        self._left -= {worker for worker in list(self._left) if not worker.running}
        return len(self._left)

    def longer_than(self, seconds: float) -> int:
        """Return the number of functions that have run for longer, including those in abandoned threads."""
        limit = time.monotonic() - seconds
        return sum(worker.began < limit for worker in (*self._busy, *self._left) if worker.running)

    def check_room(self) -> None:
        """Raise ``Unreachable`` while too many threads are abandoned."""
        if self._left and self.left >= MOST_LEFT:
            raise Unreachable(
                f"{self.left} calls that were given up are still running, and threads cannot be stopped: "
                "no other begins before one of them ends, or the relay is started again"
            )

    async def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Run the function in a thread; if the caller is cancelled, abandon the thread."""
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
        """Stop the threads; one that is still in a call stops after it."""
        while self._idle:
            self._idle.pop().stop()


class _Call(NamedTuple):
    function: Callable[..., Any]
    given: tuple[Any, ...]
    context: Context
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]


class _Worker:
    def __init__(self, name: str) -> None:
        self._name = name
        self.left = False
        """True if the thread is abandoned."""
        self.busy = False
        """True while the thread is in a call, as its event loop sees it."""
        self.running = False
        """The same, as the thread sees it: its event loop may have ended earlier."""
        self.began = 0.0
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=self._run, name="relaybox-handler", daemon=True).start()

    def call(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Awaitable[Any]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self.busy = self.running = True
        self.began = time.monotonic()
        self._calls.put(_Call(function, given, copy_context(), loop, answer))
        return answer

    def stop(self) -> None:
        self._calls.put(None)

    def leave(self) -> None:
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
            # The event loop may have ended before an abandoned function returns.
            with suppress(RuntimeError):
                call.loop.call_soon_threadsafe(self._answer, call.answer, result, error)

    def _report(self, call: _Call, error: BaseException | None) -> None:
        """Log how an abandoned call ended: an operator may have to decide about its event."""
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
            # To the awaiting task these would mean something else: the end of iteration, or an exit.
            answer.set_exception(Retry(describe(error)))
        else:
            answer.set_exception(error)
