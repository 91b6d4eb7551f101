"""Stop the sends of a lane while its circuit opens."""

from __future__ import annotations

import asyncio

from relaybox.core.settings import Destination
from relaybox.relay.batch import InFlight
from relaybox.relay.breaker import Breaker
from relaybox.relay.decide import Opening
from relaybox.relay.gate import Gate
from relaybox.relay.release import Releases


class Outage:
    """From the answer that opens the circuit until the lane may claim again."""

    def __init__(
        self,
        destination: Destination,
        breaker: Breaker,
        gate: Gate,
        in_flight: InFlight,
        releases: Releases,
    ) -> None:
        self._timeout = destination.timeout
        self._breaker = breaker
        self._gate = gate
        self._in_flight = in_flight
        self._releases = releases
        self.opening: Opening | None = None
        self._closing_down: asyncio.Task[None] | None = None

    def begin(self, opening: Opening, *, probing: bool) -> None:
        """Let nothing begin any more, and open the circuit; a probe does that itself."""
        if self.opening is not None:
            return
        self.opening = opening
        self._gate.halted.set()
        if not probing:
            self._closing_down = self._in_flight.tasks.create_task(self._close_down(opening))

    async def _close_down(self, opening: Opening) -> None:
        """Open the circuit for all relays; go on after the running sends.

        Wait no longer than the timeout: a function may run for many times as long.
        """
        await self._breaker.open(opening)
        await self._releases.give_back_unbegun()
        if self._in_flight.sends:
            await asyncio.wait(self._in_flight.sends, timeout=self._timeout)
        self.end()

    async def over(self) -> None:
        """Wait until the circuit is open and the running sends have ended."""
        if self._closing_down is not None:
            await self._closing_down

    def end(self) -> None:
        """Let deliveries begin again."""
        self.opening = self._closing_down = None
        self._gate.resume()
