"""Time series from relays' roll-ups and the leader's samples, and failed deliveries grouped by error."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import UUID

from relaybox.core.fingerprint import Fingerprint, fingerprint
from relaybox.errors import ConfigError
from relaybox.relay.upkeep.tally import percentile
from relaybox.stores.journal import Failure, Level, Settled

MOST = 180
"""Points of one series."""

LONGEST = 30 * 24.0
"""Hours; older data is not kept."""

STEPS = (1, 2, 5, 10, 15, 20, 30, 60, 120, 240)
"""Minutes that a point may cover."""

LOOKED_AT = 10_000
"""The newest failed rows that are grouped."""

AT_ONCE = 1_000
"""Rows that are grouped on the event loop; more are grouped in a thread."""

TYPES = 10
"""Event types that a group names."""


@dataclass(frozen=True, slots=True)
class Point:
    """One step of time. ``emitted`` and ``delivered`` are rows a second; p50 to p99 are seconds of lag.

    A value is None if it was not measured: no sample was taken, or nothing was delivered.
    """

    at: datetime
    emitted: float | None
    delivered: float
    retried: int
    failed: int
    pending: int | None
    oldest_seconds: float | None
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """Points at regular steps, oldest first, including steps in which nothing happened."""

    step: timedelta
    points: tuple[Point, ...]


def step_of(hours: float) -> int:
    """Return the seconds per point, so that ``hours`` make at most ``MOST`` points."""
    if not 0 < hours <= LONGEST:
        raise ConfigError(f"hours = {hours:g}: use more than 0, and no more than {LONGEST:g}")
    return next(60 * step for step in STEPS if hours * 60 / step <= MOST)


def make_series(
    now: datetime, settled: Mapping[int, Settled], levels: Mapping[int, Level], hours: float, step: int
) -> Series:
    """Return the points of the last ``hours``; the last point is the current, unfinished step."""
    count = max(1, math.ceil(hours * 3600 / step))
    last = int(now.timestamp()) // step
    emitted = dict(_emitted(levels))
    # The current step has only lasted this long.
    begun = max(1.0, now.timestamp() - last * step)

    def point(number: int) -> Point:
        level, done = levels.get(number), settled.get(number) or Settled(0, 0, 0, {})
        return Point(
            at=datetime.fromtimestamp(number * step, UTC),
            emitted=emitted.get(number),
            delivered=done.delivered / (begun if number == last else step),
            retried=done.retried,
            failed=done.failed,
            pending=None if level is None else level.pending,
            oldest_seconds=None if level is None else level.oldest_seconds,
            p50=percentile(done.lag, 0.50),
            p95=percentile(done.lag, 0.95),
            p99=percentile(done.lag, 0.99),
        )

    return Series(timedelta(seconds=step), tuple(map(point, range(last - count + 1, last + 1))))


def _emitted(levels: Mapping[int, Level]) -> Iterator[tuple[int, float]]:
    """Yield rows a second by step: the increase of the position since the sample before."""
    known = sorted(step for step, level in levels.items() if level.position is not None)
    for earlier, step in pairwise(known):
        before, after = levels[earlier], levels[step]
        seconds = (after.at - before.at).total_seconds()
        if seconds > 0:
            yield step, max(0, (after.position or 0) - (before.position or 0)) / seconds


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failed rows with one fingerprint; ``message`` is what their errors have in common."""

    fingerprint: str
    destination: str
    error_class: str
    message: str
    count: int
    first_at: datetime
    last_at: datetime
    example: UUID
    """The newest delivery."""
    error: str
    """The beginning of that delivery's error."""
    event_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failures:
    """The largest groups first; ``capped``: only the newest ``looked_at`` rows were grouped."""

    groups: tuple[FailureGroup, ...]
    looked_at: int
    capped: bool


async def grouped(failures: Sequence[Failure], capped: bool, limit: int) -> Failures:
    """Group the failures, in a thread if there are many."""
    if len(failures) > AT_ONCE:
        return await asyncio.to_thread(group_failures, failures, capped, limit)
    return group_failures(failures, capped, limit)


def group_failures(failures: Sequence[Failure], capped: bool, limit: int) -> Failures:
    """Return the ``limit`` largest groups."""
    groups: dict[str, tuple[Fingerprint, list[Failure]]] = {}
    for failure in failures:
        found = fingerprint(failure.destination, failure.error)
        groups.setdefault(found.hash, (found, []))[1].append(failure)
    made = [_group(*parts) for parts in groups.values()]
    made.sort(key=lambda group: (-group.count, -group.last_at.timestamp(), group.fingerprint))
    return Failures(tuple(made[:limit]), sum(one.count for one in failures), capped)


def _group(found: Fingerprint, failures: Sequence[Failure]) -> FailureGroup:
    newest = max(failures, key=lambda failure: failure.example)
    types: Counter[str] = Counter()
    for failure in failures:
        types[failure.event_type] += failure.count
    return FailureGroup(
        fingerprint=found.hash,
        destination=failures[0].destination,
        error_class=found.error_class,
        message=found.message,
        count=types.total(),
        first_at=min(failure.first_at for failure in failures),
        last_at=max(failure.last_at for failure in failures),
        example=newest.example,
        error=newest.error,
        event_types=tuple(sorted(types, key=lambda name: (-types[name], name))[:TYPES]),
    )
