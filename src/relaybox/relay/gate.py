"""Says which deliveries may begin to be sent."""

from __future__ import annotations

import asyncio

from relaybox.core.clock import Clock
from relaybox.core.event import Delivery
from relaybox.core.settings import Destination
from relaybox.relay.batch import Batch, InFlight

LEASE_LEFT_TO_BEGIN = 0.1
"""The part of the lease that must be left when a send begins."""


class Gate:
    """Lets deliveries begin, but none while the lane stops or its circuit opens."""

    def __init__(self, destination: Destination, clock: Clock, in_flight: InFlight) -> None:
        self._now = clock.now
        self._in_flight = in_flight
        self._least_lease = LEASE_LEFT_TO_BEGIN * destination.lease
        self.halted = asyncio.Event()
        self.stop_asked = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """True if the lane was asked to stop."""
        return self.stop_asked.is_set()

    def stop(self) -> None:
        """Let nothing begin any more."""
        self.stop_asked.set()
        self.halted.set()

    def resume(self) -> None:
        """Let deliveries begin again, unless the lane stops."""
        if not self.stopping:
            self.halted.clear()

    def may_begin(self, batch: Batch, delivery: Delivery) -> bool:
        """True if the delivery may be sent now."""
        position, lease = delivery.position, batch.lease
        # Mark it before anything else is read: a sink may ask in another thread, while this one gives back
        # what has not begun.
        batch.begun.add(position)
        returning = self._in_flight.returning
        if (
            not self.halted.is_set()
            and not (returning and (position, lease.token) in returning)
            and lease.behind.get(position, lease.until) - self._now() > self._least_lease
            and position in batch.unsettled
            and position not in batch.answered
        ):
            return True
        batch.begun.discard(position)
        return False
