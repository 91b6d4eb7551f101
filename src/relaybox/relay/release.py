"""Give back deliveries that were not sent, so that any relay can take them."""

from __future__ import annotations

from collections.abc import Sequence

from relaybox.core.event import Delivery
from relaybox.core.outcome import Released
from relaybox.core.settings import Destination
from relaybox.errors import RowsLocked, StoreError
from relaybox.relay.batch import InFlight
from relaybox.relay.crashpoint import reached
from relaybox.relay.settle import Settler
from relaybox.relay.shared import Shared


class Releases:
    """Releases the deliveries of one lane."""

    def __init__(
        self, destination: Destination, shared: Shared, in_flight: InFlight, settler: Settler
    ) -> None:
        self._name = destination.name
        self._on_failed = destination.on_failed or "skip"
        self._shared = shared
        self._in_flight = in_flight
        self._settler = settler

    async def release(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Give back untried deliveries. Return those given back; the leases of the others expire."""
        if not deliveries:
            return ()
        reached("release")
        try:
            await self._shared.store.release(deliveries, on_failed=self._on_failed)
        except RowsLocked as error:
            self._shared.observer.trouble(self._name, "release", error)
            return [delivery for delivery in deliveries if delivery.id not in error.rows]
        except StoreError as error:
            self._shared.observer.trouble(self._name, "release", error)
            return ()
        reached("released")
        return deliveries

    async def give_back(self, deliveries: Sequence[Delivery]) -> bool:
        """Give back those that have not begun, while other sends go on; return True if any were."""
        in_flight = self._in_flight
        marked = frozenset((d.position, d.lease_token) for d in deliveries) - in_flight.returning
        in_flight.returning |= marked
        try:
            # Look again: one may have begun in another thread before it was marked.
            left = [d for d in in_flight.unbegun() if (d.position, d.lease_token) in marked]
            released = await self.release(left)
            in_flight.drop(released)
            self._settle_unreleased(left)
            return bool(released)
        finally:
            in_flight.returning -= marked

    def _settle_unreleased(self, deliveries: Sequence[Delivery]) -> None:
        """Settle what could not be given back. It must not begin: the release may have been committed."""
        left = {(delivery.position, delivery.lease_token) for delivery in deliveries}
        for batch in self._in_flight:
            # Not ``unbegun``: a sink that asks from another thread shortly counts as begun.
            for delivery in batch.unanswered():
                if (delivery.position, batch.lease.token) in left:
                    self._settler.add_unsent(batch, delivery, Released())

    async def give_back_unbegun(self) -> None:
        """Give back all that has not begun, when nothing may begin any more."""
        left = self._in_flight.unbegun()
        self._in_flight.drop(left)
        await self.release(left)
