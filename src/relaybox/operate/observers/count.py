"""Counts by destination, in total and since the last log, and what holds each up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from relaybox.core.outcome import Delivered, Failed, Retried
from relaybox.relay.observer import Observer
from relaybox.stores.store import Claim, Held, Settlement

EVERY = 10.0
"""Seconds between two summaries of a busy destination."""
AFTER_QUIET = 1.0
"""Seconds after which the first work of a quiet destination is logged."""
LAGS_OF_A_BATCH = 20
LAGS = 4_000


@dataclass(slots=True)
class Count:
    """Numbers of deliveries by outcome."""

    delivered: int = 0
    retried: int = 0
    failed: int = 0

    def add(self, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Count what was settled; another relay counts lost ones."""
        kinds = [type(outcome) for delivery, outcome in settlements if not lost or delivery.id not in lost]
        self.delivered += kinds.count(Delivered)
        self.retried += kinds.count(Retried)
        self.failed += kinds.count(Failed)

    def __add__(self, other: Count) -> Count:
        return Count(
            self.delivered + other.delivered, self.retried + other.retried, self.failed + other.failed
        )

    def __bool__(self) -> bool:
        return bool(self.delivered or self.retried or self.failed)


class Counter(Observer):
    """Counts by destination, and remembers what holds one up."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, Count] = defaultdict(Count)
        self.held: dict[str, Held] = {}

    @property
    def total(self) -> Count:
        """Return the total of all destinations."""
        return sum(self.counts.values(), Count())

    def claimed(self, destination: str, claim: Claim) -> None:
        """Count deliveries that the claim failed."""
        self.counts[destination].failed += len(claim.failed)
        if claim.held is not None:
            self.held[destination] = claim.held
        elif claim.deliveries:
            self.held.pop(destination, None)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Count outcomes."""
        self.counts[destination].add(settlements, lost)


@dataclass(slots=True)
class Hold:
    """An open circuit or a pause, as this relay last saw it."""

    why: str
    reason: str
    since: float
    maybe_over: bool = False


class Holds(dict[str, Hold]):
    """What holds up each destination, from this relay's own changes and from its claims."""

    def begin(self, destination: str, why: str, reason: str, at: float) -> Hold | None:
        """Record that it is held up, and return what was known before."""
        before = self.get(destination)
        known, since = (before.reason, before.since) if before else ("", at)
        self[destination] = Hold(why, reason or known, since)
        return before

    def ends(self, destination: str) -> bool:
        """True if a successful claim shows that the hold is over."""
        hold = self.get(destination)
        if hold is None or hold.maybe_over or hold.why == "paused":
            return hold is not None
        # A probe passes an open circuit: only a second successful claim shows that it is closed.
        hold.maybe_over = True
        return False


class Window:
    """Counts and lags; ``is_due`` says when to log them."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._due = 0.0
        self.clear(float("-inf"))

    def clear(self, at: float) -> None:
        """Start again after a log."""
        self.count = Count()
        self.shadowed = 0
        self.reported = {"retries": 0, "failures": 0}
        self._lags.clear()
        self._last = at

    def add(
        self, settlements: Sequence[Settlement], lost: frozenset[UUID], at: float, now: datetime
    ) -> Count:
        """Count these settlements, and return their own count. Of a long batch, keep only some lags."""
        self._begin(at)
        count = Count()
        count.add(settlements, lost)
        self.count += count
        shadowed = (d for d, o in settlements if type(o) is Delivered and o.shadow)
        self.shadowed += sum(delivery.id not in lost for delivery in shadowed)
        for delivery, outcome in settlements[:: 1 + len(settlements) // LAGS_OF_A_BATCH]:
            if type(outcome) is Delivered:
                self._lags.append((now - delivery.created_at).total_seconds())
        if len(self._lags) > LAGS:
            del self._lags[::2]
        return count

    def fail(self, number: int, at: float) -> None:
        """Count deliveries that the claim failed."""
        self._begin(at)
        self.count.failed += number

    def is_due(self, at: float) -> bool:
        """True if there is something to log, and it is time."""
        return bool(self.count) and at >= self._due

    def lag(self, part: float) -> float | None:
        """Return the lag from emit to delivered, in seconds, at the quantile ``part``."""
        if not self._lags:
            return None
        self._lags.sort()
        return max(self._lags[min(int(part * len(self._lags)), len(self._lags) - 1)], 0.0)

    def _begin(self, at: float) -> None:
        if not self.count:
            self._due = max(at + AFTER_QUIET, self._last + EVERY)
