"""How statements share a store's few connections, so that a wait for a lock holds up no other lane."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from relaybox.errors import Locked

HELD_UP = 0.25
"""Seconds after which a call most likely waits for a lock, and makes room for others."""


class Places:
    """Bounds the calls that are under way to the number of connections.

    One place is kept aside for calls that wait: a call moves there when it takes long, and a lane whose last
    call met a lock begins there. No lane has more calls under way than there are other places. So however
    long a lane waits for a lock, the others go on.
    """

    def __init__(self, connections: int) -> None:
        quick = max(1, connections - 1)
        self._quick = asyncio.Semaphore(quick)
        self._of_lane: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(quick))
        self._aside = _Aside(there=connections > 1)
        self._held_up: set[str] = set()

    @asynccontextmanager
    async def take(self, lane: str) -> AsyncIterator[None]:
        """Hold a place for one call, which may be of no ``lane``."""
        async with self._of_lane[lane] if lane else nullcontext(), self._place(lane in self._held_up):
            try:
                yield
            except Locked:
                if lane and self._aside.there:
                    self._held_up.add(lane)
                raise
            self._held_up.discard(lane)

    @asynccontextmanager
    async def _place(self, aside: bool) -> AsyncIterator[None]:
        await (self._aside.enter() if aside else self._quick.acquire())
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def make_room() -> None:
            nonlocal aside, timer
            if self._aside.enter_at_once():
                self._quick.release()
                aside = True
            else:
                timer = loop.call_later(HELD_UP, make_room)

        if self._aside.there and not aside:
            timer = loop.call_later(HELD_UP, make_room)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            if aside:
                self._aside.leave()
            else:
                self._quick.release()


class _Aside:
    """The place aside: of one call at a time."""

    def __init__(self, *, there: bool) -> None:
        self.there = there
        self._free = asyncio.Event()
        if there:
            self._free.set()

    async def enter(self) -> None:
        while not self.enter_at_once():
            await self._free.wait()

    def enter_at_once(self) -> bool:
        """Enter if it is free; whether it was."""
        was_free = self._free.is_set()
        self._free.clear()
        return was_free

    def leave(self) -> None:
        self._free.set()
