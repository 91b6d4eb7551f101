"""Measure the admin's list with many rows: its queries, their plans and its time.

The rows are mixed, except for a destination and a state that only the oldest rows have. No index leads to
those, so the list looks through its maximum of rows.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client

from benchmarks.harness import Sample, report, run, take_turns
from benchmarks.many import refill
from relaybox.stores.ledger import CAP

ALLOWED_MS = 300.0
ROUNDS = 5
FEW = 10_000
LIST = "/admin/relaybox/outboxevent/"
CASES = {
    "everything": {},
    "failed": {"status": "failed"},
    "one destination": {"destination": "billing"},
    "one aggregate": {"q": "Order 17"},
    "failed of a destination": {"status": "failed", "destination": "billing"},
    "the last hour": {"emitted": "1h"},
    "a destination of the oldest rows": {"destination": "legacy"},
    "a state of the oldest rows": {"status": "discarded"},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The way a query reads the events: the node, its index if any, and the number of rows it read."""

    node: str
    index: str
    rows: float

    @property
    def scans(self) -> bool:
        """True if it reads the table, or more of an index than a search may."""
        return "Seq Scan" in self.node or self.rows > CAP + 1


@dataclass(frozen=True, slots=True)
class Looked:
    """The database work of one page: the number of queries, and the plans of those for events."""

    queries: int
    plans: tuple[Plan, ...]


def milliseconds(client: Client, query: dict[str, str]) -> float:
    """Return the milliseconds of a page, from the request to the answer."""
    start = time.perf_counter()
    response = client.get(LIST, query)
    spent = time.perf_counter() - start
    if response.status_code != 200:
        raise RuntimeError(f"{LIST} {query} answered {response.status_code}")
    return spent * 1000


def look(client: Client, query: dict[str, str]) -> Looked:
    """Request the page, and EXPLAIN every reading query where it is executed."""
    executed: list[str] = []
    plans: list[Plan] = []

    def explain(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        executed.append(sql)
        if sql.lstrip().upper().startswith(("SELECT", "WITH")):
            with connection.connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", params)
                plans.extend(_read(cursor.fetchone()[0][0]["Plan"]))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(explain):
        milliseconds(client, query)
    return Looked(len(executed), tuple(plans))


def _read(node: dict[str, Any]) -> Iterator[Plan]:
    """Return the nodes of a plan that read events."""
    if node.get("Relation Name") == "outbox_event":
        removed = sum(node.get(f"Rows Removed by {what}", 0) for what in ("Filter", "Index Recheck"))
        looked_at = (node["Actual Rows"] + removed) * node["Actual Loops"]
        yield Plan(node["Node Type"], node.get("Index Name", ""), looked_at)
    for below in node.get("Plans", ()):
        yield from _read(below)


def measure(url: str, rows: int) -> list[list[str]]:
    """Return the table and the requirements."""
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("operator"))
    refill(url, FEW)
    few = {case: look(client, query) for case, query in CASES.items()}
    refill(url, rows)
    looked = {case: look(client, query) for case, query in CASES.items()}
    pages = {case: functools.partial(milliseconds, client, query) for case, query in CASES.items()}
    found = take_turns(pages, ROUNDS)
    _show(rows, few, looked, found)
    run(url, "TRUNCATE outbox_event")
    return _verdicts(few, looked, found)


def _verdicts(few: dict[str, Looked], looked: dict[str, Looked], found: dict[str, Sample]) -> list[list[str]]:
    slowest = max(found, key=lambda case: found[case].median)
    scans = [plan for one in looked.values() for plan in one.plans if plan.scans]
    growing = [case for case in CASES if looked[case].queries > few[case].queries]
    met = {True: "yes", False: "no"}
    fast = met[found[slowest].median <= ALLOWED_MS]
    return [
        ["admin list, ms", f"≤ {ALLOWED_MS:.0f}", f"{found[slowest].show()}, {slowest}", fast],
        ["admin list, scans", "0", str(len(scans)), met[not scans]],
        ["admin list, lists whose queries grow", "0", str(len(growing)), met[not growing]],
    ]


def _show(rows: int, few: dict[str, Looked], looked: dict[str, Looked], found: dict[str, Sample]) -> None:
    lines: list[list[str]] = []
    facts: list[dict[str, Any]] = []
    for case, sample in found.items():
        plans = looked[case].plans
        nodes = {f"{plan.node} {plan.index.removeprefix('idx_outbox_event_')}".strip() for plan in plans}
        most = max((plan.rows for plan in plans), default=0)
        counts = (few[case].queries, looked[case].queries)
        ways = ", ".join(sorted(nodes))
        lines.append([case, sample.show(1), *map(str, counts), f"{most:,.0f}", ways])
        seen = {"queries": counts[1], "most_rows": most, "plans": ways}
        facts.append({"case": case, "ms": sample.median, **seen})
    columns = ["the list", "ms", f"queries, {FEW:,} rows", f"{rows:,} rows", "most rows read", "by"]
    report("admin list", columns, lines, {"results": facts, "rows": rows, "allowed": ALLOWED_MS})
