"""One observer made of several."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from uuid import UUID

from relaybox.relay.observer import Observer, Sends
from relaybox.stores.store import Claim, Settlement

log = logging.getLogger("relaybox.relay")


class Observers(Observer):
    """Tells each of them. One that raises is logged, and changes nothing for the relay."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._timing = [observer for observer in observers if observer.timed]
        self.timed = bool(self._timing)

    def claimed(self, destination: str, claim: Claim) -> None:
        """A claim got something, or failed a row on the spot."""
        self._tell(lambda observer: observer.claimed(destination, claim))

    def sent(self, destination: str, sends: Sends) -> None:
        """These were tried and answered."""
        self._tell(lambda observer: observer.sent(destination, sends), self._timing)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Outcomes were written, but for those of ``lost`` leases."""
        self._tell(lambda observer: observer.settled(destination, settlements, lost))

    def extended(self, destination: str, lost: frozenset[UUID]) -> None:
        """Leases were extended, but for those that were lost."""
        self._tell(lambda observer: observer.extended(destination, lost))

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """The circuit changed, or the destination was paused."""
        self._tell(lambda observer: observer.circuit(destination, state, reason))

    def overdue(self, destination: str, count: int) -> None:
        """So many plain functions are over their time and still running."""
        self._tell(lambda observer: observer.overdue(destination, count))

    def canary(self, destination: str, seconds: float) -> None:
        """The test event was acknowledged."""
        self._tell(lambda observer: observer.canary(destination, seconds))

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        """The store or the sink failed at something; it is tried again."""
        self._tell(lambda observer: observer.trouble(destination, doing, error))

    def stopped(self) -> None:
        """The relay is done."""
        self._tell(lambda observer: observer.stopped())

    def _tell(self, tell: Callable[[Observer], None], whom: Sequence[Observer] | None = None) -> None:
        for observer in self._observers if whom is None else whom:
            try:
                tell(observer)
            except Exception:
                log.exception("the observer %s failed", type(observer).__name__)
