"""Print deliveries to the terminal, to try Relaybox before there is a real destination."""

from __future__ import annotations

import sys
from typing import TextIO

from relaybox.core.event import Delivery
from relaybox.core.settings import Destination
from relaybox.sinks.sink import OneByOne
from relaybox.wire.envelope import event_of

_WIDEST = 200


class ConsoleSink(OneByOne):
    """Prints one line for each delivery, to ``stream`` or to standard output."""

    def __init__(self, destination: Destination, stream: TextIO | None = None) -> None:
        super().__init__(destination.concurrency)
        self._name = destination.name
        self._stream = stream

    async def deliver(self, delivery: Delivery) -> None:
        """Print the delivery."""
        # Look it up at each call: code that captures standard output replaces it.
        stream = self._stream or sys.stdout
        stream.write(f"{line(self._name, delivery)}\n")
        stream.flush()


def line(destination: str, delivery: Delivery) -> str:
    """Return time, destination, type, aggregate, id and payload as one line of limited width."""
    event = event_of(delivery)
    what = f"{event.type} {event.aggregate_type}/{event.aggregate_id} {event.id}"
    again = f" attempt {event.attempt}" if event.attempt > 1 else ""
    if isinstance(event.payload, bytes):
        payload = f"({len(event.payload)} bytes)"
    else:
        payload = delivery.payload or "null"
    text = f"{event.created_at:%H:%M:%S} {destination}: {what}{again} {payload}"
    # A payload may hold control sequences of a terminal.
    printable = "".join(character if character.isprintable() else "?" for character in text[: _WIDEST + 1])
    return printable if len(printable) <= _WIDEST else f"{printable[:_WIDEST]}…"
