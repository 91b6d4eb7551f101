"""sqlite3."""

from __future__ import annotations

import sqlite3

from relaybox.database.dialects import SQLITE
from relaybox.database.statements.delivery import ParamStyle, Query
from relaybox.database.steps import Rows


class Sqlite3:
    """A connection of the standard library's sqlite3."""

    name = "sqlite3"
    dialect = SQLITE
    style: ParamStyle = "qmark"

    def is_closed(self, connection: sqlite3.Connection) -> bool:
        try:
            connection.in_transaction  # noqa: B018
        except sqlite3.ProgrammingError:
            return True
        return False

    def is_failed(self, connection: sqlite3.Connection) -> bool:
        """SQLite has no such state: a statement that fails leaves the transaction usable, or ends it."""
        return False

    def is_open(self, connection: sqlite3.Connection) -> bool:
        return connection.in_transaction

    def begins(self, connection: sqlite3.Connection) -> bool:
        """By ``autocommit`` where Python (3.12) has it and it is set, else by ``isolation_level``."""
        autocommit = getattr(connection, "autocommit", None)
        if isinstance(autocommit, bool):
            return not autocommit
        return connection.isolation_level is not None

    def execute(self, connection: sqlite3.Connection, query: Query) -> Rows:
        cursor = connection.cursor()
        cursor.row_factory = None
        return cursor.execute(query.sql, query.params).fetchall()
