"""Measure the store against its own statements in a bare driver loop, and the cost of ordered claims.

Two requirements: claim and settle through the store reach 0.85 of the bare loop. An ordered claim of 1,000
rows costs about the same for every content of the table, and at most three times the plain case.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.drivers import DESTINATION, Loop, PsycopgLoop, drain
from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, Take, fill, interleave, outbox, run
from relaybox.core.outcome import Delivered
from relaybox.database.schema import Tables
from relaybox.stores.open import open_postgresql as open_store
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.store import Settlement, Want

REQUIRED_SHARE = 0.85
ALLOWED_COST = 3.0
BLOCK = 5_000
"""Rows that a variant claims and settles per turn."""
ROUNDS = 15
"""Rounds of ordered claims."""


class StoreLoop:
    """The store, with the interface of a bare loop."""

    def __init__(self, store: SqlStore, *, ordered: bool) -> None:
        self._store = store
        self._ordered = ordered

    async def claim(self, limit: int) -> Sequence[Any]:
        """Lease rows."""
        want = Want(DESTINATION, "bench", limit=limit, ordered=self._ordered)
        return (await self._store.claim(want)).deliveries

    async def settle(self, rows: Sequence[Any]) -> None:
        """Mark them delivered."""
        delivered = Delivered()
        lost = await self._store.settle([Settlement(delivery, delivered) for delivery in rows])
        if lost:
            raise RuntimeError(f"{len(lost)} leases were lost")

    async def close(self) -> None:
        """Close the connections."""
        await self._store.close()


async def against_bare_loop(
    url: str, tables: Tables, *, ordered: bool, batch: int, rows: int
) -> dict[str, Sample]:
    """Return events per second through the store and through the bare loop, ``rows`` each."""
    rounds = max(2, rows // BLOCK)
    fill(url, 2 * (rounds + 1) * BLOCK, keys=1000 if ordered else 0)
    bare = await PsycopgLoop.open(url, tables, ordered=ordered)
    store = StoreLoop(open_store(url, tables), ordered=ordered)
    try:
        loops: dict[str, Loop] = {"bare": bare, "store": store}
        return await interleave({n: drain(loop, batch, BLOCK // batch) for n, loop in loops.items()}, rounds)
    finally:
        await bare.close()
        await store.close()


@dataclass(frozen=True, slots=True)
class Case:
    """The content of a destination's table before an ordered claim of 1,000 rows.

    ``rows`` belong to ``keys`` in turns, and ``hot`` per cent of them to one more key. ``prepare`` is SQL
    that follows. Another relay holds a claim of ``held`` rows.
    """

    title: str
    rows: int
    keys: int
    hot: int = 0
    prepare: Sequence[str] = ()
    held: int = 0


BACK_OFF = """
UPDATE outbox_event SET next_attempt_at = clock_timestamp() + interval '1 day', attempts = 1
WHERE destination = %(destination)s AND position IN (
    SELECT min(position) FROM outbox_event WHERE destination = %(destination)s GROUP BY ordering_key)"""
PARK = """
UPDATE outbox_event SET next_attempt_at = NULL
WHERE destination = %(destination)s AND next_attempt_at <= clock_timestamp()"""
ADD_KEYS = """
UPDATE outbox_event
SET ordering_key = 'Other:' || aggregate_id::int %% 1000, next_attempt_at = created_at, attempts = 0
WHERE destination = %(destination)s AND aggregate_id::int >= %(rows)s * 3 / 4"""


def cases(options: Options) -> list[Case]:
    """Return the cases, with the plain one first."""
    rows = options.size(100_000, 10_000)
    many = rows // 2
    behind = f"{many:,} keys backing off, rows behind them"
    return [
        Case("1,000 keys", rows, 1_000),
        Case(f"one key of {rows:,} rows", rows, 1),
        Case(f"{behind} due", 3 * many, many, prepare=[BACK_OFF]),
        Case(f"{behind} parked, 1,000 other keys", 4 * many, many, prepare=[BACK_OFF, PARK, ADD_KEYS]),
        Case("a hot key with its first 100 leased, 1,000 other keys", 2 * rows, 1_000, hot=50, held=100),
    ]


async def _prepare(url: str, store: SqlStore, case: Case, destination: str) -> None:
    fill(url, case.rows, destination=destination, keys=case.keys, hot=case.hot)
    for sql in case.prepare:
        run(url, sql, {"destination": destination, "rows": case.rows})
    if case.held:
        await _hold(url, store, case.held, destination)


async def _hold(url: str, store: SqlStore, count: int, destination: str) -> None:
    """Lease the first ``count`` rows of the hot key; the other rows are absent while that happens."""
    away = {"destination": destination, "away": f"{destination}, away"}
    run(
        url,
        "UPDATE outbox_event SET destination = %(away)s "
        "WHERE destination = %(destination)s AND ordering_key <> 'hot'",
        away,
    )
    claim = await store.claim(Want(destination, "other", limit=count, lease=3600, ordered=True))
    run(url, "UPDATE outbox_event SET destination = %(destination)s WHERE destination = %(away)s", away)
    if len(claim.deliveries) != count:
        raise RuntimeError(f"{len(claim.deliveries)} rows of the hot key leased instead of {count}")


def _claim_once(store: SqlStore, destination: str, seen: list[tuple[int, int]]) -> Take:
    """Time one claim of 1,000 rows, in milliseconds, and settle the rows."""

    async def take() -> float:
        start = time.perf_counter()
        claim = await store.claim(Want(destination, "bench", limit=1000, ordered=True))
        spent = time.perf_counter() - start
        seen.append((len(claim.deliveries), claim.parked))
        await store.settle([Settlement(delivery, Delivered()) for delivery in claim.deliveries])
        return spent * 1000

    return take


async def ordered_claims(url: str, tables: Tables, options: Options, findings: Findings) -> None:
    """Measure one ordered claim in each case, in turns on one table."""
    store = open_store(url, tables)
    every = cases(options)
    names = [f"case {number}" for number in range(len(every))]
    rounds = options.size(ROUNDS, 2)
    seen: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    try:
        for name, case in zip(names, every, strict=True):
            await _prepare(url, store, case, name)
        run(url, "VACUUM ANALYZE outbox_event")
        found = await interleave({name: _claim_once(store, name, seen[name]) for name in names}, rounds)
    finally:
        await store.close()
    lines = []
    for name, case in zip(names, every, strict=True):
        cost = found[name].over(found[names[0]])
        claimed, parked = (sum(column) / len(seen[name]) for column in zip(*seen[name], strict=True))
        lines.append([case.title, found[name].show(1), cost.show(2), f"{claimed:,.0f}", f"{parked:,.0f}"])
        findings.figure(f"ordered claim of 1,000, ms: {case.title}", found[name])
        if name != names[0]:
            findings.at_most(f"ordered claim: {case.title}", ALLOWED_COST, "× that of 1,000 keys", cost)
    columns = ["ordered claim of 1,000", "ms", "× the first", "claimed", "parked"]
    findings.table("what stands in the table", columns, lines)


async def measure(server_url: str, options: Options) -> Facts:
    """Measure events per second through the store and the bare loop, and milliseconds per claim."""
    findings = Findings()
    lines = []
    for ordered in (False, True):
        for batch in (100, 1000):
            with outbox(server_url) as (url, tables):
                run(url, "INSERT INTO outbox_destination (name) VALUES ('runner')")
                found = await against_bare_loop(url, tables, ordered=ordered, batch=batch, rows=options.rows)
            share = found["store"].over(found["bare"])
            case = f"{'ordered' if ordered else 'unordered'}, batches of {batch:,}"
            lines.append([case, found["bare"].show(), found["store"].show(), share.show(2)])
            findings.at_least(f"store, {case}", REQUIRED_SHARE, "× its statements in a bare loop", share)
            for name, sample in found.items():
                findings.figure(f"{name}, {case}", sample)
    columns = ["claim and settle", "bare loop, events/s", "store, events/s", "store / bare"]
    findings.table("the store against its own statements", columns, lines)
    with outbox(server_url) as (url, tables):
        await ordered_claims(url, tables, options, findings)
    return findings.facts()
