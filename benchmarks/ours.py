"""Relaybox as it is measured: relays in separate processes, and an application that emits."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.harness import PAYLOAD, ask, insert, run, server_cpu, settle_down
from benchmarks.limiting import Busy
from benchmarks.peers.base import Arrivals, MeasuredPeer, check, lanes
from benchmarks.process import PATIENCE, SLOWEST, apart, begin
from relaybox import Event, Outbox
from relaybox.emit.wakes.open import open_bell
from relaybox.operate.open_relay import open_relay
from relaybox.relay.observer import Observer
from relaybox.stores.open import open_postgresql as open_store
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.store import Claim, Settlement, Want

KEYS = 1_000
LOOK = 0.005
"""Seconds until a relay checks again whether everything is delivered."""
PAUSE = """
INSERT INTO outbox_destination (name, paused_at, paused_by) VALUES ('runner', clock_timestamp(), 'bench')
ON CONFLICT (name) DO UPDATE SET paused_at = excluded.paused_at, paused_by = excluded.paused_by"""
RESUME = "UPDATE outbox_destination SET paused_at = NULL, paused_by = NULL WHERE name = 'runner'"


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows to drain, and the number of relays."""

    ordered: bool = False
    hot: int = 0
    destinations: int = 1
    keep: bool = True
    relays: int = 1
    contexts: int | None = None
    """Per cent of the trace contexts that are sampled, if events have one."""
    metrics: bool = False
    traces: bool = False

    @property
    def names(self) -> list[str]:
        """Return the names of the destinations."""
        return ["runner", *(f"runner {number}" for number in range(2, self.destinations + 1))]

    def outbox(self, url: str, handle: Callable[[Event], Awaitable[None]], **settings: Any) -> Outbox:
        """Return an outbox with default settings; one function is the sink of all destinations."""
        outbox = Outbox(url, **settings)
        options = {} if self.keep else {"retention": 0}
        for name in self.names:
            outbox.handler("order.*", name=name, ordered=self.ordered, **options)(handle)
        return outbox

    def observers(self) -> list[Observer]:
        """Return the observers to measure."""
        if self.traces:
            _trace()
        if not self.metrics:
            return []
        from relaybox.operate.metrics import MetricsObserver

        return [MetricsObserver()]


def _trace() -> None:
    """Export spans to nowhere."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Nowhere(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)


@dataclass(frozen=True, slots=True)
class Drained:
    """The result of one drain. A claim is empty if it gets nothing while another one still gets something.

    ``rate`` counts from the start of the relay, ``pace`` from the first claim. ``cpu`` is in microseconds per
    event, of all relays together, and ``server`` that of PostgreSQL.
    """

    rate: float
    pace: float
    cpu: float
    server: float
    claims: int
    vain: int

    @property
    def busy(self) -> Busy:
        """Return the load while events were delivered."""
        return Busy(self.pace * self.cpu / 1e4, self.pace * self.server / 1e4)


@dataclass(frozen=True, slots=True)
class Board:
    """Shared memory with each relay's claims and settles, as numbers of claims and of deliveries."""

    claims: Any
    settled: Any

    @classmethod
    def of(cls, relays: int) -> Board:
        """Make a board with a slot for each relay."""
        context = multiprocessing.get_context("spawn")
        return cls(context.Array("q", relays, lock=False), context.Array("q", relays, lock=False))


class _Claim(NamedTuple):
    """The time of a claim, its number of rows, and the CPU that the process had used before."""

    at: float
    got: int
    cpu: float


@dataclass(frozen=True, slots=True)
class _Run:
    began: float
    ended: float
    cpu: float
    seen: int
    claims: Sequence[_Claim]


async def drain(url: str, rows: int, plan: Plan) -> Drained:
    """Fill the table with ``rows`` rows and let the relays deliver them."""
    run(url, "TRUNCATE outbox_event")
    keys = KEYS if plan.ordered else 0
    events = rows // plan.destinations
    insert(url, events, destinations=plan.names, keys=keys, hot=plan.hot, traced=plan.contexts)
    settle_down(url)
    board = Board.of(plan.relays)
    expected = rows // plan.destinations * plan.destinations
    limit = PATIENCE + rows / SLOWEST
    relays = [
        apart(deliver, url, plan, number, board, expected, seconds=limit) for number in range(plan.relays)
    ]
    if plan.relays > 1:
        run(url, PAUSE)
    used, *runs = await asyncio.gather(_let_go(url, board, plan.relays > 1), *relays)
    used = server_cpu(url) - used
    done, left = ask(url, "SELECT count(*) FILTER (WHERE status = 'delivered'), count(*) FROM outbox_event")
    check(sum(one.seen for one in runs), done if plan.keep else expected - left, expected)
    claims = [claim for one in runs for claim in one.claims]
    first, last = (most(at for at, got, _ in claims if got) for most in (min, max))
    began, ended = min(one.began for one in runs), max(one.ended for one in runs)
    between = [got for at, got, _ in claims if first <= at <= last]
    return Drained(
        rate=expected / (ended - began),
        pace=expected / (ended - first),
        cpu=1e6 * sum(one.cpu for one in runs) / expected,
        server=1e6 * used / expected,
        claims=len(between),
        vain=between.count(0),
    )


async def _let_go(url: str, board: Board, together: bool) -> float:
    """Let relays that start together wait until they know of each other: this is not measured.

    Return the CPU that the server had used by then.
    """
    if not together:
        return server_cpu(url)
    while not all(board.claims):  # noqa: ASYNC110
        await asyncio.sleep(LOOK)
    used = server_cpu(url)
    run(url, RESUME)
    run(url, "NOTIFY relaybox")
    return used


class _Counting(Observer):
    """Records on the board the settled deliveries and the time of the last settle."""

    def __init__(self, board: Board, number: int) -> None:
        self._board = board
        self._number = number
        self.last = 0.0

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        self._board.settled[self._number] += len(settlements) - len(lost)
        self.last = time.monotonic()


async def deliver(url: str, plan: Plan, number: int, board: Board, rows: int) -> _Run:
    """Run a relay until all relays together have settled ``rows``; it has that slot on the board."""
    seen = 0

    async def handle(event: Event) -> None:
        nonlocal seen
        # The payload is decoded on demand, so read it.
        _ = event.payload
        seen += 1

    outbox = plan.outbox(url, handle)
    store = open_store(url, outbox.tables)
    claims = _note_claims(store, board, number)
    counting = _Counting(board, number)
    relay = open_relay(
        outbox.settings,
        outbox.tables,
        outbox.handlers,
        open_bell(outbox.settings),
        patience=30.0,
        observers=[counting, *plan.observers()],
        store=store,
    )
    # A peer's pool is open before its measurement begins, too.
    await store.now()
    began = begin()
    async with relay:
        # Other processes also write into it, so it offers nothing to wait for.
        while sum(board.settled) < rows:  # noqa: ASYNC110
            await asyncio.sleep(LOOK)
        used = time.process_time()
    await store.close()
    before = next((claim.cpu for claim in claims if claim.got), used)
    return _Run(began, counting.last, used - before, seen, claims)


def _note_claims(store: SqlStore, board: Board, number: int) -> list[_Claim]:
    """Record every claim in a growing list."""
    claims: list[_Claim] = []
    original = store.claim

    async def claim(want: Want) -> Claim:
        at, used = time.monotonic(), time.process_time()
        found = await original(want)
        claims.append(_Claim(at, len(found.deliveries), used))
        board.claims[number] += 1
        return found

    store.claim = claim
    return claims


@dataclass(frozen=True)
class Sessions:
    """Emit each event through a SQLAlchemy session; its commit wakes the relay. Looks like a peer."""

    def __str__(self) -> str:
        return "Session, commit hook"

    async def receive(self, url: str, count: int, ready: Callable[[], None]) -> dict[int, float]:
        """Run a relay with its default settings."""
        arrivals = Arrivals(count)

        async def handle(event: Event) -> None:
            arrivals.note(event.payload["n"])

        async with Plan().outbox(url, handle).relay():
            ready()
            await arrivals.complete.wait()
        return arrivals.times

    async def emit(self, url: str, rate: float, count: int) -> list[float]:
        """Emit as a threaded server does."""
        return await asyncio.to_thread(emit_by_sessions, url, rate, count)


def sessions() -> MeasuredPeer:
    """Return our peer, to measure how long events wait."""
    return MeasuredPeer("relaybox", ordered=True, keeps=True, setups=[Sessions()])


def emit_by_sessions(url: str, rate: float, count: int) -> list[float]:
    """Emit one transaction per event at a steady rate, in as many threads as a peer has connections."""
    size = lanes(rate)
    outbox = Plan().outbox(url, _nothing)
    engine = sa.create_engine(
        sa.make_url(url).set(drivername="postgresql+psycopg"), pool_size=size, max_overflow=0
    )
    commits = [0.0] * count
    began: list[float] = []
    opened = threading.Barrier(size, lambda: began.append(begin()))
    # Before the hook that wakes the relay: its time is part of the wait.
    sa.event.listen(Session, "after_commit", _note_commit, insert=True)

    def lane(first: int) -> None:
        with engine.connect():
            opened.wait(PATIENCE)
        for n in range(first, count, size):
            time.sleep(max(0.0, began[0] + n / rate - time.monotonic()))
            with Session(engine) as session, session.begin():
                outbox.emit(session, "Order", n % KEYS, "order.paid", {"n": n, **PAYLOAD})
            commits[n] = session.info["committed"]

    with ThreadPoolExecutor(size) as threads:
        for done in [threads.submit(lane, first) for first in range(size)]:
            done.result()
    engine.dispose()
    return commits


def _note_commit(session: Session) -> None:
    session.info["committed"] = time.monotonic()


async def _nothing(event: Event) -> None:
    pass


def peak_memory() -> float:
    """Return the most megabytes that this process held; ru_maxrss would include those of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) / 1024
