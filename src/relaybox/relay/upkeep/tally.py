"""Count what this relay settles in each minute, for the charts.

A flush writes the total of each minute, and each relay has its own rows. So a flush that is repeated, because
its commit is uncertain, counts nothing twice.

Buckets count how long deliveries took. Each is √2 times as long as the one before, from a millisecond to
twelve days. Percentiles are exact to a bucket, and counts of several relays and minutes can be added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from relaybox.core.clock import Clock
from relaybox.core.outcome import Delivered, Failed, Retried
from relaybox.relay.observer import Observer
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.store import Claim, Settlement
from relaybox.stores.upkeep import Minute

KEEP = timedelta(minutes=10)
"""How long a written minute stays in memory: if the clock is set back, its count must not start again."""
LAST = 61
"""The last bucket, which holds all longer times."""
FIRST_ENDS = 0.001


class DatabaseTime:
    """The database's last reported time, advanced by the monotonic clock; at first the host's time."""

    def __init__(self, clock: Clock, host_time: Callable[[], datetime]) -> None:
        self._clock = clock
        self.set(host_time())

    def set(self, now: datetime) -> None:
        """Set the time that the database has just returned."""
        self._said, self._at = now, self._clock.now()

    def now(self) -> datetime:
        """Return the database's time now."""
        return self._said + timedelta(seconds=self._clock.now() - self._at)


@dataclass(slots=True)
class _Counts:
    delivered: int = 0
    retried: int = 0
    failed: int = 0
    lag: Counter[int] = field(default_factory=Counter)
    unwritten: bool = True


class Tally(Observer):
    """An observer that counts outcomes; ``flush`` writes the counts."""

    def __init__(self, relay: str, time: DatabaseTime) -> None:
        self._relay = relay
        self.time = time
        self._counts: dict[tuple[datetime, str], _Counts] = {}

    def claimed(self, destination: str, claim: Claim) -> None:
        """Count rows that failed in the claim."""
        if claim.failed:
            self._now(destination).failed += len(claim.failed)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Count each outcome, and the time from emit to delivery."""
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

    async def flush(self, upkeep: SqlUpkeep) -> None:
        """Write unwritten counts; after a failure keep them for the next flush."""
        unwritten = {key: counts for key, counts in self._counts.items() if counts.unwritten}
        if unwritten:
            minutes = [
                Minute(*key, self._relay, counts.delivered, counts.retried, counts.failed, dict(counts.lag))
                for key, counts in unwritten.items()
            ]
            for counts in unwritten.values():
                counts.unwritten = False
            try:
                await upkeep.record(minutes)
            except BaseException:
                for counts in unwritten.values():
                    counts.unwritten = True
                raise
        horizon = self.time.now() - KEEP
        self._counts = {
            key: counts for key, counts in self._counts.items() if counts.unwritten or key[0] > horizon
        }

    def _now(self, destination: str) -> _Counts:
        counts = self._counts.setdefault((minute_of(self.time.now()), destination), _Counts())
        counts.unwritten = True
        return counts


def minute_of(moment: datetime) -> datetime:
    """Return when the minute began."""
    return moment.replace(second=0, microsecond=0)


def _lags(created: Sequence[datetime], now: datetime) -> Mapping[int, int]:
    """Return the count of each bucket; mostly all of a settle are in one."""
    longest, shortest = (bucket((now - end(created)).total_seconds()) for end in (min, max))
    if longest == shortest:
        return {longest: len(created)}
    return Counter(bucket((now - one).total_seconds()) for one in created)


def bucket(seconds: float) -> int:
    """Return the bucket of a lag."""
    if seconds <= FIRST_ENDS:
        return 0
    # Round it, so that a lag exactly at the end of a bucket is still in it.
    return min(LAST, math.ceil(round(2 * math.log2(seconds / FIRST_ENDS), 9)))


def ends(index: int) -> float:
    """Return the longest lag of a bucket, in seconds."""
    return FIRST_ENDS * 2 ** (index / 2)


def percentile(counts: Mapping[int, int], part: float) -> float | None:
    """Return the lag that ``part`` of the deliveries did not exceed (0.99: all but one of a hundred)."""
    wanted = part * sum(counts.values())
    seen = 0
    for index in sorted(counts):
        seen += counts[index]
        if counts[index] and seen >= wanted:
            return ends(index)
    return None
