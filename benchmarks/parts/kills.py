"""Measure how soon everything is delivered after the last of many SIGKILLs.

Three relays deliver bursts of events of ordered keys. Soon after each sixth burst one of them is killed and
another one started. Events committed before the last kill have to be delivered within a lease and one second
of it. No event may be missing, and the first deliveries of each key have to be in order.
"""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
import uvloop
from sqlalchemy.orm import Session

from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample
from relaybox import Call, Event, Outbox
from tests.databases import engine
from tests.integration.shop import MEMBERSHIP, SOON
from tests.servers import fresh, mariadb
from tests.waiting import await_for

RELAYS, KEYS, LEASE = 3, 100, 2.0
BURST = (10, 80)
"""Events per transaction."""
BETWEEN, BEFORE_KILL = (0.05, 0.2), (0.0, 0.1)
"""Seconds after a burst: until the next one, and until a relay is killed."""
TAKES = 0.005
"""Seconds for which a handler is busy. With ten times as many, the events that gather behind one key while
its relays are killed alone take longer than the bar: 65 of them, 3.3 s."""
LATEST = 90.0
"""Seconds after the last kill at which undelivered events count as missing."""
WARM = (
    "benchmarks.parts.kills",
    "relaybox.relay.relay",
    "relaybox.database.pools.postgresql",
    "relaybox.database.pools.mysql",
)


class Number(NamedTuple):
    """An event: its key, and its number within the key."""

    key: int
    n: int


@dataclass(frozen=True, slots=True)
class Killed:
    """The result of one run; ``last`` is in seconds after the last kill."""

    events: int
    last: float
    missing: int
    out_of_order: int
    repeated: int


async def measure(server_url: str, options: Options) -> Facts:
    """Measure the seconds by database."""
    findings, lines = Findings(), []
    runs, kills = options.size(5, 1), options.size(50, 5)
    for name, server in {
        "PostgreSQL": nullcontext(server_url),
        "MariaDB": mariadb.server(durable=True),
    }.items():
        with server as url:
            found = [await run(url, seed, kills) for seed in range(runs)]
        last = Sample([killed.last for killed in found])
        findings.figure(f"{name}, s", last)
        lines += [[f"{name}, seed {seed}", *_cells(killed)] for seed, killed in enumerate(found)]
        latest = Sample([max(last.values)])
        findings.at_most(f"{kills} kills, {name}: the last delivery of {runs} runs", LEASE + 1, "s", latest)
        wrong = sum(killed.missing + killed.out_of_order for killed in found)
        findings.below(f"{kills} kills, {name}: missing or out of order", 1, "events", wrong)
    columns = ["", "last delivery, s", "events", "missing", "out of order", "repeated"]
    findings.table(f"after the last of {kills} kills, lease {LEASE:g} s", columns, lines)
    return findings.facts(kills=kills, lease=LEASE)


def _cells(killed: Killed) -> list[str]:
    counts = (killed.events, killed.missing, killed.out_of_order, killed.repeated)
    return [f"{killed.last:.2f}", *(f"{count:,}" for count in counts)]


async def run(server_url: str, seed: int, kills: int) -> Killed:
    """Kill relays on a database of its own, and wait until everything is delivered."""
    luck = random.Random(f"{seed} kills")
    with fresh.migrated(server_url) as url, tempfile.TemporaryDirectory() as directory:
        record = Path(directory) / "record"
        record.touch()
        with Fleet(url, record) as fleet, Emitter(url, luck) as emitter:
            for _ in range(kills):
                for pause in (*[BETWEEN] * 5, BEFORE_KILL):
                    await asyncio.to_thread(emitter.emit)
                    await asyncio.sleep(luck.uniform(*pause))
                killed_at = fleet.kill(luck)
            commits, deadline = emitter.commits, time.monotonic() + LATEST

            def ended() -> bool:
                return set(commits) <= {number for number, _ in read(record)} or time.monotonic() > deadline

            await await_for(ended, "the deadline", 2 * LATEST)
        return judge(commits, read(record), killed_at)


def judge(
    commits: Mapping[Number, float], deliveries: Sequence[tuple[Number, float]], killed_at: float
) -> Killed:
    """Compare the committed events with the delivered ones; missing ones count as delivered at the end."""
    first: dict[Number, float] = {}
    newest: dict[int, int] = defaultdict(lambda: -1)
    out_of_order = 0
    for number, at in deliveries:
        if number not in first:
            first[number] = at
            out_of_order += number.n != newest[number.key] + 1
            newest[number.key] = number.n
    before = [number for number, at in commits.items() if at <= killed_at]
    last = max(first.get(number, killed_at + LATEST) for number in before)
    missing = len(commits.keys() - first.keys())
    return Killed(len(commits), last - killed_at, missing, out_of_order, len(deliveries) - len(first))


def read(record: Path) -> list[tuple[Number, float]]:
    """Return every delivery with its time, in order of arrival."""
    # An incomplete line is read again at the next look.
    whole = record.read_text().rpartition("\n")[0]
    lines = [line.split() for line in whole.splitlines()]
    return [(Number(int(key), int(n)), float(at)) for key, n, at in lines]


def make_outbox(url: str, record: int | None = None) -> Outbox:
    """Return the application's outbox; the handler writes a line that survives the death of its process."""
    made = Outbox(url)

    @made.handler("order.*", name="orders", ordered=True, lease=LEASE, timeout=LEASE / 2, max_attempts=1_000)
    async def handle(event: Event) -> None:
        if record is not None:
            line = f"{event.aggregate_id} {event.payload['n']} {time.monotonic()}\n"
            os.write(record, line.encode())
        await asyncio.sleep(TAKES)

    return made


def deliver(url: str, record: Path) -> None:
    """Run a relay until it is killed; it joins the others quickly, or most would die before that."""
    # It also ends if its parent was killed.
    faulthandler.dump_traceback_later(10 * LATEST, exit=True)
    MEMBERSHIP["interval"] = SOON
    file = os.open(record, os.O_WRONLY | os.O_APPEND)
    uvloop.run(make_outbox(url, file).relay().run())


class Fleet:
    """The relays, each a process forked from a warm one: a start takes no longer than a connection."""

    def __init__(self, url: str, record: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(WARM))
        self._work = (url, record)
        self._relays: list[Any] = []

    def __enter__(self) -> Fleet:
        for _ in range(RELAYS):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for relay in self._relays:
            relay.kill()
            relay.join()

    def _start(self) -> None:
        relay = self._context.Process(target=deliver, args=self._work, daemon=True)
        relay.start()
        self._relays.append(relay)

    def kill(self, luck: random.Random) -> float:
        """Kill one except the youngest, which may not have begun, and start another; return the time."""
        relay = self._relays.pop(luck.randrange(RELAYS - 1))
        relay.kill()
        relay.join()
        at = time.monotonic()
        self._start()
        return at


class Emitter:
    """Emit bursts, and number the events of each key."""

    def __init__(self, url: str, luck: random.Random) -> None:
        self._outbox = make_outbox(url)
        self._engine = engine(url, poolclass=sa.StaticPool)
        self._luck = luck
        self._counts = [0] * KEYS
        self.commits: dict[Number, float] = {}

    def __enter__(self) -> Emitter:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.dispose()

    def emit(self) -> None:
        """Commit one burst."""
        burst = [self._next() for _ in range(self._luck.randint(*BURST))]
        calls = [Call("Order", number.key, "order.paid", {"n": number.n}) for number in burst]
        with Session(self._engine) as session, session.begin():
            self._outbox.emit_many(session, calls)
        self.commits.update(dict.fromkeys(burst, time.monotonic()))

    def _next(self) -> Number:
        key = self._luck.randrange(KEYS)
        self._counts[key] += 1
        return Number(key, self._counts[key] - 1)
