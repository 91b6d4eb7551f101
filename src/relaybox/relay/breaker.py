"""The destination's circuit as all relays see it: written when it changes, by whoever is first."""

from __future__ import annotations

from relaybox.core.circuit import Circuit
from relaybox.errors import StoreError
from relaybox.relay.crashpoint import reached
from relaybox.relay.decide import Opening
from relaybox.relay.shared import Shared


class Breaker:
    """Writes what becomes of one destination's circuit. A database that is away leaves it as it was."""

    def __init__(self, name: str, shared: Shared, circuit: Circuit) -> None:
        self._name = name
        self._owner = shared.owner
        self._store = shared.store
        self._observer = shared.observer
        self._circuit = circuit

    async def open(self, opening: Opening, *, probed: bool = False) -> None:
        """Open it, or pause the destination, and tell."""
        state = "paused" if opening.gone else "open"
        reached("change circuit")
        try:
            done = await self._open(opening, probed)
        except StoreError as error:
            self._observer.trouble(self._name, "open the circuit", error)
        else:
            reached("circuit changed")
            if done:
                self._observer.circuit(self._name, state, opening.reason)

    async def close(self) -> None:
        """The probe got through."""
        reached("change circuit")
        try:
            done = await self._store.close_circuit(self._name)
        except StoreError as error:
            self._observer.trouble(self._name, "close the circuit", error)
        else:
            reached("circuit changed")
            if done:
                self._observer.circuit(self._name, "closed", "")

    async def may_probe(self, seconds: float) -> bool:
        """Whether this relay is the one that probes; it has so many seconds for it."""
        reached("change circuit")
        try:
            mine = await self._store.probe(self._name, seconds)
        except StoreError as error:
            self._observer.trouble(self._name, "probe", error)
            return False
        reached("circuit changed")
        if mine:
            self._observer.circuit(self._name, "half_open", "")
        return mine

    async def put_back(self, reason: str) -> None:
        """The probe was not made: another may be, at once."""
        try:
            await self._store.open_circuit(self._name, 0.0, reason, probed=True)
        except StoreError as error:
            self._observer.trouble(self._name, "open the circuit", error)

    async def _open(self, opening: Opening, probed: bool) -> bool:
        if not opening.gone:
            seconds = self._circuit.pause(opening.asked)
            return await self._store.open_circuit(self._name, seconds, opening.reason, probed=probed)
        if probed:
            await self._store.close_circuit(self._name)
        return await self._store.pause(self._name, self._owner, opening.reason)
