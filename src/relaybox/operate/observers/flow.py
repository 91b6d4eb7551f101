"""A relay's view of its own health: whether the database answers, and which circuits are open."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from uuid import UUID

from relaybox.errors import StoreError
from relaybox.operate.health import Problem
from relaybox.operate.observers.count import Holds
from relaybox.relay.observer import Observer
from relaybox.stores.store import Claim, Settlement

PATIENCE = 5.0
"""Seconds of database errors before they are a problem: a failover is over by then."""


class Flow(Observer):
    """Remembers what stops deliveries, until it is over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._away: float | None = None
        self._last_trouble = 0.0
        self._open = Holds()
        self._crashed: dict[str, float] = {}

    def claimed(self, destination: str, claim: Claim) -> None:
        """Record that the database answers, and whether the circuit is open."""
        self._well()
        self._crashed.pop(destination, None)
        if claim.held is not None:
            self.circuit(destination, claim.held.why, "")
        elif self._open.ends(destination):
            del self._open[destination]

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Record that the database answers."""
        self._well()

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """Record the state of a circuit. A pause is intended, and is not a problem."""
        if state == "closed":
            self._open.pop(destination, None)
        elif state != "paused":
            self._open.begin(destination, state, reason, self._clock())

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        """Record that the database is unavailable, or that the lane failed."""
        now = self._clock()
        if isinstance(error, StoreError):
            self._last_trouble = now
            self._away = now if self._away is None else self._away
        elif doing == "run":
            self._crashed.setdefault(destination, now)

    def stops(self, *, circuits: bool = True) -> Iterator[Problem]:
        """Yield everything that is wrong now.

        Circuits are as this relay last saw them. It does not notice that one closed if nothing waits any more
        or the destination was paused. A caller that can ask the database passes ``circuits=False``.
        """
        now = self._clock()
        if self._away is not None and now - self._away >= PATIENCE:
            yield Problem(None, "the database refuses or does not answer", now - self._away)
        for name, hold in list(self._open.items()) if circuits else ():
            yield Problem(name, "its circuit is open", now - hold.since)
        for name, since in list(self._crashed.items()):
            yield Problem(name, "its lane failed and is begun again; the log says why", now - since)

    def _well(self) -> None:
        # One of several lanes may succeed while the others fail.
        if self._away is not None and self._clock() - self._last_trouble >= PATIENCE:
            self._away = None
