"""SQLite through aiosqlite: one connection, one writer, every operation one immediate transaction."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import TypeVar

import aiosqlite

from relaybox.errors import StoreError
from relaybox.schema import Tables
from relaybox.stores.dialects import SQLITE
from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Query, Statements
from relaybox.stores.steps import Row, Steps, Stepwise, StoreSteps

T = TypeVar("T")


def open_store(path: str, tables: Tables) -> SqlStore:
    """A store in the file at ``path``."""
    statements = Statements(tables, SQLITE, "qmark")
    return SqlStore(StoreSteps(statements, SQLITE, Stepwise(statements, SQLITE)), Aiosqlite(path))


class Aiosqlite:
    """One aiosqlite connection, used by one operation at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._turn = asyncio.Lock()
        self._connection: aiosqlite.Connection | None = None

    async def run(self, begin: Callable[[], Steps[T]]) -> T:
        """Drive the steps in one transaction that is the only writer from its beginning."""
        steps = begin()
        async with self._turn:
            try:
                connection = await self._connect()
                try:
                    await connection.execute("BEGIN IMMEDIATE")
                    queries = next(steps)
                    while True:
                        queries = steps.send([await _fetch(connection, query) for query in queries])
                except StopIteration as end:
                    await connection.commit()
                    return end.value  # type: ignore[no-any-return]
                except BaseException:
                    # Also where nothing seems to have begun: a BEGIN whose caller was cancelled still runs.
                    await connection.rollback()
                    raise
            except sqlite3.Error as error:
                raise StoreError(str(error)) from error

    async def close(self) -> None:
        """Give up the connection."""
        async with self._turn:
            if self._connection is not None:
                await self._connection.close()
                self._connection = None

    async def _connect(self) -> aiosqlite.Connection:
        if self._connection is None:
            self._connection = await aiosqlite.connect(self._path, isolation_level=None, timeout=30)
            await self._connection.execute("PRAGMA journal_mode = WAL")
        return self._connection


async def _fetch(connection: aiosqlite.Connection, query: Query) -> list[Row]:
    return list(await connection.execute_fetchall(query.sql, query.params))
