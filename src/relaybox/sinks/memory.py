"""Keep deliveries in a list, for tests."""

from __future__ import annotations

from collections import deque

from relaybox.core.event import Delivery, Event
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.sinks.sink import OneByOne
from relaybox.wire.envelope import event_of


class MemorySink(OneByOne):
    """Keeps the events it is sent in ``events``, in order of arrival."""

    def __init__(self, destination: Destination | None = None) -> None:
        super().__init__(1 if destination is None else destination.concurrency)
        self.events: list[Event] = []
        self._failures: deque[Retry | Reject | Unavailable] = deque()

    def fail_next(self, outcome: Retry | Reject | Unavailable, times: int = 1) -> None:
        """Answer the next ``times`` deliveries with ``outcome``, after failures that are already planned."""
        self._failures.extend([outcome] * times)

    async def deliver(self, delivery: Delivery) -> None:
        """Keep the event, or raise the next planned failure."""
        event = event_of(delivery)
        if self._failures:
            raise self._failures.popleft()
        self.events.append(event)
