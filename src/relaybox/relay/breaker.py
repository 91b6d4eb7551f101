"""A destination's circuit, written by the first relay that changes it; when to probe it, and with what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from relaybox.core.circuit import Circuit
from relaybox.core.event import Delivery
from relaybox.core.shadow import is_shadow
from relaybox.errors import StoreError
from relaybox.relay.crashpoint import reached
from relaybox.relay.decide import Opening
from relaybox.relay.shared import Shared
from relaybox.stores.store import Held


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
        await self._change("open the circuit", partial(self._open, opening, probed), state, opening.reason)

    async def close(self) -> None:
        """The probe got through."""
        await self._change("close the circuit", partial(self._store.close_circuit, self._name), "closed")

    async def may_probe(self, seconds: float) -> bool:
        """Whether this relay is the one that probes; it has so many seconds for it."""
        return await self._change("probe", partial(self._store.probe, self._name, seconds), "half_open")

    async def put_back(self, reason: str) -> None:
        """The probe was not made: another may be, at once."""
        try:
            await self._store.open_circuit(self._name, 0.0, reason, probed=True)
        except StoreError as error:
            self._observer.trouble(self._name, "open the circuit", error)

    async def _change(
        self, doing: str, change: Callable[[], Awaitable[bool]], state: str, reason: str = ""
    ) -> bool:
        """Write a change, and tell if this relay was the one to make it."""
        reached("change circuit")
        try:
            changed = await change()
        except StoreError as error:
            self._observer.trouble(self._name, doing, error)
            return False
        reached("circuit changed")
        if changed:
            self._observer.circuit(self._name, state, reason)
        return changed

    async def _open(self, opening: Opening, probed: bool) -> bool:
        if not opening.gone:
            seconds = self._circuit.pause(opening.asked)
            return await self._store.open_circuit(self._name, seconds, opening.reason, probed=probed)
        if probed:
            await self._store.close_circuit(self._name)
        return await self._store.pause(self._name, self._owner, opening.reason)


def probe_is_due(held: Held) -> bool:
    """Whether the time of a circuit is over."""
    return held.why != "paused" and held.seconds is not None and held.seconds <= 0


def choose(deliveries: Sequence[Delivery], circuit: Circuit) -> Delivery | None:
    """One to probe with: the first of its key, and the least suspicious; in shadow if all are."""

    def suspicion(delivery: Delivery) -> tuple[bool, bool, int, int]:
        event_id = delivery.event_id
        failed = event_id == circuit.failed_last
        return is_shadow(delivery.headers), failed, circuit.times(event_id), delivery.position

    heads = {
        delivery.id if delivery.ordering_key is None else delivery.ordering_key: delivery
        for delivery in reversed(deliveries)
    }
    return min(heads.values(), key=suspicion, default=None)
