"""Observers: what a relay reports for logs, statistics, metrics and traces, and several observers as one.

The relay calls observers in its event loop, between its steps. They must return at once and must not raise.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

from relaybox.core.event import Delivery
from relaybox.sinks.sink import Answer
from relaybox.stores.store import Claim, Settlement

log = logging.getLogger("relaybox.relay")


class Sends(NamedTuple):
    """Sends in columns: deliveries, answers, and when each began and ended by the clock ``uptime``."""

    deliveries: Sequence[Delivery]
    answers: Sequence[Answer]
    began: Sequence[float]
    ended: Sequence[float]


class Observer:
    """Receives reports of what a relay does. A subclass overrides the methods that it needs."""

    timed = False
    """True if it uses ``sent``: only then does the relay time sends."""

    def claimed(self, destination: str, claim: Claim) -> None:
        """Handle a claim. It may be empty."""

    def sent(self, destination: str, sends: Sends) -> None:
        """Handle sends that were answered. Several are reported together, a moment later."""

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Handle outcomes that were written, except those with a ``lost`` lease."""

    def extended(self, destination: str, lost: frozenset[UUID]) -> None:
        """Handle an extension of leases. The ``lost`` ones could not be extended."""

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """Handle a change by this relay: it opened, half-opened or closed the circuit, or paused it."""

    def overdue(self, destination: str, count: int) -> None:
        """Handle the number of plain functions that still run after their timeout; called every second."""

    def canary(self, destination: str, seconds: float) -> None:
        """Handle a test event that was acknowledged ``seconds`` after it was emitted."""

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        """Handle a failure of the store or the sink. The relay tries again."""

    def stopped(self) -> None:
        """Handle the end of the relay. Its deliveries were settled or given back, or their leases run out."""


class Observers(Observer):
    """Passes every call to each observer. An observer that raises is logged and does not affect the relay."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        timing = [observer for observer in observers if observer.timed]
        self.timed = bool(timing)
        for name, _ in inspect.getmembers(Observer, inspect.isfunction):
            setattr(self, name, partial(_tell, timing if name == "sent" else observers, name))


def _tell(observers: Sequence[Observer], name: str, *given: Any) -> None:
    for observer in observers:
        try:
            getattr(observer, name)(*given)
        except Exception:
            log.exception("the observer %s failed", type(observer).__name__)
