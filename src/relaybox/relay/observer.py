"""The contract of an observer: what a relay tells of its work, for logs, statistics, metrics and traces.

Observers are called in the relay's loop, between its steps: they return at once and do not raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from relaybox.core.event import Delivery
from relaybox.sinks.sink import Answer
from relaybox.stores.store import Claim, Settlement


class Sends(NamedTuple):
    """Deliveries, answers, and when each began and ended by ``uptime``, the relay's clock; in columns."""

    deliveries: Sequence[Delivery]
    answers: Sequence[Answer]
    began: Sequence[float]
    ended: Sequence[float]


class Observer:
    """Hears of what a relay does. This one does nothing: a subclass writes what it cares for."""

    timed = False
    """Whether it wants to hear of ``sent``: only then are sends timed."""

    def claimed(self, destination: str, claim: Claim) -> None:
        """A claim got something, or failed a row on the spot."""

    def sent(self, destination: str, sends: Sends) -> None:
        """These were tried and answered; it is told together, a moment later."""

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Outcomes were written, but for those of ``lost`` leases."""

    def extended(self, destination: str, lost: frozenset[UUID]) -> None:
        """Leases were extended, but for those that were lost."""

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """The circuit was opened, half-opened or closed, or the destination paused, by this relay."""

    def overdue(self, destination: str, count: int) -> None:
        """So many plain functions are over their time and still running; it is said every second."""

    def canary(self, destination: str, seconds: float) -> None:
        """The test event that proves the whole path was acknowledged so long after it was emitted."""

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        """The store or the sink failed at something; it is tried again."""

    def stopped(self) -> None:
        """The relay is done: what it held is settled or given back, or was left to run out."""
