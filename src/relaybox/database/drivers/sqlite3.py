"""The driver for the standard library's sqlite3."""

from __future__ import annotations

import sqlite3
from typing import Any

from relaybox.database.dialects import SQLITE
from relaybox.database.statements.delivery import ParamStyle, Query
from relaybox.database.steps import Rows


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
