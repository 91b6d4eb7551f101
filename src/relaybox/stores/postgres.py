"""PostgreSQL through psycopg: every yield of the steps is one pipeline: one round trip, one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.types.string import TextLoader
from psycopg_pool import AsyncConnectionPool

from relaybox.errors import StoreError
from relaybox.schema import Tables
from relaybox.stores.dialects import POSTGRESQL
from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Query, Statements
from relaybox.stores.steps import OneStatement, Row, Steps, StoreSteps

T = TypeVar("T")
Connection: TypeAlias = AsyncConnection[tuple[Any, ...]]


def open_store(url: str, tables: Tables, *, connections: int = 2) -> SqlStore:
    """A store that holds at most ``connections`` connections."""
    statements = Statements(tables, POSTGRESQL, "format")
    steps = StoreSteps(statements, POSTGRESQL, OneStatement(statements))
    return SqlStore(steps, Psycopg(url, connections, statements("pin_plan")))


class Psycopg:
    """A pool of psycopg connections. ``preamble`` goes ahead of every pipeline."""

    def __init__(self, url: str, connections: int, preamble: Query) -> None:
        self._preamble = preamble
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            url,
            min_size=0,
            max_size=connections,
            open=False,
            configure=_configure,
            kwargs={"autocommit": True},
        )

    async def run(self, begin: Callable[[], Steps[T]]) -> T:
        """Drive the steps on one connection."""
        steps = begin()
        try:
            await self._pool.open()
            async with self._pool.connection() as connection:
                queries = next(steps)
                while True:
                    queries = steps.send(await self._pipeline(connection, queries))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except psycopg.Error as error:
            raise StoreError(str(error)) from error

    async def close(self) -> None:
        """Give up every connection."""
        await self._pool.close()

    async def _pipeline(self, connection: Connection, queries: Sequence[Query]) -> list[list[Row]]:
        async with connection.pipeline():
            # Said, not presumed: the database's or the role's default may be another.
            await connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            await connection.execute(self._preamble.sql)
            cursors = [await connection.execute(query.sql, query.params) for query in queries]
            await connection.execute("COMMIT")
        return [list(await cursor.fetchall()) if cursor.description else [] for cursor in cursors]


async def _configure(connection: Connection) -> None:
    connection.adapters.register_loader("jsonb", TextLoader)
