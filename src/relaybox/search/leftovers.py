"""What a build leaves behind that was not ended: its index, and its events."""

from __future__ import annotations

import asyncio
import time

from relaybox.core.settings import Destination
from relaybox.operate.actions import Named
from relaybox.search.desk import Desk
from relaybox.search.engine import Engine
from relaybox.search.indexes import LOOK
from relaybox.search.operation import ReindexFailed
from relaybox.search.watch import POLL, Tell

AT_ONCE = 500
"""Events that are discarded at a time."""

SENDING = 30.0
"""Seconds beyond the destination's timeout for which events that are being sent are waited for."""


class Leftovers:
    """Those of the builds of one index; ``index`` is the one that is built."""

    def __init__(self, desk: Desk, destination: Destination, engine: Engine, index: str, tell: Tell) -> None:
        self._desk = desk
        self._destination = destination
        self._engine = engine
        self._index = index
        self._tell = tell

    async def look(self) -> None:
        """Tell what would be taken away."""
        if self._index in await self._engine.present([self._index]):
            self._tell(f"would drop {self._index}")
        rows = await self._desk.undelivered.open_for(self._destination.name, self._index, AT_ONCE + 1)
        if rows:
            many = f"{len(rows):,}" if len(rows) <= AT_ONCE else f"more than {AT_ONCE:,}"
            self._tell(f"would discard {many} events for {self._index}")

    async def clear(self) -> None:
        """Take all of it away. Whoever has seen the index may write to it once more, and so create it."""
        left = self._index in await self._engine.present([self._index])
        if left:
            self._tell(f"dropping {self._index}, which was left behind")
        # One that nobody is to write to may be there all the same.
        await self._engine.drop(self._index)
        if await self.discard() or left:
            await self.sweep()

    async def sweep(self) -> None:
        """Wait until nobody writes to an index that is no more, and drop what was created by that."""
        dropped_at = time.monotonic()
        await asyncio.sleep(2 * LOOK)
        give_up = dropped_at + 2 * LOOK + self._destination.timeout
        while time.monotonic() < give_up:
            ago = time.monotonic() - dropped_at - LOOK
            if not await self._desk.undelivered.sent_before(self._destination.name, ago):
                break
            await asyncio.sleep(POLL)
        await self._engine.drop(self._index)

    async def discard(self) -> int:
        """Give up the events of a build; those that are being sent are waited for."""
        name, discarded = self._destination.name, 0
        give_up = time.monotonic() + SENDING + self._destination.timeout
        while rows := await self._desk.undelivered.open_for(name, self._index, AT_ONCE):
            done = await self._desk.admin.discard(Named([row.id for row in rows], exact=True))
            discarded += done.affected
            if not done.affected:
                if time.monotonic() > give_up:
                    raise ReindexFailed(f"events of an earlier build of {self._index!r} are still being sent")
                await asyncio.sleep(POLL)
        return discarded
