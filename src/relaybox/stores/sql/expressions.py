"""Core expressions over the outbox's tables, compiled for one database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from relaybox.core.ordering import ALONE
from relaybox.database.schema import MYSQL, now
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Row
from relaybox.stores.ledger import Entry
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
