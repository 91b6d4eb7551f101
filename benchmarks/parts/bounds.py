"""Measure bounds of time that no test asserts, because a busy machine breaks them.

``make proof`` measures how soon deliveries go on after a kill of the database or of a relay.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time

import sqlalchemy as sa

from benchmarks.findings import Facts, Findings, Options, percentile
from benchmarks.harness import Sample, outbox, run
from relaybox import Call, Event, Outbox
from relaybox.operate.metrics import exposition
from tests.waiting import await_for

DESTINATIONS = 50
EVERY = 0.03
RATE = 100
ALLOW = "ALTER DATABASE {} ALLOW_CONNECTIONS {}"
END = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %(name)s"


async def measure(server_url: str, options: Options) -> Facts:
    """Measure each of them, with its bar."""
    findings = Findings()
    helps = Sample([_help() for _ in range(options.size(9, 3))])
    findings.at_most("relaybox --help", 0.3, "s of CPU", helps)
    with outbox(server_url) as (url, _):
        crowd = [await _crowd(url, options.size(200, 20)) for _ in range(options.rounds)]
    healthy, hanging = (Sample(values) for values in zip(*crowd, strict=True))
    crowded = f"p99 of {DESTINATIONS} destinations while one hangs"
    findings.at_most(crowded, 1.5, "× all healthy", hanging.over(healthy))
    with outbox(server_url) as (url, _):
        busiest = Sample([await _busiest_second(url) for _ in range(options.rounds)])
    findings.at_most(f"busiest second of {RATE}/s, two relays", 1.25 * RATE, "events", busiest, digits=0)
    with outbox(server_url) as (url, _):
        scrapes = await _scrapes(server_url, url, options.size(20, 5))
    findings.below("the slowest scrape while the database is gone", 100, "ms", max(scrapes.values))
    found = {"--help, s": helps, "p99, all healthy, ms": healthy, "p99, one hangs, ms": hanging}
    found |= {"busiest second, events": busiest, "scrape without a database, ms": scrapes}
    for name, sample in found.items():
        findings.figure(name, sample)
    findings.table("bounds", ["", "measured"], [[name, one.show(2)] for name, one in found.items()])
    return findings.facts()


def _help() -> float:
    """Return the seconds of CPU."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "relaybox", "--help"], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def _crowd(url: str, events: int) -> tuple[float, float]:
    """Return the p99 from commit to function in ms, with all well and while the first destination hangs."""
    made, go_on = Outbox(url), asyncio.Event()
    took: list[float] = []

    def add(number: int) -> None:
        @made.handler("*", name=f"d{number}", timeout="10m", lease="10m")
        async def handle(event: Event) -> None:
            if number:
                took.append(1000 * (time.monotonic() - event.payload["at"]))
            else:
                await go_on.wait()

    async def p99(connection: sa.Connection) -> float:
        took.clear()
        for n in range(events):
            name = f"d{n % DESTINATIONS}"
            at = {"at": time.monotonic()}
            made.emit(connection, "Order", n, "order.paid", at, destinations=[name])
            connection.commit()
            made.wake(name)
            await asyncio.sleep(EVERY)
        healthy = sum(n % DESTINATIONS > 0 for n in range(events))
        await await_for(lambda: len(took) >= healthy)
        return percentile(took, 0.99)

    for number in range(DESTINATIONS):
        add(number)
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    async with made.relay(patience=1):
        with engine.connect() as connection:
            await p99(connection)
            go_on.set()
            healthy = await p99(connection)
            go_on.clear()
            hanging = await p99(connection)
        go_on.set()
    engine.dispose()
    return healthy, hanging


async def _busiest_second(url: str) -> float:
    """Return the most events in any second, of two relays with a backlog."""
    made = Outbox(url)
    taken: list[float] = []

    @made.handler("*", name="limited", rate_limit=RATE)
    async def handle(event: Event) -> None:
        taken.append(time.monotonic())

    run(url, "TRUNCATE outbox_event")
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        made.emit_many(connection, [Call("Order", n, "order.paid", {}) for n in range(4 * RATE)])
    engine.dispose()
    async with made.relay(), made.relay():
        await await_for(lambda: len(taken) >= 4 * RATE)
    return max(sum(at <= other < at + 1 for other in taken) for at in taken)


async def _scrapes(server_url: str, url: str, count: int) -> Sample:
    """Return the milliseconds of each scrape after the database went away."""
    name = sa.make_url(url).database or ""
    async with Outbox(url).admin() as admin:
        await exposition(admin)
        run(server_url, ALLOW.format(name, "false"))
        run(server_url, END, {"name": name})
        times, body = [], b""
        while len(times) < count or b"scrape_errors_total 0.0" in body:
            began = time.perf_counter()
            body, _ = await exposition(admin)
            times.append(1000 * (time.perf_counter() - began))
            await asyncio.sleep(0.5)
    run(server_url, ALLOW.format(name, "true"))
    return Sample(times)
