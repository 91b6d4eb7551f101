"""One observer made of several."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from relaybox.observe import Observer
from relaybox.store import Claim, Settlement


class Observers(Observer):
    """Tells each of them."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def claimed(self, destination: str, claim: Claim) -> None:
        """A claim got something, or failed a row on the spot."""
        for observer in self._observers:
            observer.claimed(destination, claim)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Outcomes were written, but for those of ``lost`` leases."""
        for observer in self._observers:
            observer.settled(destination, settlements, lost)

    def extended(self, destination: str, lost: frozenset[UUID]) -> None:
        """Leases were extended, but for those that were lost."""
        for observer in self._observers:
            observer.extended(destination, lost)

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """The circuit changed, or the destination was paused."""
        for observer in self._observers:
            observer.circuit(destination, state, reason)

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        """The store or the sink failed at something; it is tried again."""
        for observer in self._observers:
            observer.trouble(destination, doing, error)

    def stopped(self) -> None:
        """The relay is done."""
        for observer in self._observers:
            observer.stopped()
