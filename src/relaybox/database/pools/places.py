"""Shares a store's few connections, so that one lane's wait for a lock does not block the others."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import TracebackType

from relaybox.errors import Locked

UPKEEP = "(upkeep)"
"""The lane for a relay's work besides delivery. Its calls lock no destination's row for long."""

HELD_UP = 0.25
"""Seconds after which a call is probably waiting for a lock, and makes room for others."""


class ConnectionPlaces:
    """Limits concurrent calls to the number of connections.

    One place is reserved for waiting calls: a slow call moves there, and a lane that last met a lock starts
    there. A lane can use at most the other places, so it never blocks the rest.

    ``chained``: a waiting settle holds its destination's row, so the destination's other calls wait too.
    While it has a slow call, they may only use the reserved place.
    """

    def __init__(self, connections: int, *, chained: bool = False) -> None:
        quick = max(1, connections - 1)
        self._quick = asyncio.Semaphore(quick)
        self._of_lane: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(quick))
        self._aside = _Aside(there=connections > 1)
        self._chained = chained
        self._met_lock: set[str] = set()
        self._calls: dict[_Call, None] = {}
        """Calls in any place, oldest first."""
        self._watched_by: asyncio.AbstractEventLoop | None = None

    def take(self, lane: str) -> _Call:
        """Return a context that holds a place for one call; ``lane`` may be empty."""
        return _Call(self, lane)

    async def enter(self, call: _Call) -> None:
        """Wait for a place."""
        if call.lane:
            await self._of_lane[call.lane].acquire()
        try:
            await self._enter(call)
        except BaseException:
            if call.lane:
                self._of_lane[call.lane].release()
            raise
        self._calls[call] = None
        call.began = self._watch()

    async def _enter(self, call: _Call) -> None:
        while True:
            while self._is_held_up(call.lane):
                if self._aside.enter_at_once():
                    call.aside = True
                    return
                await self._aside.changed()
            await self._quick.acquire()
            if not self._is_held_up(call.lane):
                return
            self._quick.release()

    def _is_held_up(self, lane: str) -> bool:
        """True if a call of the lane would probably wait for a lock."""
        if not lane or not self._aside.there:
            return False
        if lane in self._met_lock:
            return True
        if not self._chained or lane == UPKEEP:
            return False
        return any(call.slow and call.lane == lane for call in self._calls)

    def leave(self, call: _Call, error: BaseException | None) -> None:
        """Free the place; an ``error`` shows whether the call met a lock."""
        del self._calls[call]
        if call.lane:
            self._of_lane[call.lane].release()
            if error is None:
                self._met_lock.discard(call.lane)
            elif isinstance(error, Locked):
                self._met_lock.add(call.lane)
        if call.aside:
            self._aside.leave()
        else:
            self._quick.release()
        self._aside.notify()

    def _watch(self) -> float:
        """Start the timer that all calls share (one per call costs more); return the current time."""
        loop = asyncio.get_running_loop()
        if self._aside.there and self._watched_by is not loop:
            self._watched_by = loop
            loop.call_later(HELD_UP / 2, self._look, loop)
        return loop.time()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watched_by = None
        slow = [call for call in self._calls if loop.time() - call.began >= HELD_UP]
        for call in slow:
            call.slow = True
        in_quick = [call for call in slow if not call.aside]
        if in_quick and self._aside.enter_at_once():
            in_quick[0].aside = True
            self._quick.release()
        if self._calls:
            self._watch()


class _Call:
    def __init__(self, places: ConnectionPlaces, lane: str) -> None:
        self._places = places
        self.lane = lane
        self.began = 0.0
        self.aside = False
        self.slow = False

    async def __aenter__(self) -> None:
        await self._places.enter(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._places.leave(self, error)


class _Aside:
    """The place for waiting calls."""

    def __init__(self, *, there: bool) -> None:
        self.there = there
        self._free = there
        self._changed = asyncio.Event()

    def enter_at_once(self) -> bool:
        """Enter if the place is free; return whether it was."""
        was_free, self._free = self._free, False
        return was_free

    async def changed(self) -> None:
        """Wait until the place is free, or a lane may have no slow call any more."""
        await self._changed.wait()

    def leave(self) -> None:
        self._free = True

    def notify(self) -> None:
        """Let the calls that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()
