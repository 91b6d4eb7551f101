"""The destination of every event."""

from __future__ import annotations

from relaybox import Event
from relaybox.contrib.django import outbox_handler


@outbox_handler("order.*", name="runner")
def run(event: Event) -> None:
    """Do nothing."""
