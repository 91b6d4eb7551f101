"""Runs the leader's statements under its term: if the term is over, they do nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Row, Steps

OLDEST = 100 * 365 * 86_400.0
"""Seconds; every database can subtract them from its clock."""
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


def under_term(sql: Statements, term: int, name: str, *then: str, **words: Any) -> Steps[list[Row] | None]:
    """Execute a statement if the term lasts; return its rows, or None.

    On PostgreSQL the statement checks the term as well, and goes in one round trip with the fence. Elsewhere
    the rows are those of the last of ``then``.
    """
    fence = sql("fence", term=term)
    if sql.dialect.one_statement:
        led, rows = yield [fence, sql(name, term=term, **words)]
        return rows if led else None
    [led] = yield [fence]
    if not led:
        return None
    return (yield [sql(name, **words), *map(sql, then)])[-1]


def prune_by_age(sql: Statements, term: int, name: str, age: float, limit: int) -> Steps[int | None]:
    """Remove rows older than ``age`` seconds with the named DELETE; return the number of rows."""
    rows = yield from under_term(sql, term, name, "changed", seconds=ago(age), limit=limit)
    if rows is None:
        return None
    return len(rows) if sql.dialect.one_statement else int(rows[0][0])


def ago(age: float) -> float:
    """Return the seconds to add to the clock for a moment ``age`` seconds ago."""
    return -min(age, OLDEST)
