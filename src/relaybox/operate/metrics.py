"""Prometheus metrics: of one relay's work, and of a whole outbox.

``MetricsObserver`` counts a settle as a whole and looks up common labels once. This costs a relay little;
client libraries lock and look up for every event.

``Gauges`` are read from the operators' service and cached. A scrape asks the database if the cache is old,
waits briefly, and answers with what it has. A slow or missing database makes the gauges old, which two
metrics show, but never makes a scrape slow.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any, Generic, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

from relaybox.core.clock import uptime
from relaybox.core.fingerprint import error_class
from relaybox.core.outcome import Delivered, Failed, Retried
from relaybox.core.text import printable
from relaybox.core.values import identifier
from relaybox.errors import ConfigError, MissingExtra
from relaybox.operate.admin import Admin, DestinationStats
from relaybox.operate.why import is_alive
from relaybox.relay.observer import Observer, Sends
from relaybox.sinks.sink import Answer
from relaybox.stores.sql.ledger.journal import SqlJournal
from relaybox.stores.store import Claim, Settlement

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
except ImportError:
    raise MissingExtra("prometheus-client", "metrics") from None

__all__ = ["CONTENT_TYPE", "Gauges", "Latest", "MetricsObserver", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FRESH = 5.0
"""Seconds for which a cached answer is fresh."""
PATIENCE = 0.05
"""Seconds that a scrape waits for a new answer."""
FIRST = 1.0
"""Seconds that it waits for the first answer, which opens a connection, or to replace a stale one."""
TIMEOUT = 10.0
"""Seconds after which a query is given up."""
CAPPED_AT = 100_000
"""The limit of the pending samples' counts."""

LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
DURATION = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds of the buckets, in seconds."""
TYPES, ERRORS = 100, 50
"""Event types and error types with a label of their own; later ones are ``other``."""
OTHER = "other"
LONGEST = 100
"""Characters of a label."""

_PENDING = f"Deliveries that wait or are being sent; {CAPPED_AT} stands for that many or more."
_FAILED = "Deliveries that failed for good; 10000 stands for that many or more."

PUBLISHED, SETTLED, REFUSED = "outbox_messages_published", "outbox_events", "outbox_publish_errors"
LOST, SHADOWED = "outbox_lease_lost", "outbox_shadowed"

# In the order in which their values are added.
RELAY = {
    CounterMetricFamily: {
        PUBLISHED: "Deliveries that were acknowledged.",
        SETTLED: "Settled attempts by what became of them: delivered, retried or failed.",
        REFUSED: "Attempts that were not acknowledged, by the class of the error.",
        LOST: "Leases that another relay took over, whose events may have been sent twice.",
        SHADOWED: ("Deliveries that were settled without being sent, because they were emitted in shadow."),
    },
    HistogramMetricFamily: {
        "outbox_publish_latency_seconds": "From emit to acknowledgement, waits between attempts included.",
        "outbox_processing_duration_seconds": "One send, from when it began to its answer.",
    },
    GaugeMetricFamily: {
        "outbox_overdue_functions": (
            "Plain functions over their timeout that are still running; their threads cannot be stopped."
        ),
        "outbox_canary_seconds": "From emit to acknowledgement of the last test event that the leader sent.",
        "outbox_canary_last_success_timestamp": (
            "When the last test event was acknowledged, in seconds since 1970."
        ),
    },
}
OUTBOX = {
    GaugeMetricFamily: {
        "outbox_pending_messages": _PENDING,
        "outbox_pending_events": f"The same as outbox_pending_messages. {_PENDING}",
        "outbox_due_messages": "Deliveries that could be sent now; 10000 stands for more.",
        "outbox_failed_messages": _FAILED,
        "outbox_failed_events": f"The same as outbox_failed_messages. {_FAILED}",
        "outbox_oldest_pending_seconds": "The age of the oldest delivery that waits.",
        "outbox_circuit_open": "1 while the destination cannot be reached and all waits.",
        "outbox_paused": "1 while somebody has paused the destination.",
        "outbox_relays": "Relays that are alive.",
        "outbox_scrape_last_success_timestamp": (
            "When it last did, in seconds since 1970: the gauges are of that time."
        ),
    },
    CounterMetricFamily: {
        "outbox_scrape_errors": "How often the database did not answer a scrape's question.",
    },
}
DESTINATION = ("destination",)
LABELS: dict[str, tuple[str, ...]] = {
    PUBLISHED: ("aggregate_type", "event_type", "destination"),
    SETTLED: ("event_type", "status"),
    REFUSED: ("error_type", "destination"),
    "outbox_processing_duration_seconds": ("event_type", "destination"),
    **dict.fromkeys(("outbox_relays", "outbox_scrape_last_success_timestamp", "outbox_scrape_errors"), ()),
}
"""The labels of metrics that have others than ``destination``."""

T = TypeVar("T")


def _families(prefix: str, kinds: Mapping[Any, Mapping[str, str]]) -> list[list[Any]]:
    return [
        [kind(f"{prefix}{name}", text, labels=LABELS.get(name, DESTINATION)) for name, text in texts.items()]
        for kind, texts in kinds.items()
    ]


class MetricsObserver(Observer):
    """Counts for a registry, by default its own, readable from any thread; ``namespace`` prefixes names."""

    timed = True

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        namespace: str = "",
        *,
        clock: Callable[[], float] = uptime,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._prefix = f"{identifier(namespace, 'namespace')}_" if namespace else ""
        self._clock = clock
        self._wall = wall
        self._types, self._kinds, self._error_types = Known(TYPES), Known(TYPES), Known(ERRORS)
        self._counts: dict[str, Counter[tuple[str, ...]]] = {
            name: Counter() for name in RELAY[CounterMetricFamily]
        }
        self._latency: defaultdict[tuple[str, ...], Histogram] = defaultdict(lambda: Histogram(LATENCY))
        self._duration: defaultdict[tuple[str, ...], Histogram] = defaultdict(lambda: Histogram(DURATION))
        self._overdue: dict[str, int] = {}
        self._canary: dict[str, tuple[float, float]] = {}
        try:
            self.registry.register(self)
        except ValueError as error:
            fix = "give each relay of a process a registry of its own, or another namespace"
            raise ConfigError(f"registry: {error}; {fix}") from None

    def claimed(self, destination: str, claim: Claim) -> None:
        """Count deliveries that the claim failed; they have no send of their own."""
        # Create the counter now, so that its first increase is visible.
        self._counts[LOST][label(destination),] += 0
        for delivery in claim.failed:
            self._counts[SETTLED][*self._types[delivery.event_type,], "failed"] += 1
            self._counts[REFUSED]["RelayDied", label(destination)] += 1

    def sent(self, destination: str, sends: Sends) -> None:
        """Record how long each send took, and the lag from emit to acknowledgement."""
        place, lags = label(destination), self._lags(sends)
        if lags:
            self._latency[place,].add(lags)
        if len(lags) < len(sends.answers):
            self._count_errors(place, sends.answers)
        durations: defaultdict[str, list[float]] = defaultdict(list)
        for delivery, began, ended in zip(sends.deliveries, sends.began, sends.ended, strict=True):
            durations[delivery.event_type].append(ended - began)
        for event_type, of_type in durations.items():
            self._duration[*self._types[event_type,], place].add(of_type)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Count outcomes by type."""
        place, events = label(destination), self._counts[SETTLED]
        self._counts[LOST][place,] += len(lost)
        ours = [s for s in settlements if s.delivery.id not in lost] if lost else settlements
        sent = [(d.aggregate_type, d.event_type) for d, o in ours if type(o) is Delivered and not o.shadow]
        delivered = Counter(sent)
        for kind, count in delivered.items():
            self._counts[PUBLISHED][*self._kinds[kind], place] += count
            events[*self._types[kind[1],], "delivered"] += count
        if delivered.total() < len(ours):
            for delivery, outcome in ours:
                if isinstance(outcome, Delivered):
                    self._counts[SHADOWED][place,] += outcome.shadow
                elif isinstance(outcome, Retried | Failed):
                    status = "retried" if isinstance(outcome, Retried) else "failed"
                    events[*self._types[delivery.event_type,], status] += 1

    def extended(self, destination: str, lost: frozenset[UUID]) -> None:
        """Count lost leases."""
        self._counts[LOST][label(destination),] += len(lost)

    def overdue(self, destination: str, count: int) -> None:
        """Record the number of threads that cannot be stopped."""
        self._overdue[label(destination)] = count

    def canary(self, destination: str, seconds: float) -> None:
        """Record that a test event was acknowledged, and when."""
        self._canary[label(destination)] = (seconds, self._wall())

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, for the registry."""
        return chain(*_families(self._prefix, RELAY))

    def collect(self) -> Iterator[Metric]:
        """Yield everything counted so far."""
        counters, histograms, [overdue, canary_seconds, canary_times] = _families(self._prefix, RELAY)
        for counter, name in zip(counters, RELAY[CounterMetricFamily], strict=True):
            # The relay goes on in another thread.
            for labels, count in list(self._counts[name].items()):
                counter.add_metric(labels, count)
            yield counter
        for histogram, durations in zip(histograms, (self._latency, self._duration), strict=True):
            for labels, of_labels in list(durations.items()):
                histogram.add_metric(labels, *of_labels.buckets())
            yield histogram
        for place, number in list(self._overdue.items()):
            overdue.add_metric([place], number)
        yield overdue
        if self._canary:
            for place, (took, at) in list(self._canary.items()):
                canary_seconds.add_metric([place], took)
                canary_times.add_metric([place], at)
            yield from (canary_seconds, canary_times)

    def _lags(self, sends: Sends) -> list[float]:
        now, at = self._wall(), self._clock()
        sent = zip(sends.deliveries, sends.answers, sends.ended, strict=True)
        arrived = [(one.created_at, ended - at) for one, answer, ended in sent if type(answer) is Delivered]

        def since(here: datetime) -> list[float]:
            return [(here - created_at).total_seconds() + offset for created_at, offset in arrived]

        # Use the time zone of the database's times: conversion between zones is slow.
        here = datetime.fromtimestamp(now, sends.deliveries[0].created_at.tzinfo)
        lags = since(here)
        oldest = here - timedelta(seconds=min(max(lags, default=0.0), 86_400.0 * 366))
        # Daylight saving may have changed the offset in between.
        return lags if here.utcoffset() == oldest.utcoffset() else since(datetime.fromtimestamp(now, UTC))

    def _count_errors(self, place: str, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if not isinstance(answer, Delivered):
                text = getattr(answer, "reason", "")
                kind = error_class(text) if isinstance(text, str) else "Error"
                # If the text does not name a class, use the type of the answer.
                name = type(answer).__name__ if kind == "Error" else kind
                self._counts[REFUSED][*self._error_types[name,], place] += 1


class Histogram:
    """Cumulative counts of durations by bound. One thread adds, another may read.

    prometheus-client's histogram observes one value at a time: 735 µs for a thousand, against 33 µs here
    (prometheus-client 0.26, CPython 3.11, 15 buckets).
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def add(self, durations: list[float]) -> None:
        """Count durations; sort the list in place. Negative ones, from two clocks, add nothing to the sum."""
        durations.sort()
        # From the largest down: a concurrent reader, going up, never sees a bucket below a smaller one.
        for at in reversed(range(len(self._bounds))):
            self._counts[at] += bisect_right(durations, self._bounds[at])
        self._sum += sum(durations[bisect_right(durations, 0.0) :])

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return the bounds with their counts, the last unbounded, and the sum of all durations."""
        names = (*map(repr, self._bounds[:-1]), "+Inf")
        return list(zip(names, map(float, self._counts), strict=True)), self._sum


class Known(dict[tuple[str, ...], tuple[str, ...]]):
    """Labels of texts, built once; texts after the first ``most`` share one label."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __missing__(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        if len(self) >= self._most:
            return (OTHER,) * len(texts)
        self[texts] = made = tuple(map(label, texts))
        return made


def label(text: str) -> str:
    """Return outside text as a label: one printable line of limited length."""
    return printable(text[:LONGEST], "?")


class Latest(Generic[T]):
    """The last answer to a slow question, asked again in the background when it is old.

    If the answer is older than ``stale`` seconds, a caller waits longer for a new one.
    """

    def __init__(self, *, timeout: float = TIMEOUT, stale: float = math.inf) -> None:
        self._timeout = timeout
        self._stale = stale
        self._task: asyncio.Task[None] | None = None
        self._at = float("-inf")
        self.value: T | None = None
        self.answered_at: float | None = None
        """When it was answered, in seconds since 1970."""
        self.errors = 0

    @property
    def age(self) -> float:
        """Return the seconds since the last answer, or infinity."""
        return time.monotonic() - self._at

    async def look(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """Return a fresh answer if it comes soon, else the last one."""
        if self.age > FRESH:
            asked = self._task if self._task is not None and not self._task.done() else None
            self._task = asked or asyncio.create_task(self._refresh(ask))
            new = self.value is None and not self.errors
            seldom = self.value is not None and self.age > self._stale and asked is None
            await asyncio.wait([self._task], timeout=FIRST if new or seldom else PATIENCE)
        return self.value

    async def close(self) -> None:
        """Cancel a running question."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _refresh(self, ask: Callable[[], Awaitable[T]]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                self.value = await ask()
        except Exception:
            # Visible as a counted error and a timestamp that does not advance.
            self.errors += 1
        else:
            self._at, self.answered_at = time.monotonic(), time.time()


class Gauges:
    """The gauges of an outbox as a prometheus-client collector; call ``refresh`` before reading."""

    def __init__(self, namespace: str = "") -> None:
        self._prefix = f"{identifier(namespace, 'namespace')}_" if namespace else ""
        self._latest: Latest[tuple[Mapping[str, Sequence[float]], int]] = Latest()

    async def refresh(self, admin: Admin) -> None:
        """Ask the database if the cache is old, and wait briefly for the answer."""
        await self._latest.look(lambda: _read(admin))

    async def close(self) -> None:
        """Stop asking the database."""
        await self._latest.close()

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, for a registry."""
        return chain(*_families(self._prefix, OUTBOX))

    def collect(self) -> Iterator[Metric]:
        """Yield the database's last answer."""
        [*gauges, relays, answered], [errors] = _families(self._prefix, OUTBOX)
        if self._latest.value is not None:
            destinations, alive = self._latest.value
            for name, values in destinations.items():
                for gauge, value in zip(gauges, values, strict=True):
                    gauge.add_metric([label(name)], float(value))
            relays.add_metric([], alive)
            yield from (*gauges, relays)
        errors.add_metric([], self._latest.errors)
        yield errors
        if self._latest.answered_at is not None:
            answered.add_metric([], self._latest.answered_at)
            yield answered


async def _read(admin: Admin) -> tuple[Mapping[str, Sequence[float]], int]:
    stats = await admin.stats()
    destinations = {one.name: await _values(admin, one) for one in stats.destinations}
    return destinations, sum(map(is_alive, stats.relays))


async def _values(admin: Admin, one: DestinationStats) -> Sequence[float]:
    """Return the values of one destination, in the order of ``OUTBOX``."""
    counts, place = one.counts, one.place
    pending = counts.due + counts.scheduled + counts.parked + counts.sending
    if capped := counts.capped & {"due", "scheduled", "parked"}:
        # The leader's last count, which is taken once a minute and counts further.
        series = await admin.series(0.1, one.name)
        sampled = next((point.pending for point in reversed(series.points) if point.pending is not None), 0)
        # There is at least one more than was counted, so an alert above 10,000 fires without the sample.
        pending = max(pending + len(capped), sampled)
    held = (False, False) if place is None else (place.circuit != "closed", place.paused)
    return pending, pending, counts.due, counts.failed, counts.failed, counts.oldest_seconds or 0.0, *held


_kept: WeakKeyDictionary[SqlJournal, dict[str, Gauges]] = WeakKeyDictionary()
"""By the journal, which all operators share."""


async def exposition(
    admin: Admin, namespace: str = "", *, registry: CollectorRegistry | None = None
) -> tuple[bytes, str]:
    """Return the outbox's metrics, and those in ``registry``, as Prometheus reads them, with their type."""
    gauges = _kept.setdefault(admin.journal, {}).setdefault(namespace, Gauges(namespace))
    await gauges.refresh(admin)
    own = CollectorRegistry()
    own.register(gauges)
    body = generate_latest(own)
    return (body if registry is None else body + generate_latest(registry)), CONTENT_TYPE
