"""Keep a lane to this relay's share of its destination's ``concurrency``."""

from __future__ import annotations

from relaybox.core.settings import Destination
from relaybox.relay.batch import InFlight
from relaybox.relay.release import Releases
from relaybox.relay.shared import Shared
from relaybox.sinks.sink import Sink


class Share:
    """The share of one lane. It follows other relays as they come and go."""

    def __init__(
        self, destination: Destination, shared: Shared, sink: Sink, in_flight: InFlight, releases: Releases
    ) -> None:
        self._destination = destination
        self._shared = shared
        self._sink = sink
        self._in_flight = in_flight
        self._releases = releases

    @property
    def size(self) -> int:
        """Return how many sends this relay may run at once."""
        return self._shared.share(self._destination.name, self._destination.concurrency)

    def apply(self) -> int:
        """Limit the sink to the size, and return it."""
        if size := self.size:
            self._sink.limit(size)
        return size

    async def run(self) -> None:
        """Follow the share even while nothing is claimed, forever."""
        while True:
            self._shared.observer.overdue(self._destination.name, getattr(self._sink, "overdue", 0))
            size = self.size
            self._sink.limit(size)
            if not size:
                await self._stand_back()
            await self._shared.clock.sleep(1.0)

    async def _stand_back(self) -> None:
        """Give back what has not begun: without a share it would wait here forever."""
        await self._releases.give_back(self._in_flight.unbegun())
