"""The aiosqlite driver."""

from __future__ import annotations

import sqlite3

import aiosqlite

from relaybox.database.drivers.sqlite3 import SqliteState
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Rows


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
