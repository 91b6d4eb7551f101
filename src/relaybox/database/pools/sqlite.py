"""SQLite: one connection in its own thread, and one immediate transaction per operation.

So a busy event loop does not hold the file's lock, and a cancelled caller leaves nothing half done.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from relaybox.database.dialects import refusal
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Row, Steps, drive

T = TypeVar("T")

PATIENCE = 30.0


class Sqlite3:
    """One connection, used by one thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "relaybox-sqlite")
        self._connection: sqlite3.Connection | None = None

    async def run(self, begin: Callable[[], Steps[T]], *, checked: bool = False, lane: str = "") -> T:
        """Drive the steps in one transaction that holds the write lock from the start."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._attempt, begin, checked)
        except sqlite3.Error as error:
            raise refusal(error) from error

    async def close(self) -> None:
        """Close the connection; the thread ends when this object is collected."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)

    def _attempt(self, begin: Callable[[], Steps[T]], checked: bool) -> T:
        """Run the steps; retry with relaxed checks if a row edited by hand is in the way."""
        borne = 0
        try:
            while True:
                try:
                    return self._transaction(begin())
                except sqlite3.Error as error:
                    borne += 1
                    if borne > 2 or checked or not self._bears(error):
                        raise
        finally:
            if borne:
                self._connect().execute("PRAGMA ignore_check_constraints = OFF")

    def _bears(self, error: sqlite3.Error) -> bool:
        """Make the connection tolerate the row's defect; return whether it can."""
        if "CHECK constraint" in str(error):
            self._connect().execute("PRAGMA ignore_check_constraints = ON")
            return True
        if "decode to UTF-8" in str(error):
            self._connect().text_factory = _text
            return True
        return False

    def _transaction(self, steps: Steps[T]) -> T:
        connection = self._connect()
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = drive(steps, lambda queries: [_fetch(connection, query) for query in queries])
            connection.execute("COMMIT")
            return result
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(self._path, isolation_level=None, timeout=PATIENCE)
            try:
                _switch_to_wal(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL mode; retry, because SQLite refuses all but one of concurrent switches at once."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def _text(data: bytes) -> str | bytes:
    """Return ``str``, or ``bytes`` if the value is not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _fetch(connection: sqlite3.Connection, query: Query) -> list[Row]:
    return connection.execute(query.sql, query.params).fetchall()
