"""Measure how long events of a healthy destination wait while another destination is in trouble.

One relay serves all destinations. Each case emits events at a steady rate to an unordered and to an ordered
destination, and adds one kind of trouble. The hot keys belong to the ordered destination itself. A wait runs
from the commit to the handler. If a lock prevents all writes, it runs from the end of the lock, and for
suspects from the start of the relay. An event that did not arrive has waited until the relay was stopped.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks import ours
from benchmarks.findings import Facts, Findings, Options, percentile
from benchmarks.harness import PAYLOAD, insert, outbox, run
from benchmarks.process import PATIENCE, process
from relaybox import Call, Event, Outbox
from tests.waiting import wait_for

Watch: TypeAlias = tuple[str, str]
"""The events of one destination and aggregate type."""

RATE = 50
STEADY, SUSPECT, HOT = "Order", "Suspect", "Hot"
HEALTHY, ORDERED, LOCKED, LARGE = "healthy", "ordered", "locked", "large"
SLOW = ("slow 1", "slow 2")
WATCHED: Mapping[str, Watch] = {
    "no order": (HEALTHY, STEADY),
    "ordered": (ORDERED, STEADY),
    "its own suspects": (HEALTHY, SUSPECT),
}
PERCENTILES = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
CONNECTIONS = 6
"""The connections that ``Outbox.relay`` documents, with the one that exists for a moment."""
MEGABYTES = 300
UNDISTURBED = "undisturbed"
MOMENT = 2.0
"""Seconds of a steady load before the trouble begins."""
OUR_NAME = "benchmark"

SUSPECTS = """
UPDATE outbox_event
SET crashes = 2, lease_token = gen_random_uuid(), lease_owner = 'a relay that died',
    leased_until = clock_timestamp() - interval '1 second'
WHERE aggregate_type = 'Suspect'"""
LOCK_ROW = """
SELECT id FROM outbox_event WHERE destination = 'locked' AND lease_token IS NOT NULL
ORDER BY position LIMIT 1 FOR UPDATE"""
BACKENDS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND application_name <> %(ours)s"""


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of trouble: what is in the table at the start, and what happens during the steady load.

    ``disturb`` returns when the table could be written again, or 0; ``hold`` is for how long it could not.
    ``extra`` counts events to wait for beside the steady ones.
    """

    name: str
    seconds: float
    hold: float = 0.0
    plant: Callable[[str], None] = lambda url: None
    disturb: Callable[[str], float] = lambda url: 0.0
    extra: Mapping[Watch, int] = field(default_factory=dict)

    @property
    def expected(self) -> dict[Watch, int]:
        """Return the number of events to wait for."""
        steady = round(RATE * self.seconds)
        return {(HEALTHY, STEADY): steady, (ORDERED, STEADY): steady, **self.extra}


@dataclass(frozen=True, slots=True)
class Taken:
    """What one case came to: seconds and missing events by what is watched, megabytes, connections.

    ``judged`` names the percentile that has a bar.
    """

    waits: Mapping[str, Sequence[float]]
    missing: Mapping[str, int]
    memory: float
    connections: int
    judged: str


def cases(options: Options) -> list[Case]:
    """Return every kind of trouble, and none."""
    seconds, row, table = options.size(20, 2), options.size(25, 2), options.size(130, 4)
    own, slow, hot = options.size(10, 2), options.size(20, 2), options.size(150, 4)
    large, small = options.size(800, 20), options.size(5_000, 100)
    suspects = {(HEALTHY, SUSPECT): own}
    return [
        Case(UNDISTURBED, seconds, plant=suspects_of(own, 0), extra=suspects),
        Case("slow destinations with suspects", seconds, plant=suspects_of(own, slow), extra=suspects),
        Case(f"a row locked for {row} s", row + 5, disturb=lock_row(row)),
        Case(f"a table locked for {table} s", seconds, hold=table, disturb=lock_table(table)),
        Case("eight slow hot keys", seconds, disturb=hot_keys(8, hot)),
        Case(
            f"{large} payloads of 0.93 MB",
            seconds,
            disturb=large_payloads(small, large),
            extra={(LARGE, STEADY): small + large},
        ),
    ]


async def measure(server_url: str, options: Options) -> Facts:
    """Measure milliseconds by case, and the memory and connections of the relay."""
    findings = Findings()
    found = {case.name: await take(server_url, case) for case in cases(options)}
    lines, held = [], []
    for name, taken in found.items():
        for label, waits in taken.waits.items():
            figures = {title: 1e3 * percentile(waits, share) for title, share in PERCENTILES.items()}
            findings.figures[f"{name}, {label}"] = {**figures, "missing": taken.missing[label]}
            shown = [f"{value:,.1f}" for value in figures.values()]
            lines.append([f"{name}: {label}", *shown, str(taken.missing[label])])
        findings.figures[name] = {"peak_mb": taken.memory, "connections": taken.connections}
        held.append([name, f"{taken.memory:,.0f}", str(taken.connections)])
    columns = ["", *PERCENTILES, "not delivered"]
    findings.table(f"commit to handler at {RATE}/s beside a neighbour in trouble, ms", columns, lines)
    findings.table("what the relay held meanwhile", ["", "peak memory, MB", "most connections"], held)
    _judge(findings, found)
    return findings.facts(rate=RATE)


def _judge(findings: Findings, found: Mapping[str, Taken]) -> None:
    def at_most(bar: str, most: float, unit: str, value: float) -> None:
        findings.judge(bar, f"≤ {most:,.0f} {unit}".strip(), f"{value:,.0f}", value <= most)

    alone = found[UNDISTURBED]
    for name, taken in found.items():
        for label, waits in taken.waits.items():
            if taken is not alone:
                title, share = taken.judged, PERCENTILES[taken.judged]
                most = 2e3 * percentile(alone.waits[label], share) + 1e3
                at_most(f"beside {name}: {title}, {label}", most, "ms", 1e3 * percentile(waits, share))
        at_most(f"connections of a relay, {name}", CONNECTIONS, "", taken.connections)
    *_, (large, taken) = found.items()
    at_most(f"memory, {large}", MEGABYTES, "MB", taken.memory)


async def take(server_url: str, case: Case) -> Taken:
    """Run one case on a database of its own."""
    count = round(RATE * case.seconds)
    limit = 4 * PATIENCE + 2 * case.seconds + case.hold
    with outbox(server_url) as (url, _):
        case.plant(url)
        with counted_backends(url) as backends:
            delivering = process(limit + PATIENCE, deliver, url, case.expected, limit, tells=True)
            async with delivering as relay, asyncio.timeout(limit + PATIENCE):
                await relay.hear()
                ready = time.monotonic()
                async with process(limit, emit, url, count, tells=True) as emitter:
                    await emitter.hear()
                    writable = await asyncio.to_thread(case.disturb, url)
                    commits = await emitter.hear()
                arrivals, memory, ended = await relay.hear()
    waits, missing = {}, {}
    for label, watch in WATCHED.items():
        if watch in case.expected:
            since = commits if watch[1] == STEADY else [ready] * case.expected[watch]
            came = arrivals.get(watch, {})
            waits[label] = [wait(begun, came.get(n, ended), writable) for n, begun in enumerate(since)]
            missing[label] = len(since) - len(came)
    # Only a few events exist at the end of a lock that prevents all writes.
    return Taken(waits, missing, memory, max(backends), "longest" if case.hold else "p99")


def wait(committed: float, arrived: float, writable: float) -> float:
    """Return seconds; an event that was there before a lock ended can arrive only after that."""
    begun = writable if committed < writable <= arrived else committed
    # The handler may run before the emitter has recorded the commit.
    return max(0.0, arrived - begun)


def make_outbox(url: str, took: Callable[[str, Event], None]) -> Outbox:
    """Return the application's outbox; an event says how long it keeps its handler busy."""
    made = Outbox(url)

    def add(name: str, **options: Any) -> None:
        @made.handler("order.*", name=name, **options)
        async def handle(event: Event) -> None:
            took(name, event)
            if takes := event.payload.get("takes"):
                await asyncio.sleep(takes)

    # The relay looks for suspects every tenth of a lease.
    for name in (HEALTHY, *SLOW):
        add(name, lease="10s", timeout="5s")
    add(ORDERED, ordered=True, concurrency=50)
    # The relay extends its leases while the row is locked.
    add(LOCKED, lease="6s", timeout="5s")
    add(LARGE)
    return made


def ignore(name: str, event: Event) -> None:
    """Take an event in a process that only emits."""


async def deliver(
    url: str, expected: Mapping[Watch, int], seconds: float, tell: Callable[[], None]
) -> tuple[dict[Watch, dict[int, float]], float, float]:
    """Run a relay until all expected events came; return their times, the peak memory and its time."""
    arrivals: dict[Watch, dict[int, float]] = defaultdict(dict)
    complete = asyncio.Event()

    def note(name: str, event: Event) -> None:
        watch = (name, event.aggregate_type)
        arrivals[watch].setdefault(int(event.aggregate_id), time.monotonic())
        if all(len(arrivals[watch]) >= count for watch, count in expected.items()):
            complete.set()

    async with make_outbox(url, note).relay(patience=1):
        tell()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await complete.wait()
        ended = time.monotonic()
    return {watch: arrivals[watch] for watch in expected}, ours.peak_memory(), ended


async def emit(url: str, count: int, tell: Callable[[], None]) -> list[float]:
    """Emit to both healthy destinations at a steady rate; return the time of each commit.

    Events that a lock held up are not emitted later.
    """
    os.environ["PGAPPNAME"] = OUR_NAME
    return await asyncio.to_thread(_emit, url, count, tell)


def _emit(url: str, count: int, tell: Callable[[], None]) -> list[float]:
    made, commits = make_outbox(url, ignore), []
    engine = engine_of(url)
    with engine.connect():
        tell()
    for n in range(count):
        with Session(engine) as session, session.begin():
            made.emit(session, STEADY, n, "order.paid", PAYLOAD, destinations=[HEALTHY, ORDERED])
        commits.append(time.monotonic())
        time.sleep(1 / RATE)
    engine.dispose()
    return commits


def engine_of(url: str) -> sa.Engine:
    """Return an engine with connections that do not count as the relay's."""
    made = sa.make_url(url).set(drivername="postgresql+psycopg")
    return sa.create_engine(made, connect_args={"application_name": OUR_NAME})


def emit_all(url: str, calls: Sequence[Call]) -> None:
    """Emit events in one transaction and wake the relay."""
    made, engine = make_outbox(url, ignore), engine_of(url)
    with engine.begin() as connection:
        made.emit_many(connection, calls)
    engine.dispose()
    run(url, "NOTIFY relaybox")


def suspects_of(own: int, slow: int) -> Callable[[str], None]:
    """Return a function that plants suspects of the healthy destination and, 2 s each, of the slow ones."""

    def plant(url: str) -> None:
        calls = [suspect(n, HEALTHY, 0.0) for n in range(own)]
        calls += [suspect(n, name, 2.0) for n in range(slow) for name in SLOW]
        emit_all(url, calls)
        run(url, SUSPECTS)

    return plant


def suspect(n: int, destination: str, takes: float) -> Call:
    """Return an event that will become a suspect."""
    return Call(SUSPECT, n, "order.paid", {"takes": takes}, destinations=[destination])


def lock_row(seconds: float) -> Callable[[str], float]:
    """Return a function that locks, from another session, a row that is being delivered."""

    def disturb(url: str) -> float:
        time.sleep(MOMENT)
        slow = [Call(STEADY, n, "order.paid", {"takes": 4.0}, destinations=[LOCKED]) for n in range(20)]
        emit_all(url, slow)
        with psycopg.connect(url, application_name=OUR_NAME) as stranger:
            wait_for(lambda: stranger.execute(LOCK_ROW).fetchone(), "a row in flight", PATIENCE)
            time.sleep(seconds)
        return 0.0

    return disturb


def lock_table(seconds: float) -> Callable[[str], float]:
    """Return a function that locks, from another session, the table against all writes."""

    def disturb(url: str) -> float:
        time.sleep(MOMENT)
        with psycopg.connect(url, application_name=OUR_NAME) as stranger:
            stranger.execute("LOCK TABLE outbox_event IN SHARE MODE")
            time.sleep(seconds)
        return time.monotonic()

    return disturb


def hot_keys(keys: int, each: int) -> Callable[[str], float]:
    """Return a function that emits slow events of a few keys of the ordered destination."""

    def disturb(url: str) -> float:
        time.sleep(MOMENT)
        for key in range(keys):
            slow = Call(HOT, key, "order.paid", {"takes": 0.25}, destinations=[ORDERED])
            emit_all(url, [slow] * each)
        return 0.0

    return disturb


def large_payloads(small: int, large: int) -> Callable[[str], float]:
    """Return a function that inserts small, quick events, and behind them large ones."""

    def disturb(url: str) -> float:
        time.sleep(MOMENT)
        insert(url, small, destinations=[LARGE])
        insert(url, large, destinations=[LARGE], first=small, payload={"takes": 0.05, "note": "x" * 930_000})
        run(url, "NOTIFY relaybox")
        return 0.0

    return disturb


@contextmanager
def counted_backends(url: str) -> Iterator[list[int]]:
    """Count the connections of the relay until the end; return one figure per look."""
    found, stop = [0], threading.Event()

    def count() -> None:
        with psycopg.connect(url, autocommit=True, application_name=OUR_NAME) as connection:
            while not stop.wait(0.25):
                [backends] = connection.execute(BACKENDS, {"ours": OUR_NAME}).fetchone() or [0]
                found.append(backends)

    counting = threading.Thread(target=count)
    counting.start()
    try:
        yield found
    finally:
        stop.set()
        counting.join()
