"""Counts what this relay settles, by the minute, for the charts.

A flush writes what a minute has come to, not what was added since: a relay's rows are its own, so a flush
that is repeated, because nobody knows whether it was committed, counts nothing twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from relaybox.core.outcome import Delivered, Failed, Retried
from relaybox.relay.observer import Observer
from relaybox.relay.upkeep.lag import bucket
from relaybox.relay.upkeep.moment import DatabaseTime
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.store import Claim, Settlement
from relaybox.stores.upkeep import Minute

KEEP = timedelta(minutes=10)
"""So long a minute that was written stays in memory, lest a clock that is set back begin it anew."""


@dataclass(slots=True)
class _Counts:
    delivered: int = 0
    retried: int = 0
    failed: int = 0
    lag: Counter[int] = field(default_factory=Counter)
    unwritten: bool = True


class Tally(Observer):
    """An observer that counts; ``flush`` writes."""

    def __init__(self, relay: str, time: DatabaseTime) -> None:
        self._relay = relay
        self.time = time
        self._counts: dict[tuple[datetime, str], _Counts] = {}

    def claimed(self, destination: str, claim: Claim) -> None:
        """Rows that were failed on the spot."""
        if claim.failed:
            self._now(destination).failed += len(claim.failed)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Count each outcome, and how long after it was emitted an event was delivered."""
        counts = self._now(destination)
        ours = [s for s in settlements if s.delivery.id not in lost] if lost else settlements
        delivered = [delivery.created_at for delivery, outcome in ours if type(outcome) is Delivered]
        counts.delivered += len(delivered)
        if delivered:
            counts.lag.update(_lags(delivered, self.time.now()))
        if len(delivered) < len(ours):
            kinds = [type(outcome) for _, outcome in ours]
            counts.retried += kinds.count(Retried)
            counts.failed += kinds.count(Failed)

    def extended(self, destination: str, lost: frozenset[UUID]) -> None:
        """Settles nothing."""

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """Settles nothing."""

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        """Settles nothing."""

    async def flush(self, upkeep: SqlUpkeep) -> None:
        """Write what is not written yet; where that fails it is kept for the next time."""
        unwritten = {key: counts for key, counts in self._counts.items() if counts.unwritten}
        if unwritten:
            minutes = [self._minute(key, counts) for key, counts in unwritten.items()]
            for counts in unwritten.values():
                counts.unwritten = False
            try:
                await upkeep.record(minutes)
            except BaseException:
                for counts in unwritten.values():
                    counts.unwritten = True
                raise
        self._forget()

    def _now(self, destination: str) -> _Counts:
        minute = self.time.now().replace(second=0, microsecond=0)
        counts = self._counts.setdefault((minute, destination), _Counts())
        counts.unwritten = True
        return counts

    def _minute(self, key: tuple[datetime, str], counts: _Counts) -> Minute:
        return Minute(*key, self._relay, counts.delivered, counts.retried, counts.failed, dict(counts.lag))

    def _forget(self) -> None:
        horizon = self.time.now() - KEEP
        self._counts = {
            key: counts for key, counts in self._counts.items() if counts.unwritten or key[0] > horizon
        }


def _lags(created: Sequence[datetime], now: datetime) -> Mapping[int, int]:
    """How many are in each bucket. Those of one settle are most often in one."""
    longest, shortest = (bucket((now - end(created)).total_seconds()) for end in (min, max))
    if longest == shortest:
        return {longest: len(created)}
    return Counter(bucket((now - one).total_seconds()) for one in created)
