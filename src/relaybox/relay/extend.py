"""Extend the leases of deliveries in flight, in a task beside the lane's steps."""

from __future__ import annotations

from uuid import UUID

from relaybox.core.settings import Destination
from relaybox.errors import RowsLocked, StoreError
from relaybox.relay.batch import InFlight
from relaybox.relay.crashpoint import reached
from relaybox.relay.shared import Shared

LOOKS = 6
"""Times per lease that the extender looks. So at least two thirds of a lease are left when a send begins: by
default more than the timeout, in case the send blocks the thread and with it the next extension."""


class Extender:
    """Extends the leases of one lane; it looks several times per lease."""

    def __init__(self, destination: Destination, shared: Shared, in_flight: InFlight) -> None:
        self._name = destination.name
        self._lease = destination.lease
        self._shared = shared
        self._in_flight = in_flight

    async def run(self) -> None:
        """Extend leases, forever."""
        while True:
            await self._shared.clock.sleep(self._lease / LOOKS)
            while not await self._extend():
                await self._shared.clock.sleep(self._lease / 20)

    async def _extend(self) -> bool:
        """Extend leases that end soon; True if none has to be tried again."""
        now, locked = self._shared.clock.now(), frozenset[UUID]()
        soon = now + self._lease * (1 - 1 / LOOKS)
        batches = [batch for batch in self._in_flight if batch.lease.ends_before(soon)]
        held = [delivery for batch in batches for delivery in batch.unsettled.values()]
        if not held:
            return True
        reached("extend")
        try:
            lost = await self._shared.store.extend(held, self._lease)
        except RowsLocked as error:
            lost, locked = error.lost, error.rows
        except StoreError as error:
            self._shared.observer.trouble(self._name, "extend leases", error)
            return False
        reached("extended")
        # Deliveries that were answered meanwhile are either settled, or their settle reports a lost lease.
        unanswered = [delivery for batch in batches for delivery in batch.unanswered()]
        behind = {delivery.position for delivery in unanswered if delivery.id in locked}
        for batch in batches:
            batch.lease.extend(now + self._lease, behind & batch.unsettled.keys())
        dropped = [delivery for delivery in unanswered if delivery.id in lost]
        self._in_flight.drop(dropped)
        self._shared.observer.extended(self._name, frozenset(delivery.id for delivery in dropped))
        return not behind
