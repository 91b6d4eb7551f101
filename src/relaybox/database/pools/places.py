"""Shares a store's few connections, so that one lane's wait for a lock does not block the others."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import TracebackType

from relaybox.errors import Locked

HELD_UP = 0.25
"""Seconds after which a call is probably waiting for a lock, and makes room for others."""


class Places:
    """Limits concurrent calls to the number of connections.

    One place is reserved for waiting calls: a slow call moves there, and a lane that last met a lock starts
    there. A lane can use at most the other places, so it never blocks the rest.
    """

    def __init__(self, connections: int) -> None:
        quick = max(1, connections - 1)
        self._quick = asyncio.Semaphore(quick)
        self._of_lane: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(quick))
        self._aside = _Aside(there=connections > 1)
        self._held_up: set[str] = set()
        self._calls: dict[_Call, None] = {}
        """Calls in a quick place, oldest first."""
        self._watched_by: asyncio.AbstractEventLoop | None = None

    def take(self, lane: str) -> _Call:
        """Return a context that holds a place for one call; ``lane`` may be empty."""
        return _Call(self, lane)

    async def enter(self, call: _Call) -> None:
        """Wait for a place."""
        if call.lane:
            await self._of_lane[call.lane].acquire()
        try:
            if call.lane in self._held_up:
                await self._aside.enter()
            else:
                await self._quick.acquire()
                self._calls[call] = None
                call.began = self._watch()
        except BaseException:
            if call.lane:
                self._of_lane[call.lane].release()
            raise

    def leave(self, call: _Call, error: BaseException | None) -> None:
        """Free the place; an ``error`` shows whether the call met a lock."""
        if call in self._calls:
            del self._calls[call]
            self._quick.release()
        else:
            self._aside.leave()
        if call.lane:
            self._of_lane[call.lane].release()
            if error is None:
                self._held_up.discard(call.lane)
            elif isinstance(error, Locked) and self._aside.there:
                self._held_up.add(call.lane)

    def _watch(self) -> float:
        """Start the timer that all calls share (one per call costs more); return the current time."""
        loop = asyncio.get_running_loop()
        if self._aside.there and self._watched_by is not loop:
            self._watched_by = loop
            loop.call_later(HELD_UP / 2, self._look, loop)
        return loop.time()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watched_by = None
        oldest = next(iter(self._calls), None)
        if oldest is None:
            return
        if loop.time() - oldest.began >= HELD_UP and self._aside.enter_at_once():
            del self._calls[oldest]
            self._quick.release()
        self._watch()


class _Call:
    def __init__(self, places: Places, lane: str) -> None:
        self._places = places
        self.lane = lane
        self.began = 0.0

    async def __aenter__(self) -> None:
        await self._places.enter(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._places.leave(self, error)


class _Aside:
    def __init__(self, *, there: bool) -> None:
        self.there = there
        self._free = asyncio.Event()
        if there:
            self._free.set()

    async def enter(self) -> None:
        while not self.enter_at_once():
            await self._free.wait()

    def enter_at_once(self) -> bool:
        """Enter if the place is free; return whether it was."""
        was_free = self._free.is_set()
        self._free.clear()
        return was_free

    def leave(self) -> None:
        self._free.set()
