"""What one relay does, in numbers for Prometheus.

A settle is counted as a whole: what many events have in common is looked up once. So it costs a relay little,
which client libraries, that lock and look up for every event, do not.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Generic, TypeVar
from uuid import UUID

from relaybox.core.clock import uptime
from relaybox.core.fingerprint import error_class
from relaybox.core.outcome import Delivered, Failed, Retried
from relaybox.core.values import identifier
from relaybox.errors import ConfigError, MissingExtra
from relaybox.relay.observer import Observer, Sends
from relaybox.sinks.sink import Answer
from relaybox.stores.store import Claim, Settlement

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
except ImportError:
    raise MissingExtra("prometheus-client", "metrics") from None

LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
DURATION = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds of the buckets, in seconds."""

TYPES, ERRORS = 100, 50
"""So many types of events, and of errors, have a label of their own; those that come later are ``other``."""

COUNTERS = (
    (
        "outbox_messages_published",
        "Deliveries that were acknowledged.",
        ("aggregate_type", "event_type", "destination"),
    ),
    (
        "outbox_events",
        "Settled attempts by what became of them: delivered, retried or failed.",
        ("event_type", "status"),
    ),
    (
        "outbox_publish_errors",
        "Attempts that were not acknowledged, by the class of the error.",
        ("error_type", "destination"),
    ),
    (
        "outbox_lease_lost",
        "Leases that another relay took over, whose events may have been sent twice.",
        ("destination",),
    ),
    (
        "outbox_shadowed",
        "Deliveries that were settled without being sent, because they were emitted in shadow.",
        ("destination",),
    ),
)
HISTOGRAMS = (
    (
        "outbox_publish_latency_seconds",
        "From emit to acknowledgement, waits between attempts included.",
        ("destination",),
    ),
    (
        "outbox_processing_duration_seconds",
        "One send, from when it began to its answer.",
        ("event_type", "destination"),
    ),
)
GAUGES = (
    (
        "outbox_overdue_functions",
        "Plain functions over their timeout that are still running; their threads cannot be stopped.",
    ),
    (
        "outbox_canary_seconds",
        "From emit to acknowledgement of the last test event that the leader sent.",
    ),
    (
        "outbox_canary_last_success_timestamp",
        "When the last test event was acknowledged, in seconds since 1970.",
    ),
)
"""The names, texts and labels; each gauge has the label ``destination``."""

OTHER = "other"
LONGEST = 100
"""Characters of a label."""

Key = TypeVar("Key", bound=Hashable)


class MetricsObserver(Observer):
    """Counts for the given registry, or for one of its own; ``namespace`` goes before the names.

    It is a collector of the registry, and may be read from any thread.
    """

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
        self._prefix = prefix(namespace)
        self._clock = clock
        self._wall = wall
        self._types: Known[str] = Known(TYPES)
        self._kinds: Known[tuple[str, str]] = Known(TYPES)
        self._error_types: Known[str] = Known(ERRORS)
        self._published: Counter[tuple[str, ...]] = Counter()
        self._events: Counter[tuple[str, ...]] = Counter()
        self._errors: Counter[tuple[str, ...]] = Counter()
        self._lost: Counter[tuple[str, ...]] = Counter()
        self._shadowed: Counter[tuple[str, ...]] = Counter()
        self._latency: defaultdict[tuple[str, ...], Histogram] = defaultdict(lambda: Histogram(LATENCY))
        self._duration: defaultdict[tuple[str, ...], Histogram] = defaultdict(lambda: Histogram(DURATION))
        self._overdue: dict[tuple[str, ...], int] = {}
        self._canary: dict[tuple[str, ...], tuple[float, float]] = {}
        try:
            self.registry.register(self)
        except ValueError as error:
            fix = "give each relay of a process a registry of its own, or another namespace"
            raise ConfigError(f"registry: {error}; {fix}") from None

    def claimed(self, destination: str, claim: Claim) -> None:
        """What failed on the spot has no send of its own."""
        # There from the start, so that its first increase is seen as one.
        self._lost[label(destination),] += 0
        for delivery in claim.failed:
            self._events[*self._types(delivery.event_type, delivery.event_type), "failed"] += 1
            self._errors["RelayDied", label(destination)] += 1

    def sent(self, destination: str, sends: Sends) -> None:
        """How long each send took, and how long after it was emitted an event was acknowledged."""
        place, lags = label(destination), self._lags(sends)
        if lags:
            self._latency[place,].add(lags)
        if len(lags) < len(sends.answers):
            self._count_errors(place, sends.answers)
        durations: defaultdict[str, list[float]] = defaultdict(list)
        for delivery, began, ended in zip(sends.deliveries, sends.began, sends.ended, strict=True):
            durations[delivery.event_type].append(ended - began)
        for event_type, of_type in durations.items():
            self._duration[*self._types(event_type, event_type), place].add(of_type)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Count outcomes by what the events are."""
        place = label(destination)
        self._lost[place,] += len(lost)
        ours = [s for s in settlements if s.delivery.id not in lost] if lost else settlements
        delivered = Counter(
            [(d.aggregate_type, d.event_type) for d, o in ours if type(o) is Delivered and not o.shadow]
        )
        for kind, count in delivered.items():
            self._published[*self._kinds(kind, *kind), place] += count
            self._events[*self._types(kind[1], kind[1]), "delivered"] += count
        if delivered.total() < len(ours):
            for delivery, outcome in ours:
                if isinstance(outcome, Delivered):
                    self._shadowed[place,] += outcome.shadow
                elif isinstance(outcome, Retried | Failed):
                    status = "retried" if isinstance(outcome, Retried) else "failed"
                    self._events[*self._types(delivery.event_type, delivery.event_type), status] += 1

    def extended(self, destination: str, lost: frozenset[UUID]) -> None:
        """Leases were lost."""
        self._lost[label(destination),] += len(lost)

    def overdue(self, destination: str, count: int) -> None:
        """Threads that cannot be stopped."""
        self._overdue[label(destination),] = count

    def canary(self, destination: str, seconds: float) -> None:
        """The whole path works."""
        self._canary[label(destination),] = (seconds, self._wall())

    def describe(self) -> Iterable[Metric]:
        """The names, for the registry."""
        return [*self._counters(), *self._histograms(), *self._gauges()]

    def collect(self) -> Iterator[Metric]:
        """Everything counted so far."""
        counted = (self._published, self._events, self._errors, self._lost, self._shadowed)
        for counter, counts in zip(self._counters(), counted, strict=True):
            # A copy, because the relay goes on in another thread.
            for labels, count in list(counts.items()):
                counter.add_metric(labels, count)
            yield counter
        for histogram, durations in zip(self._histograms(), (self._latency, self._duration), strict=True):
            for labels, of_labels in list(durations.items()):
                histogram.add_metric(labels, *of_labels.buckets())
            yield histogram
        overdue, canary_seconds, canary_times = self._gauges()
        for labels, number in list(self._overdue.items()):
            overdue.add_metric(labels, number)
        yield overdue
        if self._canary:
            for labels, (took, at) in list(self._canary.items()):
                canary_seconds.add_metric(labels, took)
                canary_times.add_metric(labels, at)
            yield from (canary_seconds, canary_times)

    def _lags(self, sends: Sends) -> list[float]:
        now, at = self._wall(), self._clock()
        # In the zone that the database's times are in: from one zone to another, or to a timestamp, is slow.
        here = datetime.fromtimestamp(now, sends.deliveries[0].created_at.tzinfo)
        lags = [
            (here - delivery.created_at).total_seconds() + ended - at
            for delivery, answer, ended in zip(sends.deliveries, sends.answers, sends.ended, strict=True)
            if type(answer) is Delivered
        ]
        oldest = here - timedelta(seconds=min(max(lags, default=0.0), 86_400.0 * 366))
        if here.utcoffset() != oldest.utcoffset():
            # The clocks of that zone were changed in between.
            return [
                now - delivery.created_at.timestamp() + ended - at
                for delivery, answer, ended in zip(sends.deliveries, sends.answers, sends.ended, strict=True)
                if type(answer) is Delivered
            ]
        return lags

    def _count_errors(self, place: str, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if not isinstance(answer, Delivered):
                text = getattr(answer, "reason", "")
                kind = error_class(text) if isinstance(text, str) else "Error"
                # A text that does not say it leaves what the sink made of it.
                name = type(answer).__name__ if kind == "Error" else kind
                self._errors[*self._error_types(name, name), place] += 1

    def _counters(self) -> list[CounterMetricFamily]:
        return [CounterMetricFamily(f"{self._prefix}{name}", text, labels=of) for name, text, of in COUNTERS]

    def _histograms(self) -> list[HistogramMetricFamily]:
        return [
            HistogramMetricFamily(f"{self._prefix}{name}", text, labels=of) for name, text, of in HISTOGRAMS
        ]

    def _gauges(self) -> list[GaugeMetricFamily]:
        return [
            GaugeMetricFamily(f"{self._prefix}{name}", text, labels=("destination",)) for name, text in GAUGES
        ]


def prefix(namespace: str) -> str:
    """What stands before the names of metrics."""
    return identifier(namespace, "namespace") + "_" if namespace else ""


class Histogram:
    """How many durations were no longer than each bound. One thread adds, another may read.

    The one of prometheus-client observes one value at a time: 735 µs for a thousand, where this takes 33 µs
    (prometheus-client 0.26, CPython 3.11, 15 buckets).
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._all = 0
        self._sum = 0.0

    def add(self, durations: list[float]) -> None:
        """Count these; the list is sorted on the way, so that a bound costs a look and not a pass.

        What two clocks make negative counts as nothing.
        """
        durations.sort()
        # From the largest down: whoever reads in between, upwards, finds no bucket below a smaller one.
        self._all += len(durations)
        for at in reversed(range(len(self._bounds))):
            self._counts[at] += bisect_right(durations, self._bounds[at])
        self._sum += sum(durations[bisect_right(durations, 0.0) :])

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """The bounds with their counts, the last without a bound; and the sum of all durations."""
        counts = [
            (repr(bound), float(count)) for bound, count in zip(self._bounds, self._counts, strict=True)
        ]
        return [*counts, ("+Inf", float(self._all))], self._sum


class Known(Generic[Key]):
    """Names values as labels, each once; all that come after the first ``most`` share one name."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._labels: dict[Key, tuple[str, ...]] = {}

    def __call__(self, value: Key, *texts: str) -> tuple[str, ...]:
        """The labels of a value, which are these texts when it is new."""
        found = self._labels.get(value)
        if found is not None:
            return found
        if len(self._labels) >= self._most:
            return (OTHER,) * len(texts)
        self._labels[value] = made = tuple(label(text) for text in texts)
        return made


def label(text: str) -> str:
    """A text from outside as a label may hold it: one line, printable, of a length that can be read."""
    cut = text[:LONGEST]
    if cut.isprintable():
        return cut
    return "".join(character if character.isprintable() else "?" for character in cut)
