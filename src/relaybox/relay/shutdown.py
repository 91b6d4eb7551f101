"""Stop a lane: finish what is being sent, and give the rest back."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from relaybox.relay.breaker import Outage
from relaybox.relay.gate import Gate
from relaybox.relay.source import Source

PATIENCE_TO_SETTLE = 10.0
"""Seconds that a stopping relay waits until the database has taken its last outcomes."""


class Shutdown:
    """Stops one lane."""

    def __init__(self, gate: Gate, source: Source, outage: Outage, looking: asyncio.Lock) -> None:
        self._gate = gate
        self._in_flight = source.in_flight
        self._releases = source.releases
        self._outage = outage
        self._looking = looking

    async def run(self, patience: float) -> None:
        """Wait for the stop, and give back what has not begun, even while a round waits for running sends."""
        await self._gate.stop_asked.wait()
        await self._releases.give_back_unbegun()
        await self._give_up(patience)

    async def finish(self, patience: float) -> None:
        """Give back what the last round and look began; settle what was answered."""
        async with self._looking:
            # The lock waits for a look to end: a claim that is cancelled would leave rows leased by no one.
            await self._give_up(patience)
        # Do not wait for a database that is away.
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_TO_SETTLE):
                while any(batch.answered & batch.unsettled.keys() for batch in self._in_flight):
                    await self._in_flight.until_changed()

    def abandon(self) -> None:
        """Forget what is in flight, after an error: its leases expire."""
        self._in_flight.forget()
        self._outage.end()

    async def _give_up(self, patience: float) -> None:
        """Wait for running sends, and give the rest back."""
        if self._in_flight.sends:
            # A send in which nothing has begun waits for a free place, possibly for long.
            under_way = any(batch.unanswered() for batch in self._in_flight)
            _, late = await asyncio.wait(self._in_flight.sends, timeout=patience if under_way else 0.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        left = [delivery for batch in self._in_flight for delivery in batch.unanswered()]
        await self._releases.release(left)
        self._in_flight.drop(left)
