"""Core expressions over the outbox's tables, and the parts of the event table that an index leads to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from relaybox.core.ordering import ALONE
from relaybox.database.schema import MYSQL, now
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Row
from relaybox.stores.ledger import CAP, Entry, Filter
from relaybox.stores.sql.rows import shown

COLUMNS = tuple(name for name in Entry.__dataclass_fields__ if name != "seen_at")
IDS = ("id", "event_id")
TIMES = (
    *("next_attempt_at", "leased_until", "created_at", "updated_at"),
    *("last_attempt_at", "delivered_at", "seen_at"),
)
NUMBERS = ("position", "attempts", "max_attempts", "crashes")
TEXTS = tuple(name for name in COLUMNS if name not in (*IDS, *TIMES, *NUMBERS))
NIL = UUID(int=0)
_COMPILERS: dict[str, Any] = {
    "postgresql": postgresql.dialect,
    "mysql": mysql.dialect,
    "mariadb": mysql.dialect,
    "sqlite": sqlite.dialect,
}
_STYLES = {"format": "format", "qmark": "qmark", "numeric": "numeric_dollar"}


class Expressions:
    """Compiles expressions for a database's driver, and converts what they return."""

    def __init__(self, statements: Statements) -> None:
        self.statements = statements
        self.dialect = statements.dialect
        self.event = statements.tables.event
        self.inbox = statements.tables.inbox
        self.split = self.dialect.name in MYSQL
        """True if generated columns hold the destination of pending and of failed rows."""
        # A volatile function cannot bound an index; a subquery can.
        self.now = sa.select(now()).scalar_subquery()
        self._sql = _COMPILERS[self.dialect.name](paramstyle=_STYLES[statements.style])

    def query(self, statement: sa.Select[Any]) -> Query:
        """Compile the statement for this database's driver."""
        compiled = statement.compile(dialect=self._sql, compile_kwargs={"render_postcompile": True})
        return Query(str(compiled), tuple(compiled.params[name] for name in compiled.positiontup or ()))

    def select(self, source: Any) -> sa.Select[Any]:
        """Select what ``entry`` converts."""
        return sa.select(*self.columns(source), now())

    def columns(self, source: Any = None) -> Sequence[Any]:
        """Return the columns of an entry, of the event table by default."""
        return [(self.event if source is None else source).c[name] for name in COLUMNS]

    def entry(self, row: Row) -> Entry:
        """Convert a row of ``COLUMNS`` and the database's time."""
        values = dict(zip((*COLUMNS, "seen_at"), row, strict=True))
        for name in IDS:
            values[name] = self.shown_id(values[name])
        for name in TIMES:
            values[name] = None if values[name] is None else self.dialect.from_time(values[name])
        if not self.dialect.typed:
            values |= {name: shown(values[name]) for name in TEXTS}
            values |= {name: values[name] if isinstance(values[name], int) else 0 for name in NUMBERS}
        values["crashes"] %= ALONE
        return Entry(**values)

    def shown_id(self, value: Any) -> UUID:
        """Return the id, or NIL if the row was edited by hand and its id is not a UUID."""
        try:
            return self.dialect.from_uuid(value)
        except (ValueError, TypeError, AttributeError):
            return NIL

    def ids(self, ids: Iterable[UUID]) -> list[Any]:
        """Return ids as their column holds them."""
        return [self.dialect.to_uuid(id_) for id_ in ids]


def equal(column: Any, status: str) -> Any:
    """Compare with a literal: a partial index serves only conditions known before values are bound."""
    return column == sa.literal(status, literal_execute=True)


class Part(NamedTuple):
    """Rows that an index leads to; ``hint`` names the index if the planner would use less of it."""

    condition: Any
    order: tuple[Any, ...]
    hint: str = ""


class Parts:
    """Finds the parts of one database's event table."""

    def __init__(self, own: Expressions) -> None:
        self._own = own

    def of(self, filter: Filter) -> Iterator[Part]:
        """Yield the parts that hold all rows that match the filter."""
        event = self._own.event.c
        if filter.aggregate_type is not None and filter.aggregate_id is not None:
            same = (event.aggregate_type == filter.aggregate_type, event.aggregate_id == filter.aggregate_id)
            yield Part(sa.and_(*same), ())
        if filter.status == "failed":
            yield self._failed(filter.destination)
        elif filter.status in ("pending", "due", "scheduled", "parked", "sending", "processing"):
            yield self._pending(filter.destination)
        elif filter.status in ("delivered", "completed") and filter.destination is not None:
            yield self._delivered(filter.destination)

    def rows(self, part: Part, *columns: Any) -> sa.Select[Any]:
        """Select the rows of a part, up to one more than ``CAP``."""
        # In index order, so that the planner uses the index.
        chosen = columns or self._own.columns()
        statement = sa.select(*chosen).where(part.condition).order_by(*part.order).limit(CAP + 1)
        return statement.with_hint(self._own.event, part.hint, "mysql") if part.hint else statement

    def counts(self, name: str) -> dict[str, Query]:
        """Return a query per range: count, leased count, oldest row, now, and time of the oldest claim."""
        event = self._own.event.c
        pending = self._pending(name)
        parked = _only(pending, event.next_attempt_at.is_(None))
        if self._own.split:
            # MariaDB would sort by a time that is null in every row.
            parked = parked._replace(order=(event.position,))
        parts = {
            "due": _only(pending, event.next_attempt_at <= self._own.now),
            "scheduled": _only(pending, event.next_attempt_at > self._own.now),
            "parked": parked,
        }
        final = {"failed": self._failed(name), "delivered": self._delivered(name)}
        counts = {state: self._count(part) for state, part in parts.items()}
        counts |= {state: self._count_final(part) for state, part in final.items()}
        return {state: self._own.query(count) for state, count in counts.items()}

    def next_error(self, name: str) -> Query:
        """Return the query for the error of the destination's next scheduled row."""
        event = self._own.event.c
        scheduled = _only(self._pending(name), event.next_attempt_at > self._own.now)
        return self._own.query(self.rows(scheduled, event.error_message).limit(1))

    def _count_final(self, part: Part) -> sa.Select[Any]:
        window = self.rows(part, sa.literal_column("1").label("one")).subquery("w")
        columns: list[Any] = [sa.func.count(), sa.literal_column("0"), sa.null(), now(), sa.null()]
        return sa.select(*columns).select_from(window)

    def _count(self, part: Part) -> sa.Select[Any]:
        event = self._own.event.c
        asked = (event.leased_until, event.created_at, event.last_attempt_at)
        window = self.rows(part, *asked).subquery("w")
        leased = sa.case((window.c.leased_until > self._own.now, 1))
        claimed = sa.case((window.c.leased_until > self._own.now, window.c.last_attempt_at))
        columns: list[Any] = [sa.func.count(), sa.func.count(leased), sa.func.min(window.c.created_at)]
        return sa.select(*columns, now(), sa.func.min(claimed)).select_from(window)

    def _failed(self, destination: str | None) -> Part:
        event = self._own.event.c
        column = event.failed_destination if self._own.split else event.destination
        first = (column,) if destination is None else ()
        return Part(self._open(column, destination, "failed"), (*first, event.position))

    def _pending(self, destination: str | None) -> Part:
        event = self._own.event.c
        column = event.due_destination if self._own.split else event.destination
        # MariaDB would sort by the name even if it is the same in every row.
        first = (column,) if destination is None else ()
        order = (*first, event.next_attempt_at, event.position)
        hint = self._own.statements.by_due if destination is not None else ""
        return Part(self._open(column, destination, "pending"), order, hint)

    def _delivered(self, name: str) -> Part:
        event = self._own.event.c
        delivered = equal(event.status, "delivered") & (event.destination == name)
        return Part(delivered & event.delivered_at.is_not(None), (event.delivered_at,))

    def _open(self, column: Any, destination: str | None, status: str) -> Any:
        name = column.is_not(None) if destination is None else column == destination
        return equal(self._own.event.c.status, status) & name


def _only(part: Part, condition: Any) -> Part:
    return part._replace(condition=part.condition & condition)
