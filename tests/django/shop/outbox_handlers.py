"""What becomes of the shop's events."""

from __future__ import annotations

from relaybox import Event
from relaybox.contrib.django import outbox_handler

received: list[Event] = []
"""What ``remember`` got in this process; the fixture ``received`` empties it."""


@outbox_handler("order.placed", name="memory")
def remember(event: Event) -> None:
    """Keep the event, for a test in this process."""
    received.append(event)


@outbox_handler("order.paid", name="receipts")
def receipt(event: Event) -> None:
    """Write a row, for a test in another process."""
    from tests.django.shop.models import Receipt

    Receipt.objects.create(event_id=event.id, event_type=event.type)
