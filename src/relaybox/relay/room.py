"""Limit what a lane has in flight: its rows and bytes, and its share of its destination's ``concurrency``."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from relaybox.core.clock import Clock
from relaybox.core.settings import Destination
from relaybox.relay.breaker import Outage
from relaybox.relay.gate import Gate
from relaybox.relay.shared import Shared
from relaybox.relay.source import Source
from relaybox.sinks.sink import Sink

PATIENCE_FOR_ROOM = 0.25
"""Seconds that rows may wait behind a running send of their key while no claim has room."""


class Room:
    """The room of one lane for further deliveries."""

    def __init__(
        self, destination: Destination, clock: Clock, source: Source, gate: Gate, outage: Outage
    ) -> None:
        self._concurrency = destination.concurrency
        self._clock = clock
        self._sizing = source.claims.sizing
        self._in_flight = source.in_flight
        self._releases = source.releases
        self._gate = gate
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


class Share:
    """The share of one lane. It follows other relays as they come and go."""

    def __init__(self, destination: Destination, shared: Shared, sink: Sink, source: Source) -> None:
        self._destination = destination
        self._shared = shared
        self._sink = sink
        self._source = source

    @property
    def size(self) -> int:
        """Return how many sends this relay may run at once."""
        return self._shared.share(self._destination.name, self._destination.concurrency)

    def apply(self) -> int:
        """Limit the sink to the size, and return it."""
        if size := self.size:
            self._sink.limit(size)
        return size

    async def run(self) -> None:
        """Follow the share even while nothing is claimed, forever."""
        while True:
            self._shared.observer.overdue(self._destination.name, getattr(self._sink, "overdue", 0))
            size = self.size
            self._sink.limit(size)
            if not size:
                await self._stand_back()
            await self._shared.clock.sleep(1.0)

    async def _stand_back(self) -> None:
        """Give back what has not begun: without a share it would wait here forever."""
        await self._source.releases.give_back(self._source.in_flight.unbegun())
