"""Where the deliveries of a lane come from, and where their outcomes go."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any
from uuid import UUID

from relaybox.core.settings import Destination
from relaybox.relay.batch import InFlight
from relaybox.relay.claim import Claims
from relaybox.relay.extend import Extender
from relaybox.relay.release import Releases
from relaybox.relay.rest import Rest
from relaybox.relay.settle import Settler
from relaybox.relay.shared import Shared
from relaybox.stores.store import DeadLetter


class Source:
    """The store's side of a lane: claim, extend, settle and release. The sender's side does the rest."""

    def __init__(
        self,
        destination: Destination,
        shared: Shared,
        in_flight: InFlight,
        dead_letter: DeadLetter | None,
        only: tuple[UUID, ...] | None,
        rest: Rest,
    ) -> None:
        def made_due() -> None:
            shared.wake.wake(destination.name)

        self.in_flight = in_flight
        self.claims = Claims(destination, shared, dead_letter, only, rest)
        self.settler = Settler(destination, shared, dead_letter, in_flight, made_due)
        self.releases = Releases(destination, shared, in_flight, self.settler)
        self.extender = Extender(destination, shared, in_flight)

    def works(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return what runs beside the claims, until it is cancelled."""
        return self.settler.run(), self.settler.run_locked(), self.extender.run()
