"""What applications write with: one small face for a transaction on each driver."""

from __future__ import annotations

import asyncio
import itertools
import re
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

import asyncpg
import psycopg
import pymysql
import sqlalchemy as sa
from sqlalchemy.orm import Session

from relaybox import Outbox
from relaybox.errors import ConnectionClosed, TransactionFailed
from tests import databases

T = TypeVar("T")
DRIVERS = {
    "postgresql": ("psycopg", "session", "asyncpg"),
    "mysql": ("pymysql", "session"),
    "sqlite": ("sqlite3",),
}
"""By the scheme of the URL."""

ERRORS = (
    psycopg.Error,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    pymysql.Error,
    sqlite3.Error,
    sa.exc.SQLAlchemyError,
    OSError,
    asyncio.IncompleteReadError,
    ConnectionClosed,
    TransactionFailed,
)
"""What an application has to expect of a database that is in trouble."""

CONNECT_SECONDS = 5


def engine(url: str, pool: type[sa.Pool] = sa.NullPool) -> sa.Engine:
    """Return an engine that keeps no connection, unless its ``pool`` does."""
    timeout = {} if url.startswith("sqlite") else {"connect_timeout": CONNECT_SECONDS}
    return databases.engine(url, poolclass=pool, connect_args=timeout)


class Plain:
    """A connection on which one transaction follows the other. Statements have ``?`` for their values.

    This is what the drivers of PEP 249 have in common. Where ``commit`` raises it is not known whether it
    happened; ``close`` gives up the connection in whatever state it is.
    """

    placeholder = "%s"

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def begin(self) -> None:
        """Do nothing: a transaction begins by itself."""

    def fetch(self, sql: str, *values: Any) -> list[Any]:
        cursor = self.connection.cursor()
        cursor.execute(sql.replace("?", self.placeholder), values)
        return list(cursor.fetchall()) if cursor.description else []

    def emit(self, outbox: Outbox, *event: Any) -> UUID:
        return outbox.emit(self.connection, *event).event_id

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        self.connection.rollback()

    def savepoint(self) -> str:
        self.fetch("SAVEPOINT here")
        return "here"

    def back_to(self, savepoint: str) -> None:
        self.fetch("ROLLBACK TO SAVEPOINT here")

    def close(self) -> None:
        self.connection.close()


class Psycopg(Plain):
    def __init__(self, url: str) -> None:
        super().__init__(psycopg.connect(url, connect_timeout=CONNECT_SECONDS))


class PyMySQL(Plain):
    def __init__(self, url: str) -> None:
        parsed = sa.make_url(url)
        connection = pymysql.connect(
            host=parsed.host,
            port=parsed.port or 3306,
            user=parsed.username,
            password=parsed.password or "",
            database=parsed.database,
            charset="utf8mb4",
            connect_timeout=CONNECT_SECONDS,
        )
        super().__init__(connection)

    def close(self) -> None:
        # An orderly goodbye is an error where the connection is broken.
        self.connection._force_close()


class Sqlite(Plain):
    """The standard library's sqlite3, with explicit transactions."""

    placeholder = "?"

    def __init__(self, url: str) -> None:
        path = sa.make_url(url).database or ""
        super().__init__(sqlite3.connect(path, isolation_level=None, timeout=60))

    def begin(self) -> None:
        # As a writer from the start: a reader that becomes one later has too old a snapshot.
        self.connection.execute("BEGIN IMMEDIATE")


class OfSession(Plain):
    def __init__(self, url: str) -> None:
        self._engine = engine(url, sa.QueuePool)
        super().__init__(Session(self._engine))

    def fetch(self, sql: str, *values: Any) -> list[Any]:
        result = self.connection.connection().exec_driver_sql(sql.replace("?", self.placeholder), values)
        return list(result.all()) if result.returns_rows else []

    def savepoint(self) -> Any:
        return self.connection.begin_nested()

    def back_to(self, savepoint: Any) -> None:
        savepoint.rollback()

    def close(self) -> None:
        self.connection.invalidate()
        self._engine.dispose()


class Asyncpg:
    """asyncpg, on an event loop that runs for as long as each call takes."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        connecting = asyncpg.connect(url, timeout=CONNECT_SECONDS)
        try:
            self._connection = self._loop.run_until_complete(connecting)
        except BaseException:
            self._loop.close()
            raise
        self._transaction: Any = None

    def _run(self, work: Awaitable[T]) -> T:
        return self._loop.run_until_complete(work)

    def begin(self) -> None:
        self._transaction = self.savepoint()

    def fetch(self, sql: str, *values: Any) -> list[Any]:
        number = itertools.count(1)
        numbered = re.sub(r"\?", lambda _: f"${next(number)}", sql)
        return list(self._run(self._connection.fetch(numbered, *values)))

    def emit(self, outbox: Outbox, *event: Any) -> UUID:
        return self._run(outbox.aemit(self._connection, *event)).event_id

    def commit(self) -> None:
        self._run(self._transaction.commit())

    def rollback(self) -> None:
        self.back_to(self._transaction)

    def savepoint(self) -> Any:
        nested = self._connection.transaction()
        self._run(nested.start())
        return nested

    def back_to(self, savepoint: Any) -> None:
        self._run(savepoint.rollback())

    def close(self) -> None:
        self._connection.terminate()
        # The end of the transport is noticed in the next turn.
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


Driver: TypeAlias = Plain | Asyncpg
_OPEN: dict[str, Callable[[str], Driver]] = {
    "psycopg": Psycopg,
    "session": OfSession,
    "asyncpg": Asyncpg,
    "pymysql": PyMySQL,
    "sqlite3": Sqlite,
}


def connect(driver: str, url: str) -> Driver:
    """Open a connection; raise one of ``ERRORS`` if that fails."""
    return _OPEN[driver](url)
