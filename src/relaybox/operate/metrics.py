"""Metrics of a whole outbox, for Prometheus: how much waits, how much failed, what is open, who is alive.

They come from the operators' service and are kept: a scrape asks the database when what is kept is old, waits
a moment for it, and answers with what there is. A database that is slow or away makes them old, which two
metrics of their own tell, and never a scrape slow.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from relaybox.errors import MissingExtra
from relaybox.operate.admin import Admin, DestinationStats, Stats
from relaybox.operate.observers.metrics import MetricsObserver, label, prefix
from relaybox.operate.why import is_alive
from relaybox.stores.sql.journal import SqlJournal

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError:
    raise MissingExtra("prometheus-client", "metrics") from None

__all__ = ["CONTENT_TYPE", "Gauges", "Latest", "MetricsObserver", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FRESH = 5.0
"""Seconds for which an answer of the database is good enough for the next scrape."""
PATIENCE = 0.05
"""Seconds that a scrape waits for a new one."""
FIRST = 1.0
"""Seconds that it waits for the very first, which opens a connection, or in place of a stale one."""
TIMEOUT = 10.0
"""Seconds after which an answer is no longer waited for."""
CAPPED_AT = 100_000
"""What the samples of pending deliveries count to."""

T = TypeVar("T")


class Latest(Generic[T]):
    """The last answer to a question that may take long, asked again in the background when it is old.

    One older than ``stale`` seconds is worth nothing: who asks so seldom waits longer for a new one.
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
        """Seconds since the answer; infinite where there was none."""
        return time.monotonic() - self._at

    async def look(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """The answer: a fresh one if it comes soon, else the last one there was."""
        if self.age > FRESH:
            asked = self._task is not None and not self._task.done()
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._refresh(ask))
            new = self.value is None and not self.errors
            seldom = self.value is not None and self.age > self._stale and not asked
            await asyncio.wait([self._task], timeout=FIRST if new or seldom else PATIENCE)
        return self.value

    async def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _refresh(self, ask: Callable[[], Awaitable[T]]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                self.value = await ask()
        except Exception:
            # It shows as an error that is counted, and as a time that stands still.
            self.errors += 1
        else:
            self._at, self.answered_at = time.monotonic(), time.time()


class _Reading(NamedTuple):
    destinations: Mapping[str, Sequence[float]]
    """The values of its gauges by the name of each."""
    relays: int


class Gauges:
    """The gauges of an outbox as a collector of prometheus-client; ``refresh`` before it is read."""

    def __init__(self, namespace: str = "") -> None:
        self._prefix = prefix(namespace)
        self._latest: Latest[_Reading] = Latest()

    async def refresh(self, admin: Admin) -> None:
        """Ask the database if it is time, and wait a moment for its answer."""
        await self._latest.look(lambda: _read(admin))

    async def close(self) -> None:
        """Ask the database no more."""
        await self._latest.close()

    def describe(self) -> Iterable[Metric]:
        """The names, for a registry."""
        return [*self._gauges(), self._relays(), *self._about()]

    def collect(self) -> Iterator[Metric]:
        """What the database said last."""
        reading = self._latest.value
        if reading is not None:
            gauges = self._gauges()
            for name, values in reading.destinations.items():
                for gauge, value in zip(gauges, values, strict=True):
                    gauge.add_metric([label(name)], float(value))
            yield from gauges
            relays = self._relays()
            relays.add_metric([], reading.relays)
            yield relays
        errors, answered = self._about()
        errors.add_metric([], self._latest.errors)
        yield errors
        if self._latest.answered_at is not None:
            answered.add_metric([], self._latest.answered_at)
            yield answered

    def _gauges(self) -> tuple[GaugeMetricFamily, ...]:
        pending = f"Deliveries that wait or are being sent; {CAPPED_AT} stands for that many or more."
        failed = "Deliveries that failed for good; 10000 stands for that many or more."
        return (
            self._gauge("outbox_pending_messages", pending),
            self._gauge("outbox_pending_events", f"The same as outbox_pending_messages. {pending}"),
            self._gauge("outbox_due_messages", "Deliveries that could be sent now; 10000 stands for more."),
            self._gauge("outbox_failed_messages", failed),
            self._gauge("outbox_failed_events", f"The same as outbox_failed_messages. {failed}"),
            self._gauge("outbox_oldest_pending_seconds", "The age of the oldest delivery that waits."),
            self._gauge("outbox_circuit_open", "1 while the destination cannot be reached and all waits."),
            self._gauge("outbox_paused", "1 while somebody has paused the destination."),
        )

    def _gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}{name}", text, labels=("destination",))

    def _relays(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}outbox_relays", "Relays that are alive.", labels=())

    def _about(self) -> tuple[CounterMetricFamily, GaugeMetricFamily]:
        errors = "How often the database did not answer a scrape's question."
        answered = "When it last did, in seconds since 1970: the gauges are of that time."
        return (
            CounterMetricFamily(f"{self._prefix}outbox_scrape_errors", errors, labels=()),
            GaugeMetricFamily(f"{self._prefix}outbox_scrape_last_success_timestamp", answered, labels=()),
        )


async def _read(admin: Admin) -> _Reading:
    stats: Stats = await admin.stats()
    destinations = {one.name: await _values(admin, one) for one in stats.destinations}
    return _Reading(destinations, sum(map(is_alive, stats.relays)))


async def _values(admin: Admin, one: DestinationStats) -> Sequence[float]:
    """The values of one destination, in the order of ``_gauges``."""
    counts, place = one.counts, one.place
    pending = counts.due + counts.scheduled + counts.parked + counts.sending
    if capped := counts.capped & {"due", "scheduled", "parked"}:
        # There is at least one more than was counted: an alert above 10,000 need not wait for the sample.
        pending = max(pending + len(capped), await _sampled(admin, one.name))
    return (
        *(pending, pending, counts.due, counts.failed, counts.failed, counts.oldest_seconds or 0.0),
        place is not None and place.circuit != "closed",
        place is not None and place.paused,
    )


async def _sampled(admin: Admin, name: str) -> int:
    """What the leader counted last: once a minute, and further."""
    series = await admin.series(0.1, name)
    return next((point.pending for point in reversed(series.points) if point.pending is not None), 0)


_kept: WeakKeyDictionary[SqlJournal, dict[str, Gauges]] = WeakKeyDictionary()
"""By what the service stands on, which operators share."""


async def exposition(
    admin: Admin, namespace: str = "", *, registry: CollectorRegistry | None = None
) -> tuple[bytes, str]:
    """The metrics of the outbox as Prometheus reads them, and their content type.

    With the ``registry`` of a ``MetricsObserver``, those of its relay too.
    """
    of_outbox = _kept.setdefault(admin.journal, {})
    if namespace not in of_outbox:
        of_outbox[namespace] = Gauges(namespace)
    gauges = of_outbox[namespace]
    await gauges.refresh(admin)
    own = CollectorRegistry()
    own.register(gauges)
    body = generate_latest(own)
    return (body if registry is None else body + generate_latest(registry)), CONTENT_TYPE
