"""Open, probe and close a destination's circuit, and stop the lane's sends while it opens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from relaybox.core.circuit import Circuit
from relaybox.core.settings import Destination
from relaybox.errors import StoreError
from relaybox.relay.crashpoint import reached
from relaybox.relay.decide import Opening
from relaybox.relay.gate import Gate
from relaybox.relay.shared import Shared
from relaybox.relay.source import Source


class Breaker:
    """Writes the changes of one destination's circuit. The first relay that changes it writes the change.

    If the database is away, nothing changes.
    """

    def __init__(self, name: str, shared: Shared, circuit: Circuit) -> None:
        self._name = name
        self._shared = shared
        self._store = shared.store
        self._circuit = circuit

    async def open(self, opening: Opening, *, probed: bool = False) -> None:
        """Open the circuit, or pause the destination, and report the change."""
        state = "paused" if opening.gone else "open"
        await self._change("open the circuit", partial(self._open, opening, probed), state, opening.reason)

    async def close(self) -> None:
        """Close the circuit after a probe that succeeded."""
        await self._change("close the circuit", partial(self._store.close_circuit, self._name), "closed")

    async def may_probe(self, seconds: float) -> bool:
        """True if this relay may probe; it has ``seconds`` to do so."""
        return await self._change("probe", partial(self._store.probe, self._name, seconds), "half_open")

    async def put_back(self, reason: str) -> None:
        """Open the circuit again without a pause: the probe was not sent, so another may be sent at once."""
        try:
            await self._store.open_circuit(self._name, 0.0, reason, probed=True)
        except StoreError as error:
            self._shared.observer.trouble(self._name, "open the circuit", error)

    async def _change(
        self, doing: str, change: Callable[[], Awaitable[bool]], state: str, reason: str = ""
    ) -> bool:
        """Write a change; return True and report it if this relay made it."""
        reached("change circuit")
        try:
            changed = await change()
        except StoreError as error:
            self._shared.observer.trouble(self._name, doing, error)
            return False
        reached("circuit changed")
        if changed:
            self._shared.observer.circuit(self._name, state, reason)
        return changed

    async def _open(self, opening: Opening, probed: bool) -> bool:
        if not opening.gone:
            seconds = self._circuit.pause(opening.asked)
            return await self._store.open_circuit(self._name, seconds, opening.reason, probed=probed)
        if probed:
            await self._store.close_circuit(self._name)
        return await self._store.pause(self._name, self._shared.owner, opening.reason)


class Outage:
    """Closes a lane down while its circuit opens."""

    def __init__(self, destination: Destination, breaker: Breaker, gate: Gate, source: Source) -> None:
        self._timeout = destination.timeout
        self._breaker = breaker
        self._gate = gate
        self._source = source
        self.opening: Opening | None = None
        self._closing_down: asyncio.Task[None] | None = None

    def begin(self, opening: Opening, *, probing: bool) -> None:
        """Let nothing begin any more, and open the circuit; a probe does that itself."""
        if self.opening is not None:
            return
        self.opening = opening
        self._gate.halted.set()
        if not probing:
            self._closing_down = self._source.in_flight.tasks.create_task(self._close_down(opening))

    async def _close_down(self, opening: Opening) -> None:
        """Open the circuit for all relays; go on after the running sends.

        Wait no longer than the timeout: a function may run for many times as long.
        """
        await self._breaker.open(opening)
        await self._source.releases.give_back_unbegun()
        if sends := self._source.in_flight.sends:
            await asyncio.wait(sends, timeout=self._timeout)
        self.end()

    async def until_over(self) -> None:
        """Wait until the circuit is open and the running sends have ended."""
        if self._closing_down is not None:
            await self._closing_down

    def end(self) -> None:
        """Let deliveries begin again."""
        self.opening = self._closing_down = None
        self._gate.resume()
