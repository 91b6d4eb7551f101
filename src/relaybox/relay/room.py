"""Wait until a lane may claim more: its rows and bytes in flight are limited."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from relaybox.core.clock import Clock
from relaybox.core.settings import Destination
from relaybox.relay.batch import InFlight
from relaybox.relay.breaker import Outage
from relaybox.relay.gate import Gate
from relaybox.relay.release import Releases
from relaybox.relay.sizing import Sizing

PATIENCE_FOR_ROOM = 0.25
"""Seconds that rows may wait behind a running send of their key while no claim has room."""


class Room:
    """The room of one lane for further deliveries."""

    def __init__(
        self,
        destination: Destination,
        clock: Clock,
        sizing: Sizing,
        in_flight: InFlight,
        gate: Gate,
        releases: Releases,
        outage: Outage,
    ) -> None:
        self._concurrency = destination.concurrency
        self._clock = clock
        self._sizing = sizing
        self._in_flight = in_flight
        self._gate = gate
        self._releases = releases
        self._outage = outage

    async def until_free(self) -> None:
        """Wait until the next claim has room and no circuit is opening, or until the lane stops."""
        while not self._gate.stopping and not self.is_there(self._sizing.rows):
            if not await self._make_room():
                with suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE_FOR_ROOM):
                        await self._in_flight.until_changed()
        await self._outage.until_over()

    def is_there(self, rows: int) -> bool:
        """True if a claim of so many rows has room."""
        held, size = len(self._in_flight), self._in_flight.bytes
        if self._sizing.has_room(rows, held, size):
            return True
        if not self._sizing.narrow:
            return False
        # Do not count running sends: if claims are small, the sends alone would fill the room.
        sending = min(self._in_flight.sending(), self._concurrency)
        return self._sizing.has_room(rows, held - sending, size)

    async def _make_room(self) -> bool:
        """Give back what waits behind a slow event of its key; return False if nothing was given back."""
        behind = self._in_flight.behind(self._clock.now() - PATIENCE_FOR_ROOM)
        if not behind:
            return False
        self._sizing.shorten_run()
        return await self._releases.give_back(behind)
