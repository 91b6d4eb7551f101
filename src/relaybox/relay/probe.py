"""Send one delivery through a circuit after its pause; the answer closes or opens the circuit."""

from __future__ import annotations

from collections.abc import Sequence

from relaybox.core.circuit import THRESHOLD, Circuit
from relaybox.core.event import Delivery
from relaybox.core.rollout import is_shadow
from relaybox.relay.breaker import Breaker, Outage
from relaybox.relay.send import Sender
from relaybox.relay.source import Source
from relaybox.stores.store import Claim, Held


class Probe:
    """Probes one destination."""

    def __init__(
        self, circuit: Circuit, breaker: Breaker, outage: Outage, source: Source, sender: Sender
    ) -> None:
        self._circuit = circuit
        self._breaker = breaker
        self._outage = outage
        self._source = source
        self._sender = sender

    async def run(self, held: Held) -> Claim:
        """Probe once. Return the claim of what was sent.

        Choose the delivery that failed least, and the one that failed last only if there is no other. The
        circuit may have been opened by several events, and these may be poison.
        """
        claim, until = await self._source.claims.claim(THRESHOLD + 1, probe=True, suspects=False)
        if not claim.deliveries and not claim.parked:
            claim, until = await self._source.claims.claim(1, probe=True)
        return await self._probe_with(claim, until, held)

    async def _probe_with(self, claim: Claim, until: float, held: Held) -> Claim:
        release = self._source.releases.release
        chosen = choose(claim.deliveries, self._circuit)
        if chosen is None:
            return claim
        if is_shadow(chosen.headers):
            return await self._deliver_shadows(claim.deliveries, until)
        mine = await self._breaker.may_probe(self._sender.longest)
        if not mine:
            await release(claim.deliveries)
            return Claim()
        await release([delivery for delivery in claim.deliveries if delivery is not chosen])
        await self._send(chosen, until, held.reason or "")
        return Claim((chosen,))

    async def _deliver_shadows(self, deliveries: Sequence[Delivery], until: float) -> Claim:
        """Deliver those in shadow. They are not sent, so they cannot show whether the destination is back."""
        shadows = [delivery for delivery in deliveries if is_shadow(delivery.headers)]
        await self._source.releases.release([one for one in deliveries if one not in shadows])
        await self._sender.until_done(self._sender.start(shadows, until))
        return Claim(tuple(shadows))

    async def _send(self, delivery: Delivery, until: float, reason: str) -> None:
        batch = self._sender.start([delivery], until, probing=True)
        await self._sender.until_done(batch)
        # An answer that comes later has no effect on the probe.
        batch.probing = False
        if not batch.tried:
            await self._breaker.put_back(reason)
        elif self._outage.opening is None:
            await self._breaker.close()
        else:
            await self._breaker.open(self._outage.opening, probed=True)
        self._outage.end()


def is_due(held: Held) -> bool:
    """True if the pause of an open circuit is over."""
    return held.why != "paused" and held.seconds is not None and held.seconds <= 0


def choose(deliveries: Sequence[Delivery], circuit: Circuit) -> Delivery | None:
    """Return the delivery to probe with: the first of its key, and of these the one least likely to fail.

    Return one in shadow only if all are in shadow.
    """

    def suspicion(delivery: Delivery) -> tuple[bool, bool, int, int]:
        event_id = delivery.event_id
        failed = event_id == circuit.failed_last
        return is_shadow(delivery.headers), failed, circuit.times(event_id), delivery.position

    heads = {
        delivery.id if delivery.ordering_key is None else delivery.ordering_key: delivery
        for delivery in reversed(deliveries)
    }
    return min(heads.values(), key=suspicion, default=None)
