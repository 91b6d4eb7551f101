"""Measure the most memory that a relay's process holds, with a long backlog and with large rows."""

from __future__ import annotations

from benchmarks import ours
from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import PAYLOAD, Sample, insert, outbox, settle_down
from benchmarks.process import PATIENCE, apart, begin
from relaybox import Event

MEBIBYTE = {"note": "x" * (2**20 - 13)}
"""1 MiB as JSON."""


async def measure(server_url: str, options: Options) -> Facts:
    """Measure the megabytes."""
    seconds = options.size(20, 3)
    cases = {
        "rows in the backlog": (options.size(1_000_000, options.rows), PAYLOAD, 150),
        "rows of 1 MiB": (options.size(500, 50), MEBIBYTE, 300),
    }
    findings = Findings()
    lines = []
    for name, (rows, payload, most) in cases.items():
        with outbox(server_url) as (url, _):
            insert(url, rows, keys=ours.KEYS, payload=payload)
            settle_down(url)
            seen, before, peak = await apart(drain_for, url, seconds, seconds=2 * PATIENCE + seconds)
        if not seen:
            raise RuntimeError(f"{name}: nothing was delivered within {seconds} s")
        lines.append([f"{rows:,} {name}", f"{before:,.0f}", f"{peak:,.0f}", f"{seen:,}"])
        findings.figures[name] = {"rows": rows, "before_mb": before, "peak_mb": peak, "delivered": seen}
        limit = f"Python and its modules, {before:,.0f} MB, and what is claimed ahead"
        findings.at_most(f"memory, {rows:,} {name}", most, "MB", Sample([peak]), digits=0, limit=limit)
    columns = ["", "before the first claim", "peak", "delivered meanwhile"]
    findings.table("resident memory of a relay, MB", columns, lines)
    return findings.facts(seconds=seconds)


async def drain_for(url: str, seconds: float) -> tuple[int, float, float]:
    """Drain for this long; return the number of events, the megabytes before, and the maximum."""
    seen = 0

    async def handle(event: Event) -> None:
        nonlocal seen
        _ = event.payload
        seen += 1

    relay = ours.Plan(ordered=True).outbox(url, handle).relay()
    begin()
    before = ours.peak_memory()
    await relay.drain(seconds)
    return seen, before, ours.peak_memory()
