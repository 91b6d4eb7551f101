"""Measure a steady load: 1,000 events per second for five minutes, each in a transaction of its own."""

from __future__ import annotations

import asyncio
import time

import psycopg

from benchmarks import ours
from benchmarks.findings import Facts, Findings, Options, percentile
from benchmarks.harness import outbox

RATE = 1_000
LOOK = 0.2
"""Seconds between two looks at the backlog."""
BACKLOG = "SELECT count(*) FROM outbox_event WHERE status = 'pending'"


async def measure(server_url: str, options: Options) -> Facts:
    """Measure the backlog and the latency."""
    seconds = options.size(300, 5)
    with outbox(server_url) as (url, _):
        watching = asyncio.create_task(_watch(url))
        try:
            waits = await ours.sessions().waits(url, RATE, seconds)
        finally:
            watching.cancel()
        backlog = await watching
    milliseconds = [1000 * wait for wait in waits]
    findings = Findings()
    lines = []
    for what, values in (("backlog, rows", backlog), ("latency, ms", milliseconds)):
        figures = [percentile(values, share) for share in (0.5, 0.99, 1.0)]
        lines.append([what, *(f"{figure:,.1f}" for figure in figures)])
        findings.figures[what] = dict(zip(("p50", "p99", "longest"), figures, strict=True))
    findings.table(f"{RATE:,}/s for {seconds} s", ["", "p50", "p99", "most"], lines)
    bar = f"1,000/s for {seconds} s"
    findings.below(f"{bar}: backlog p99", 100, "rows", percentile(backlog, 0.99))
    findings.below(f"{bar}: latency p99", 100, "ms", percentile(milliseconds, 0.99), digits=1)
    return findings.facts(seconds=seconds)


async def _watch(url: str) -> list[float]:
    """Record the backlog at every look until cancelled; the time before the first event does not count."""
    seen: list[float] = []
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        try:
            while True:
                rows = (await (await connection.execute(BACKLOG)).fetchone())[0]
                if rows or seen:
                    seen.append(float(rows))
                await asyncio.sleep(LOOK - time.monotonic() % LOOK)
        except asyncio.CancelledError:
            return seen or [0.0]
