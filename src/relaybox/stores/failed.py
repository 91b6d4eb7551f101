"""Which events fail for good, and how the death of their relays is told."""

from __future__ import annotations

from relaybox.event import TEST_TYPE, Delivery
from relaybox.outcome import Failed, Outcome
from relaybox.store import Settlement


def used_up(deliveries: tuple[Delivery, ...]) -> tuple[Delivery, ...]:
    """What was claimed once more only to be failed."""
    # Of others than suspects not each is looked at: there are many, and none is.
    if len(deliveries) == 1 or (deliveries and deliveries[0].suspect):
        return tuple(delivery for delivery in deliveries if delivery.exhausted)
    return ()


def bury(delivery: Delivery) -> Settlement:
    """Fail what used up its attempts."""
    error = f"the relay died {delivery.crashes} times while it held this event"
    return Settlement(delivery, Failed(error, counts=False))


def is_dead_letter(delivery: Delivery, outcome: Outcome) -> bool:
    """Whether somebody will miss it."""
    return isinstance(outcome, Failed) and delivery.event_type != TEST_TYPE
