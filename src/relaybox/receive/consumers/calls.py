"""Call functions of the application for a consumer, with a limit of time and of threads."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

from relaybox.receive.consumer import Later, Verdict, log
from relaybox.sinks.sink import Places
from relaybox.sinks.threads import Threads

AT_ONCE = min(32, (os.cpu_count() or 1) + 4)
"""How many synchronous handlers run at once: as many as asyncio has threads."""


class LimitedCalls:
    """Calls functions for at most ``timeout`` seconds each; a thread that takes longer is abandoned."""

    def __init__(self, consumer: str, timeout: float) -> None:
        self.timeout = timeout
        self.late = Later(f"the handler took longer than {timeout:g}s")
        self._consumer = consumer
        self._threads = Threads(consumer)
        self._places = Places(AT_ONCE)
        self._left: dict[UUID, threading.Event] = {}
        """The events of abandoned handlers, and a flag that is set when the handler returns."""
        self._full = False

    async def judge(self, event_id: UUID, handle: Callable[[], Verdict]) -> Verdict:
        """Run the synchronous handlers of an event in a thread."""
        left = self._left.get(event_id)
        if left is not None and not left.is_set():
            # Another call would use one more thread and connection only to wait for the first one's mark.
            return Later("its handler was called before, and has not returned yet")
        over = threading.Event()

        def run() -> Verdict:
            try:
                return handle()
            finally:
                over.set()

        async with self._places:
            if (hanging := self._hanging()) >= AT_ONCE:
                return Later(f"{hanging} handlers hang, and no other is called before one of them is over")
            try:
                return await self._in_time(run)  # type: ignore[no-any-return]
            except TimeoutError:
                self._left[event_id] = over
                return self.late

    async def ask(self, function: Callable[..., Any], *given: Any) -> None:
        """Call another function of the application, which may be async."""
        if inspect.iscoroutinefunction(function):
            result = function(*given)
        else:
            async with self._places:
                result = await self._in_time(function, *given)
        if inspect.isawaitable(result):
            async with asyncio.timeout(self.timeout):
                await result

    def close(self) -> None:
        """Stop the threads; one that is still in a function stops after it."""
        self._threads.close()

    def _hanging(self) -> int:
        """Return the number of abandoned handlers; each holds a thread, and maybe a transaction."""
        self._left = {one: over for one, over in self._left.items() if not over.is_set()}
        count = len(self._left)
        if count >= AT_ONCE and not self._full:
            then = "none is called before one of them is over"
            log.error("%s: %d handlers hang; %s", self._consumer, count, then)
        self._full = count >= AT_ONCE
        return count

    async def _in_time(self, function: Callable[..., Any], *given: Any) -> Any:
        """Run a synchronous function in a thread, and abandon the thread if it takes too long."""
        async with asyncio.timeout(self.timeout):
            return await self._threads.call(function, *given)
