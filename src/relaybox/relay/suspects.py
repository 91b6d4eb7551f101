"""Look for suspects, and send them apart from all other deliveries."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from relaybox.core.ordering import together
from relaybox.core.settings import Destination
from relaybox.errors import StoreError
from relaybox.relay.gate import Gate
from relaybox.relay.rest import SHORTEST_POLL_WITH_WAKE
from relaybox.relay.room import Room, Share
from relaybox.relay.send import Sender
from relaybox.relay.shared import Shared
from relaybox.relay.source import Source


class Suspects:
    """The suspects of one destination: deliveries that were in flight when a relay died."""

    def __init__(
        self,
        destination: Destination,
        shared: Shared,
        source: Source,
        sender: Sender,
        gate: Gate,
        room: Room,
        share: Share,
    ) -> None:
        self._often = max(destination.poll_interval, destination.lease / 10)
        self._clock = shared.clock
        self._source = source
        self._sender = sender
        self._gate = gate
        self._room = room
        self._share = share
        self.looking = asyncio.Lock()
        """Held while the lane looks for suspects. A stop waits for it, and so cancels no running claim."""

    async def run(self) -> None:
        """Look when the lane starts, and then so often that none waits for long, forever."""
        while True:
            await self.look()
            await self._clock.sleep(self._often if self._share.size else SHORTEST_POLL_WITH_WAKE)

    async def look_once(self) -> None:
        """Look, but ignore an error: the drain's own claim meets and raises it."""
        with suppress(StoreError):
            await self.look()

    async def look(self) -> bool:
        """Send all suspects; return True if there was one, or if there may be more rows now."""
        # True after a concurrent look too: it may have moved rows after the caller's claim found none.
        other = self.looking.locked()
        async with self.looking:
            return await self._examine() or other

    async def _examine(self) -> bool:
        """Send the suspects that are first in line, one group after another, while other batches go on."""
        found, suspect = False, True
        while suspect:
            if self._gate.halted.is_set() or not self._share.size or self._source.settler.in_trouble:
                break
            group = min(together(0), self._source.claims.sizing.rows)
            has_room = self._room.is_there(group)
            claim, until = await self._source.claims.claim(group if has_room else 1)
            suspect = bool(claim.failed) or any(delivery.suspect for delivery in claim.deliveries)
            if not has_room and not suspect:
                await self._source.releases.release(claim.deliveries)
            elif claim.deliveries:
                batch = self._sender.start(claim.deliveries, until)
                if suspect and not self._gate.stopping:
                    await self._sender.until_done(batch)
            found |= suspect or bool(claim.parked)
        return found
