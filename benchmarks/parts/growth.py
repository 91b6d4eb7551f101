"""Measure what a long run leaves in the table, and whether it makes the relay slower.

Events are inserted while a relay delivers them, fast enough that it never waits and never has a long backlog.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks import ours
from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, ask, insert, outbox
from benchmarks.process import PATIENCE, apart

CHUNK = 2_000
BACKLOG = 10_000
"""Events that wait for the relay."""
SLOW = 1_000.0
"""Events per second; a relay below this rate is given up."""
LOOK = 0.02
POINTS = 100
SIZES = """
SELECT pg_table_size('outbox_event'), pg_indexes_size('outbox_event'), n_dead_tup, n_live_tup,
       autovacuum_count, n_tup_hot_upd / greatest(n_tup_upd, 1)::float
FROM pg_stat_user_tables WHERE relname = 'outbox_event'"""


async def measure(server_url: str, options: Options) -> Facts:
    """Measure bytes and dead tuples per kept event, and the rate of the first and the last tenth."""
    rows = options.size(1_000_000, 10 * options.rows)
    with outbox(server_url) as (url, _):
        points = await _run(url, rows)
        # The statistics collector gets a change up to a second later.
        await asyncio.sleep(1.5)
        table, indexes, dead, live, vacuums, hot = ask(url, SIZES)
    tenths = [_rate(points, rows * part / 10, rows * (part + 1) / 10) for part in range(10)]
    findings = Findings()
    lines = [
        ["table, bytes a kept event", f"{table / rows:,.0f}"],
        ["indexes, bytes a kept event", f"{indexes / rows:,.0f}"],
        ["live rows", f"{live:,}"],
        ["dead tuples", f"{dead:,}"],
        ["rounds of autovacuum", f"{vacuums}"],
        ["updates that were HOT, %", f"{100 * hot:.0f}"],
        ["events/s of the first tenth", f"{tenths[0]:,.0f}"],
        ["events/s of the last tenth", f"{tenths[-1]:,.0f}"],
        ["last / first", f"{tenths[-1] / tenths[0]:.2f}"],
    ]
    findings.table(f"after {rows:,} events were emitted and drained at the same time", ["", ""], lines)
    findings.figures |= {
        "table_bytes": table / rows,
        "index_bytes": indexes / rows,
        "dead_tuples": dead,
        "autovacuums": vacuums,
        "hot_share": hot,
        "tenths": tenths,
    }
    decay = Sample([tenths[-1] / tenths[0]])
    bar, wanted = f"no decay of the rate over {rows:,} events", "× the first tenth, in the last"
    limit = f"the emitters beside it; autovacuum came {vacuums} times and left {dead:,} dead tuples"
    findings.at_least(bar, 0.9, wanted, decay, limit=limit)
    return findings.facts(rows=rows, points=_thin(points))


async def _run(url: str, rows: int) -> list[tuple[float, int]]:
    """Return when how many events had been delivered."""
    board = ours.Board.of(1)
    points: list[tuple[float, int]] = []
    begin = time.monotonic()
    async with asyncio.TaskGroup() as group:
        relaying = apart(ours.deliver, url, ours.Plan(), 0, board, rows, seconds=PATIENCE + rows / SLOW)
        relay = group.create_task(relaying)
        group.create_task(_emit(url, rows, board.settled))
        while not relay.done():
            points.append((time.monotonic() - begin, board.settled[0]))
            await asyncio.wait([relay], timeout=LOOK * 5)
    points.append((time.monotonic() - begin, board.settled[0]))
    first = next(at for at, (_, count) in enumerate(points) if count)
    return points[max(0, first - 1) :]


async def _emit(url: str, rows: int, settled: Any) -> None:
    written = 0
    while written < rows:
        if written - settled[0] > BACKLOG:
            await asyncio.sleep(LOOK)
            continue
        chunk = min(CHUNK, rows - written)
        await asyncio.to_thread(insert, url, chunk, first=written)
        written += chunk


def _thin(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return about a hundred of them, with the first and the last."""
    step = max(1, len(points) // POINTS)
    return [*points[:-1:step], points[-1]]


def _rate(points: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Return events per second between two counts."""
    return (end - begin) / (_moment(points, end) - _moment(points, begin))


def _moment(points: Sequence[tuple[float, int]], count: float) -> float:
    for (before, less), (after, more) in pairwise(points):
        if less < more and count <= more:
            return before + (after - before) * (count - less) / (more - less)
    return points[-1][0]
