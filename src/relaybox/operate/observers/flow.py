"""What a relay knows of its own health: whether its database answers, and which circuits are open."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from uuid import UUID

from relaybox.errors import StoreError
from relaybox.relay.observer import Observer
from relaybox.stores.store import Claim, Settlement

PATIENCE = 5.0
"""Seconds of trouble with the database before it is a problem: one that fails over is back by then."""


class Stop(NamedTuple):
    """Something that keeps deliveries from flowing, and for how many seconds."""

    destination: str | None
    reason: str
    seconds: float


class _Open(NamedTuple):
    since: float
    maybe_over: bool = False


class Flow(Observer):
    """Remembers what stops deliveries, until it is over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._away: float | None = None
        self._last_trouble = 0.0
        self._open: dict[str, _Open] = {}
        self._crashed: dict[str, float] = {}

    def claimed(self, destination: str, claim: Claim) -> None:
        """The database answers, and says whether the circuit is open."""
        self._well()
        self._crashed.pop(destination, None)
        state = self._open.get(destination)
        if claim.held is not None:
            if claim.held.why != "paused":
                self._open[destination] = _Open(self._clock() if state is None else state.since)
        elif state is not None and state.maybe_over:
            del self._open[destination]
        elif state is not None:
            # A probe gets through an open circuit: only a second claim in a row says that it is closed.
            self._open[destination] = _Open(state.since, maybe_over=True)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """The database answers."""
        self._well()

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """It changed."""
        if state == "closed":
            self._open.pop(destination, None)
        elif state != "paused":
            before = self._open.get(destination)
            self._open[destination] = _Open(self._clock() if before is None else before.since)

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        """Either the database is away, or the lane failed."""
        now = self._clock()
        if isinstance(error, StoreError):
            self._last_trouble = now
            self._away = now if self._away is None else self._away
        elif doing == "run":
            self._crashed.setdefault(destination, now)

    def stops(self, *, circuits: bool = True) -> Iterator[Stop]:
        """Everything that is wrong now.

        That a circuit is open is what this relay saw last. Where nothing waits any more, or somebody paused
        the destination, it sees no end of it: whoever can ask the database leaves ``circuits`` out.
        """
        now = self._clock()
        if self._away is not None and now - self._away >= PATIENCE:
            yield Stop(None, "the database refuses or does not answer", now - self._away)
        for name, state in list(self._open.items()) if circuits else ():
            yield Stop(name, "its circuit is open", now - state.since)
        for name, since in list(self._crashed.items()):
            yield Stop(name, "its lane failed and is begun again; the log says why", now - since)

    def _well(self) -> None:
        # Of several lanes one may get through while the others do not.
        if self._away is not None and self._clock() - self._last_trouble >= PATIENCE:
            self._away = None
