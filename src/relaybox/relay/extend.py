"""Beside the steps: leases of what is in flight are held, while more than half of them is left."""

from __future__ import annotations

from uuid import UUID

from relaybox.core.settings import Destination
from relaybox.errors import RowsLocked, StoreError
from relaybox.relay.batch import InFlight
from relaybox.relay.crashpoint import reached
from relaybox.relay.shared import Shared

LOOKS = 6
"""A lease. At least two thirds are left when a delivery begins: by default more than its timeout, in case it
blocks the thread and with it the next extension."""


class Extender:
    """Extends the leases of one lane that it saw before; it looks several times a lease."""

    def __init__(self, destination: Destination, shared: Shared, in_flight: InFlight) -> None:
        self._name = destination.name
        self._lease = destination.lease
        self._store = shared.store
        self._observer = shared.observer
        self._clock = shared.clock
        self._in_flight = in_flight

    async def run(self) -> None:
        """Extend leases, forever."""
        while True:
            await self._clock.sleep(self._lease / LOOKS)
            while not await self._extend():
                await self._clock.sleep(self._lease / 20)

    async def _extend(self) -> bool:
        """Extend what needs it; whether all of it was extended."""
        now, locked = self._clock.now(), frozenset[UUID]()
        soon = now + self._lease * (1 - 1 / LOOKS)
        batches = [batch for batch in self._in_flight if batch.ends_before(soon)]
        held = [delivery for batch in batches for delivery in batch.unsettled.values()]
        if not held:
            return True
        reached("extend")
        try:
            lost = await self._store.extend(held, self._lease)
        except RowsLocked as error:
            lost, locked = error.lost, error.rows
        except StoreError as error:
            self._observer.trouble(self._name, "extend leases", error)
            return False
        reached("extended")
        # What was answered meanwhile is no longer leased because it is settled, or its settle will tell.
        unanswered = [delivery for batch in batches for delivery in batch.unanswered()]
        behind = {delivery.position for delivery in unanswered if delivery.id in locked}
        for batch in batches:
            batch.extend(now + self._lease, behind & batch.unsettled.keys())
        dropped = [delivery for delivery in unanswered if delivery.id in lost]
        self._in_flight.drop(dropped)
        self._observer.extended(self._name, frozenset(delivery.id for delivery in dropped))
        return not behind
