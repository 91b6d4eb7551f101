"""One observer made of several."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from uuid import UUID

from relaybox.relay.observer import Observer, Sends
from relaybox.stores.store import Claim, Settlement

log = logging.getLogger("relaybox.relay")


class Observers(Observer):
    """Tells each of them what it is told. One that raises is logged, and changes nothing for the relay."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._timing = [observer for observer in observers if observer.timed]
        self.timed = bool(self._timing)

    def claimed(self, destination: str, claim: Claim) -> None:
        self._tell(lambda observer: observer.claimed(destination, claim))

    def sent(self, destination: str, sends: Sends) -> None:
        self._tell(lambda observer: observer.sent(destination, sends), self._timing)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        self._tell(lambda observer: observer.settled(destination, settlements, lost))

    def extended(self, destination: str, lost: frozenset[UUID]) -> None:
        self._tell(lambda observer: observer.extended(destination, lost))

    def circuit(self, destination: str, state: str, reason: str) -> None:
        self._tell(lambda observer: observer.circuit(destination, state, reason))

    def overdue(self, destination: str, count: int) -> None:
        self._tell(lambda observer: observer.overdue(destination, count))

    def canary(self, destination: str, seconds: float) -> None:
        self._tell(lambda observer: observer.canary(destination, seconds))

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        self._tell(lambda observer: observer.trouble(destination, doing, error))

    def stopped(self) -> None:
        self._tell(lambda observer: observer.stopped())

    def _tell(self, tell: Callable[[Observer], None], whom: Sequence[Observer] | None = None) -> None:
        for observer in self._observers if whom is None else whom:
            try:
                tell(observer)
            except Exception:
                log.exception("the observer %s failed", type(observer).__name__)
