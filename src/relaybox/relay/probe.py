"""With which delivery to find out whether a destination is back, and when."""

from __future__ import annotations

from collections.abc import Sequence

from relaybox.core.circuit import Circuit
from relaybox.core.event import Delivery
from relaybox.core.shadow import is_shadow
from relaybox.stores.store import Held


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
