"""aiosqlite."""

from __future__ import annotations

import sqlite3

import aiosqlite

from relaybox.database.drivers.sqlite3 import Sqlite3
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Rows


class Aiosqlite:
    """An aiosqlite connection: sqlite3's answers, asked of the connection it wraps."""

    name = "aiosqlite"
    dialect = Sqlite3.dialect
    style = Sqlite3.style

    def __init__(self) -> None:
        self._sqlite3 = Sqlite3()

    def is_closed(self, connection: aiosqlite.Connection) -> bool:
        try:
            connection.in_transaction  # noqa: B018
        except (ValueError, sqlite3.ProgrammingError):
            return True
        return False

    def is_failed(self, connection: aiosqlite.Connection) -> bool:
        return False

    def is_open(self, connection: aiosqlite.Connection) -> bool:
        return connection.in_transaction

    def begins(self, connection: aiosqlite.Connection) -> bool:
        return self._sqlite3.begins(connection._conn)

    async def execute(self, connection: aiosqlite.Connection, query: Query) -> Rows:
        """In one trip to the connection's thread, unless a row factory stands in the way."""
        if connection.row_factory in (None, sqlite3.Row):
            return list(await connection.execute_fetchall(query.sql, query.params))
        async with connection.cursor() as cursor:
            cursor.row_factory = None
            await cursor.execute(query.sql, query.params)
            return list(await cursor.fetchall())
