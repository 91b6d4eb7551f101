"""MariaDB and MySQL through asyncmy: every operation one short READ COMMITTED transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import asyncmy
from asyncmy.errors import MySQLError
from sqlalchemy import make_url

from relaybox.schema import Tables
from relaybox.stores.dialects import MARIADB, MYSQL, refusal
from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Query, Statements
from relaybox.stores.steps import Row, Steps, Stepwise, StoreSteps

T = TypeVar("T")

DEADLOCK, LOCK_WAIT_TIMEOUT = 1213, 1205
TRIES = 5

MYSQL_SESSION = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
# A transaction, and its locks, whose process was stopped in the midst of it is ended.
MARIADB_SESSION = "SET SESSION tx_isolation = 'READ-COMMITTED', SESSION idle_transaction_timeout = 5"


def open_store(url: str, tables: Tables, *, connections: int = 2, mariadb: bool = True) -> SqlStore:
    """A store that holds at most ``connections`` connections."""
    dialect = MARIADB if mariadb else MYSQL
    statements = Statements(tables, dialect, "format")
    steps = StoreSteps(statements, dialect, Stepwise(statements, dialect))
    return SqlStore(steps, Asyncmy(url, connections, mariadb))


class Asyncmy:
    """A pool of asyncmy connections."""

    def __init__(self, url: str, connections: int, mariadb: bool) -> None:
        self._mariadb = mariadb
        self._url = make_url(url).set(drivername="mysql+asyncmy")
        self._connections = connections
        self._pool: Any = None

    async def run(self, begin: Callable[[], Steps[T]]) -> T:
        """Drive the steps in one transaction, again from the start when it was chosen to break a deadlock."""
        for last in (*[False] * (TRIES - 1), True):
            try:
                return await self._transaction(begin())
            except MySQLError as error:
                if last or error.args[:1] not in ((DEADLOCK,), (LOCK_WAIT_TIMEOUT,)):
                    raise refusal(error) from error
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Give up every connection."""
        if self._pool is not None:
            self._pool.close()
            await self._pool.wait_closed()
            self._pool = None

    async def _transaction(self, steps: Steps[T]) -> T:
        async with (await self._open()).acquire() as connection:
            try:
                await connection.begin()
                queries = next(steps)
                while True:
                    queries = steps.send([await _fetch(connection, query) for query in queries])
            except StopIteration as end:
                await connection.commit()
                return end.value  # type: ignore[no-any-return]
            except asyncio.CancelledError:
                # Not asked to roll back: the server may be what does not answer.
                connection.close()
                raise
            except BaseException:
                # A connection that broke has rolled back by closing.
                with suppress(MySQLError):
                    await connection.rollback()
                raise

    async def _open(self) -> Any:
        if self._pool is None:
            _, options = self._url.get_dialect()().create_connect_args(self._url)
            self._pool = await asyncmy.create_pool(
                **{"charset": "utf8mb4", **options},
                minsize=0,
                maxsize=self._connections,
                init_command=MARIADB_SESSION if self._mariadb else MYSQL_SESSION,
            )
        return self._pool


async def _fetch(connection: Any, query: Query) -> list[Row]:
    async with connection.cursor() as cursor:
        await cursor.execute(query.sql, query.params)
        return list(await cursor.fetchall())
