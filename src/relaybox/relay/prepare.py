"""The first part of a send: settle what must not be sent, and wait until the rest may be."""

from __future__ import annotations

from collections.abc import Sequence

from relaybox.core.event import Delivery
from relaybox.core.outcome import Released
from relaybox.core.rollout import MARK, is_shadow
from relaybox.core.settings import Destination
from relaybox.relay.batch import Batch
from relaybox.relay.decide import Policy
from relaybox.relay.gate import Gate
from relaybox.relay.settle import Settler
from relaybox.relay.shared import Shared, Turn
from relaybox.stores.store import used_up


class Preparation:
    """Prepares the batches of one lane."""

    def __init__(
        self, destination: Destination, shared: Shared, policy: Policy, gate: Gate, settler: Settler
    ) -> None:
        self._turn = Turn(destination, shared, gate.halted)
        self._quarantine = shared.quarantine
        self._policy = policy
        self._gate = gate
        self._settler = settler

    async def prepare(self, batch: Batch) -> Sequence[Delivery]:
        """Return the deliveries to send, when the rate limit and the other suspects allow it."""
        deliveries = self._without_known(batch, self._without_shadows(batch))
        if deliveries:
            await self._turn(len(deliveries))
            if batch.deliveries[0].suspect:
                await self._quarantine.enter(batch)
        return deliveries

    def _without_shadows(self, batch: Batch) -> Sequence[Delivery]:
        """Return the deliveries to send; settle those in shadow unsent, without effect on the circuit."""
        # Avoid a call for each delivery: nearly always none is in shadow.
        if not [1 for delivery in batch.deliveries if MARK in delivery.headers]:
            return batch.deliveries
        left = []
        for delivery in batch.deliveries:
            if not is_shadow(delivery.headers):
                left.append(delivery)
                continue
            began = self._gate.may_begin(batch, delivery)
            outcome = self._policy.shadowed(delivery) if began else Released()
            self._settler.add_unsent(batch, delivery, outcome)
        return left

    def _without_known(self, batch: Batch, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Return the deliveries to send; settle those with a known outcome."""
        if not self._settler.waits and not used_up(deliveries):
            return deliveries
        left = []
        for delivery in deliveries:
            outcome = self._settler.known(delivery)
            if outcome is None:
                left.append(delivery)
            else:
                self._settler.add_unsent(batch, delivery, outcome)
        return left
