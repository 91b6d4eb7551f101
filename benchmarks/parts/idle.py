"""Measure an idle relay: its CPU and its load on the database while nothing is due.

Queries are counted on the wire. A claim, like any operation of the store, is sent in one round trip.
Statements are all that travel in it, including those that begin, pin the plan and commit.
"""

from __future__ import annotations

import asyncio
import time

import sqlalchemy as sa

from benchmarks import ours
from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, outbox
from benchmarks.process import PATIENCE, apart, begin
from relaybox import Event
from tests.integration.test_costs import Wire

DESTINATIONS = (1, 5)
SETTLING = 3.0
"""Seconds until a new relay is idle."""


async def measure(server_url: str, options: Options) -> Facts:
    """Measure per cent of a core, and queries per second for each destination."""
    seconds = options.size(20, 4)
    findings = Findings()
    lines = []
    for destinations in DESTINATIONS:
        with outbox(server_url) as (url, _):
            core, statements, trips = await _watch(url, destinations, seconds)
        title = f"{destinations} destination{'s' if destinations > 1 else ''}"
        a_destination = trips / destinations
        lines.append([title, f"{core:.2f}", f"{a_destination:.2f}", f"{statements / destinations:.2f}"])
        figures = {"core_percent": core, "round_trips": trips, "statements": statements}
        findings.figures[title] = figures
        findings.at_most(f"idle relay, {title}", 1, "% of a core", Sample([core]))
        findings.at_most(f"idle relay, {title}", 2, "queries a second a destination", Sample([a_destination]))
    columns = ["", "% of a core", "round trips/s a destination", "statements/s a destination"]
    findings.table(f"an idle relay, for {seconds} s", columns, lines)
    return findings.facts(seconds=seconds)


async def _watch(url: str, destinations: int, seconds: float) -> tuple[float, float, float]:
    wire = Wire(sa.make_url(url))
    async with wire.listening() as through:
        limit = PATIENCE + SETTLING + seconds
        relay = asyncio.create_task(apart(idle, through, destinations, seconds, seconds=limit))
        looks = []
        while not relay.done():
            looks.append((time.monotonic(), wire.total))
            await asyncio.wait([relay], timeout=0.05)
        began, ended, cpu = await relay
    first = max(look for look in looks if look[0] <= began)[1]
    last = max(look for look in looks if look[0] <= ended)[1]
    spent = ended - began
    return (
        100 * cpu / spent,
        (last.statements - first.statements) / spent,
        (last.round_trips - first.round_trips) / spent,
    )


async def idle(url: str, destinations: int, seconds: float) -> tuple[float, float, float]:
    """Run without work; return the start and end of the measurement, and the CPU it took."""

    async def handle(event: Event) -> None:
        raise RuntimeError("there is nothing to deliver")

    async with ours.Plan(destinations=destinations).outbox(url, handle).relay():
        await asyncio.sleep(SETTLING)
        began, used = begin(), time.process_time()
        await asyncio.sleep(seconds)
        return began, time.monotonic(), time.process_time() - used
