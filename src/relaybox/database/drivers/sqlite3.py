"""sqlite3."""

from __future__ import annotations

import sqlite3
from typing import Any

from relaybox.database.dialects import SQLITE
from relaybox.database.statements.delivery import ParamStyle, Query
from relaybox.database.steps import Rows


class SqliteState:
    """What a connection of sqlite3 answers; one of aiosqlite passes most of it on."""

    dialect = SQLITE
    style: ParamStyle = "qmark"

    def is_closed(self, connection: Any) -> bool:
        try:
            connection.in_transaction  # noqa: B018
        except (sqlite3.ProgrammingError, ValueError):  # the latter of aiosqlite
            return True
        return False

    def is_failed(self, connection: Any) -> bool:
        """SQLite has no such state: a statement that fails leaves the transaction usable, or ends it."""
        return False

    def is_open(self, connection: Any) -> bool:
        return bool(connection.in_transaction)

    def begins(self, connection: Any) -> bool:
        """By ``autocommit`` where Python (3.12) has it and it is set, else by ``isolation_level``."""
        autocommit = getattr(connection, "autocommit", None)
        if isinstance(autocommit, bool):
            return not autocommit
        return connection.isolation_level is not None


class Sqlite3(SqliteState):
    """A connection of the standard library's sqlite3."""

    name = "sqlite3"

    def execute(self, connection: sqlite3.Connection, query: Query) -> Rows:
        cursor = connection.cursor()
        cursor.row_factory = None
        return cursor.execute(query.sql, query.params).fetchall()
