"""Measure Django in a process of its own, because its settings apply to a whole process.

``benchmarks.django`` has the measurements.
"""

from __future__ import annotations

import asyncio

from benchmarks import django
from benchmarks.findings import Facts, Findings, Options
from benchmarks.process import apart

LIMIT = 600.0
"""Seconds that it may take."""
ROWS = 200_000
"""Rows behind the admin's list; ``python -m benchmarks.django`` has ten times as many."""


async def measure(server_url: str, options: Options) -> Facts:
    """Measure the requirements; it starts servers of its own."""
    events, rows = options.size(4_000, 500), options.size(ROWS, 2_000)
    found = await apart(_run, events, rows, seconds=LIMIT)
    findings = Findings()
    columns = ["requirement", "bar", "measured", "met"]
    findings.table(f"Django, {events:,} events, {rows:,} rows behind the admin's list", columns, found)
    for requirement, bar, measured, met in found:
        findings.judge(f"Django: {requirement}", bar, measured, met == "yes")
    return findings.facts()


async def _run(events: int, rows: int) -> list[list[str]]:
    # Django refuses to work in a thread that runs an event loop.
    return await asyncio.to_thread(django.main, django.PARTS, "18", events, rows)
