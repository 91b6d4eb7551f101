"""Relaybox as it is measured: relays in processes of their own, and an application that emits."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.harness import PAYLOAD, ask, insert, run, settle_down
from benchmarks.peers.base import PATIENCE, SLOWEST, Arrivals, MeasuredPeer, apart, check, lanes
from relaybox import Event, Outbox
from relaybox.observe import Observer
from relaybox.parts import open_relay
from relaybox.store import Claim, Settlement, Want
from relaybox.stores.postgres import open_store
from relaybox.stores.sql import SqlStore
from relaybox.wakes.open import open_bell

KEYS = 1_000
LOOK = 0.005
"""Seconds after which a relay looks again whether everything is delivered."""
PAUSE = """
INSERT INTO outbox_destination (name, paused_at, paused_by) VALUES ('runner', clock_timestamp(), 'bench')
ON CONFLICT (name) DO UPDATE SET paused_at = excluded.paused_at, paused_by = excluded.paused_by"""
RESUME = "UPDATE outbox_destination SET paused_at = NULL, paused_by = NULL WHERE name = 'runner'"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is drained, and by how many relays."""

    ordered: bool = False
    hot: int = 0
    destinations: int = 1
    keep: bool = True
    relays: int = 1

    @property
    def names(self) -> list[str]:
        """Those of the destinations."""
        return ["runner", *(f"runner {number}" for number in range(2, self.destinations + 1))]

    def outbox(self, url: str, handle: Callable[[Event], Awaitable[None]], **settings: Any) -> Outbox:
        """An outbox with the default settings, all of whose destinations are one function."""
        outbox = Outbox(url, **settings)
        options = {} if self.keep else {"retention": 0}
        for name in self.names:
            outbox.handler("order.*", name=name, ordered=self.ordered, **options)(handle)
        return outbox


@dataclass(frozen=True, slots=True)
class Drained:
    """What one drain came to. A claim is in vain that gets nothing while another one still gets something.

    ``rate`` counts from where the relay begins, ``pace`` from the first claim; ``cpu`` is in microseconds an
    event, of all relays together.
    """

    rate: float
    pace: float
    cpu: float
    claims: int
    vain: int


@dataclass(frozen=True, slots=True)
class Board:
    """Shared memory: what each relay has claimed and settled, in numbers of claims and of deliveries."""

    claims: Any
    settled: Any

    @classmethod
    def of(cls, relays: int) -> Board:
        """With a place for each relay."""
        context = multiprocessing.get_context("spawn")
        return cls(context.Array("q", relays, lock=False), context.Array("q", relays, lock=False))


@dataclass(frozen=True, slots=True)
class _Run:
    begin: float
    end: float
    cpu: float
    seen: int
    claims: Sequence[tuple[float, int]]


async def drain(url: str, rows: int, plan: Plan) -> Drained:
    """Fill the table with ``rows`` rows and let the relays deliver them."""
    run(url, "TRUNCATE outbox_event")
    keys = KEYS if plan.ordered else 0
    insert(url, rows // plan.destinations, destinations=plan.names, keys=keys, hot=plan.hot)
    settle_down(url)
    board = Board.of(plan.relays)
    expected = rows // plan.destinations * plan.destinations
    limit = PATIENCE + rows / SLOWEST
    relays = [
        apart(deliver, url, plan, number, board, expected, seconds=limit) for number in range(plan.relays)
    ]
    if plan.relays > 1:
        run(url, PAUSE)
        relays.append(_let_go(url, board))
    runs: list[_Run] = (await asyncio.gather(*relays))[: plan.relays]
    done, left = ask(url, "SELECT count(*) FILTER (WHERE status = 'delivered'), count(*) FROM outbox_event")
    check(sum(one.seen for one in runs), done if plan.keep else expected - left, expected)
    claims = [claim for one in runs for claim in one.claims]
    first, last = (end(at for at, got in claims if got) for end in (min, max))
    begin, end = min(one.begin for one in runs), max(one.end for one in runs)
    between = [got for at, got in claims if first <= at <= last]
    cpu = 1e6 * sum(one.cpu for one in runs) / expected
    rate, pace = expected / (end - begin), expected / (end - first)
    return Drained(rate, pace, cpu, len(between), between.count(0))


async def _let_go(url: str, board: Board) -> None:
    """Relays that come together wait until they know of each other: that is not what is measured."""
    while not all(board.claims):  # noqa: ASYNC110
        await asyncio.sleep(LOOK)
    run(url, RESUME)
    run(url, "NOTIFY relaybox")


class _Counting(Observer):
    """Notes on the board what was settled, and when the last was."""

    def __init__(self, board: Board, number: int) -> None:
        self._board = board
        self._number = number
        self.last = 0.0

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        self._board.settled[self._number] += len(settlements) - len(lost)
        self.last = time.monotonic()


async def deliver(url: str, plan: Plan, number: int, board: Board, rows: int) -> _Run:
    """Run a relay until all relays together have settled ``rows``; it has that place on the board."""
    seen = 0

    async def handle(event: Event) -> None:
        nonlocal seen
        # Decoded on demand, so that it has to be asked for.
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
        observers=[counting],
        store=store,
    )
    # A peer's pool is open before its time begins, too.
    await store.now()
    begin, used = time.monotonic(), time.process_time()
    async with relay:
        # Other processes write into it as well, so that there is nothing to wait on.
        while sum(board.settled) < rows:  # noqa: ASYNC110
            await asyncio.sleep(LOOK)
    used = time.process_time() - used
    await store.close()
    return _Run(begin, counting.last, used, seen, claims)


def _note_claims(store: SqlStore, board: Board, number: int) -> list[tuple[float, int]]:
    """When each claim was made, and how much it got; grows."""
    claims: list[tuple[float, int]] = []
    original = store.claim

    async def claim(want: Want) -> Claim:
        at = time.monotonic()
        found = await original(want)
        claims.append((at, len(found.deliveries)))
        board.claims[number] += 1
        return found

    store.claim = claim
    return claims


@dataclass(frozen=True)
class Sessions:
    """Each event emitted through a SQLAlchemy session, whose commit wakes the relay; in a peer's shape."""

    def __str__(self) -> str:
        return "Session, commit hook"

    async def receive(self, url: str, count: int, ready: Callable[[], None]) -> dict[int, float]:
        """A relay with its default settings."""
        arrivals = Arrivals(count)

        async def handle(event: Event) -> None:
            arrivals.note(event.payload["n"])

        async with Plan().outbox(url, handle).relay():
            ready()
            await arrivals.complete.wait()
        return arrivals.times

    async def emit(self, url: str, rate: float, count: int) -> list[float]:
        """As a threaded server does it."""
        return await asyncio.to_thread(emit_by_sessions, url, rate, count)


def sessions() -> MeasuredPeer:
    """Ours, for a look at how long events wait."""
    return MeasuredPeer("relaybox", ordered=True, keeps=True, setups=[Sessions()])


def emit_by_sessions(url: str, rate: float, count: int) -> list[float]:
    """One transaction an event at a steady rate, in as many threads as a peer has connections."""
    size = lanes(rate)
    outbox = Plan().outbox(url, _nothing)
    engine = sa.create_engine(
        sa.make_url(url).set(drivername="postgresql+psycopg"), pool_size=size, max_overflow=0
    )
    commits = [0.0] * count
    opened = threading.Barrier(size)
    begin: list[float] = []

    def lane(first: int) -> None:
        with engine.connect():
            opened.wait(PATIENCE)
        begin.append(time.monotonic())
        for n in range(first, count, size):
            time.sleep(max(0.0, begin[0] + n / rate - time.monotonic()))
            with Session(engine) as session, session.begin():
                outbox.emit(session, "Order", n % KEYS, "order.paid", {"n": n, **PAYLOAD})
            commits[n] = time.monotonic()

    with ThreadPoolExecutor(size) as threads:
        for done in [threads.submit(lane, first) for first in range(size)]:
            done.result()
    engine.dispose()
    return commits


async def _nothing(event: Event) -> None:
    pass


def peak_memory() -> float:
    """The most megabytes that this process has held; unlike ru_maxrss, without those of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) / 1024
