"""Measure how long a claim takes, depending on the other rows of the table.

Each case has a database of its own. Before every claim a hundred rows become due, and afterwards they are
removed. The other rows stay. All cases take turns.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, Take, insert, interleave, outbox, run
from relaybox.core.outcome import Delivered
from relaybox.database.schema import Tables
from relaybox.stores.open import open_postgresql as open_store
from relaybox.stores.store import Settlement, Want

LIMIT = 100
CLAIMS = 10
"""Claims per turn; their average counts."""
ROUNDS = 15
KINDS = ("unordered", "ordered")

BACK_OFF = """
UPDATE outbox_event SET next_attempt_at = clock_timestamp() + interval '1 day', attempts = 1"""
DELIVER = """
UPDATE outbox_event SET status = 'delivered', attempts = 1, delivered_at = clock_timestamp(),
    next_attempt_at = NULL"""


@dataclass(frozen=True, slots=True)
class Case:
    """The rows of the table: ``rows`` with this many keys, brought into a state by an UPDATE."""

    title: str
    rows: int = 0
    state: str | None = None
    keys: int = 1_000

    @property
    def due(self) -> bool:
        """True if the rows themselves are claimed."""
        return bool(self.rows) and self.state is None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of claims; rows of one key are claimed only in order."""
        return KINDS if not self.due else KINDS[1:]


def cases(options: Options) -> list[Case]:
    """Return the cases, with the empty table first."""
    many, most = options.size(100_000, options.rows), options.size(1_000_000, 2 * options.rows)
    return [
        Case("nothing else"),
        Case(f"{many:,} backing off", many, BACK_OFF),
        Case(f"{most:,} delivered", most, DELIVER),
        Case(f"one key of {many:,} due", many, keys=1),
    ]


async def measure(server_url: str, options: Options) -> Facts:
    """Measure the milliseconds per claim."""
    variants: dict[str, Take] = {}
    chosen = cases(options)
    with ExitStack() as databases:
        async with AsyncExitStack() as stores:
            for case in chosen:
                url, tables = databases.enter_context(outbox(server_url))
                _prepare(url, case)
                for kind in case.kinds:
                    claiming = _claiming(url, tables, stores, ordered=kind == "ordered", due=not case.due)
                    variants[f"{kind}, {case.title}"] = claiming
            samples = await interleave(variants, options.size(ROUNDS, options.rounds))
    findings = Findings()
    for kind in KINDS:
        _show(findings, [case for case in chosen if kind in case.kinds], samples, kind)
    return findings.facts(limit=LIMIT)


def _prepare(url: str, case: Case) -> None:
    run(url, "INSERT INTO outbox_destination (name) VALUES ('runner')")
    if case.rows:
        insert(url, case.rows, keys=case.keys)
    if case.state:
        run(url, case.state)
    run(url, "VACUUM ANALYZE outbox_event")


def _claiming(url: str, tables: Tables, stores: AsyncExitStack, *, ordered: bool, due: bool) -> Take:
    store = open_store(url, tables)
    stores.push_async_callback(store.close)
    number = 10_000_000

    async def take() -> float:
        nonlocal number
        spent = 0.0
        for _ in range(CLAIMS):
            if due:
                # These keys have no other rows.
                insert(url, LIMIT, keys=2**31 - 1 if ordered else 0, first=number)
                number += LIMIT
            begin = time.perf_counter()
            claim = await store.claim(Want("runner", "bench", limit=LIMIT, ordered=ordered))
            spent += time.perf_counter() - begin
            if len(claim.deliveries) != LIMIT:
                raise RuntimeError(f"{len(claim.deliveries)} rows claimed where {LIMIT} were due")
            gone = Delivered(keep=False)
            await store.settle([Settlement(delivery, gone) for delivery in claim.deliveries])
        return 1000 * spent / CLAIMS

    return take


def _show(findings: Findings, chosen: list[Case], samples: dict[str, Sample], kind: str) -> None:
    lines = []
    for case in chosen:
        sample = samples[f"{kind}, {case.title}"]
        cost = sample.over(samples[f"{kind}, {chosen[0].title}"])
        findings.figure(f"{kind}, {case.title}", sample)
        lines.append([case.title, sample.show(2), cost.show(2)])
        if case.state:
            findings.at_most(f"claim, {kind}, {case.title}", 1.2, "× an empty table's", cost)
    findings.table(f"an {kind} claim of {LIMIT} rows, ms", ["what else there is", "ms", "× nothing"], lines)
