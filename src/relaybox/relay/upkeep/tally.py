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
from dataclasses import replace
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


class Tally(Observer):
    """An observer that counts outcomes; ``flush`` writes the counts."""

    def __init__(self, relay: str, time: DatabaseTime) -> None:
        self._relay = relay
        self.time = time
        self._minutes: dict[tuple[datetime, str], Minute] = {}
        self._unwritten: set[tuple[datetime, str]] = set()

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
        unwritten, self._unwritten = self._unwritten, set()
        # Copies, because the next settles count on.
        minutes = [replace(one, lag=one.lag.copy()) for key, one in self._minutes.items() if key in unwritten]
        try:
            if minutes:
                await upkeep.record(minutes)
        except BaseException:
            self._unwritten |= unwritten
            raise
        horizon = self.time.now() - KEEP
        self._minutes = {
            key: one for key, one in self._minutes.items() if key in self._unwritten or key[0] > horizon
        }

    def _now(self, destination: str) -> Minute:
        key = minute_of(self.time.now()), destination
        self._unwritten.add(key)
        if key not in self._minutes:
            self._minutes[key] = Minute(*key, self._relay)
        return self._minutes[key]


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
    """Return the number of the histogram's bucket that counts this lag."""
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
