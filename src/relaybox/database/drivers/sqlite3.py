"""The drivers for SQLite: the standard library's sqlite3, and aiosqlite."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

from relaybox.database.dialects import SQLITE
from relaybox.database.statements.delivery import ParamStyle, Query
from relaybox.database.steps import Rows

if TYPE_CHECKING:
    import aiosqlite


class SqliteState:
    """State of a sqlite3 connection; an aiosqlite connection passes most of it through."""

    dialect = SQLITE
    style: ParamStyle = "qmark"

    def is_closed(self, connection: Any) -> bool:
        try:
            connection.in_transaction  # noqa: B018
        except (sqlite3.ProgrammingError, ValueError):  # ValueError comes from aiosqlite
            return True
        return False

    def is_failed(self, connection: Any) -> bool:
        """Return False: after an error, SQLite's transaction is either usable or over."""
        return False

    def is_open(self, connection: Any) -> bool:
        return bool(connection.in_transaction)

    def begins(self, connection: Any) -> bool:
        """Use ``autocommit`` (Python 3.12) if it is set, else ``isolation_level``."""
        autocommit = getattr(connection, "autocommit", None)
        if isinstance(autocommit, bool):
            return not autocommit
        return connection.isolation_level is not None


class Sqlite3(SqliteState):
    """A ``sqlite3.Connection``."""

    name = "sqlite3"

    def execute(self, connection: sqlite3.Connection, query: Query) -> Rows:
        cursor = connection.cursor()
        cursor.row_factory = None
        return cursor.execute(query.sql, query.params).fetchall()


class Aiosqlite(SqliteState):
    """An aiosqlite connection."""

    name = "aiosqlite"

    def begins(self, connection: aiosqlite.Connection) -> bool:
        return super().begins(connection._conn)

    async def execute(self, connection: aiosqlite.Connection, query: Query) -> Rows:
        """Execute in one trip to the connection's thread, unless a custom row factory prevents that."""
        if connection.row_factory in (None, sqlite3.Row):
            return list(await connection.execute_fetchall(query.sql, query.params))
        async with connection.cursor() as cursor:
            cursor.row_factory = None
            await cursor.execute(query.sql, query.params)
            return list(await cursor.fetchall())
