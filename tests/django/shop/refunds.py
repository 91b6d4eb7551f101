"""A handler that the settings name."""

from __future__ import annotations

from relaybox import Event

refunded: list[Event] = []


def refund(event: Event) -> None:
    """Keep the event."""
    refunded.append(event)
