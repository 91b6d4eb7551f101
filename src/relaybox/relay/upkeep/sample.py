"""Measure once a minute how much is waiting, for the charts. The leader does it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial

from relaybox.core.clock import Clock
from relaybox.core.settings import Destination
from relaybox.relay.upkeep.schedule import Rest, Round, Work, take_turns
from relaybox.relay.upkeep.tally import DatabaseTime, minute_of
from relaybox.stores.sql.upkeep.sample import SqlSamples
from relaybox.stores.upkeep import Sample, Sampled

CAP = 100_000
"""The largest count; counting stops there."""

DAY = 86_400.0
AGES: dict[Sampled, float] = {"sample": 30 * DAY, "operation": 90 * DAY}
"""Seconds to keep rows of each kind."""

BATCH = 1_000
"""Rows removed in one transaction."""

BATCHES = 50
"""Batches in one round."""


class Sampling:
    """Takes a sample of every destination, and one of the whole outbox, in every minute."""

    def __init__(
        self,
        samples: SqlSamples,
        destinations: Iterable[Destination],
        time: DatabaseTime,
        clock: Clock,
        rest: Rest,
    ) -> None:
        self._samples = samples
        self._configured = tuple(destination.name for destination in destinations)
        self._time = time
        self._clock = clock
        self._rest = rest
        self._done: datetime | None = None

    async def __call__(self, term: int) -> Round:
        """Run one round under this term, once a minute even if the last one failed."""
        minute = minute_of(self._time.now())
        if minute == self._done:
            return Round()
        self._done = minute
        taken = await self._take()
        if taken is None:
            return Round(done=False)
        position, now = await self._samples.position()
        kept = await self._samples.keep(term, minute_of(now), [*taken[1:], _whole(taken, position)])
        if kept is None:
            return Round(done=False, led=False)
        works: list[Work] = [partial(self._prune, what, age) for what, age in AGES.items()]
        return await take_turns(term, works, self._clock, self._rest, BATCHES)

    async def _take(self) -> list[Sample] | None:
        """Sample the unrouted events, then every destination; return None if stopped."""
        names = dict.fromkeys(("", *self._configured, *await self._samples.names()))
        taken: list[Sample] = []
        for name in names:
            began = self._clock.now()
            taken.append(await self._samples.measure(name, CAP))
            # Rest for as long as the query took, to spare the database.
            if not await self._rest(self._clock.now() - began):
                return None
        return taken

    async def _prune(self, what: Sampled, age: float, term: int) -> Round | None:
        changed = await self._samples.prune(term, what, age, BATCH)
        return None if changed is None else Round(changed, done=changed < BATCH)


def _whole(every: Sequence[Sample], position: int | None) -> Sample:
    return Sample(
        destination="",
        pending=min(CAP, sum(one.pending for one in every)),
        failed=min(CAP, sum(one.failed for one in every)),
        oldest_seconds=max((s for one in every if (s := one.oldest_seconds) is not None), default=None),
        position=position,
    )
