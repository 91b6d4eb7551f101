"""PostgreSQL through psycopg: every yield of the steps is one round trip, one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict

from relaybox.connect import hang_up
from relaybox.schema import Tables
from relaybox.stores.dialects import POSTGRESQL, refusal
from relaybox.stores.pipeline import Pipeline
from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Query, Statements
from relaybox.stores.steps import OneStatement, Row, Steps, StoreSteps

T = TypeVar("T")
Connection: TypeAlias = AsyncConnection[tuple[Any, ...]]

CONNECT = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Unless the URL says otherwise: a server that is gone without a word is noticed within seconds."""

ANSWER_SECONDS = 60.0
"""A server that has not answered by then is taken to be gone."""
CANCEL_SECONDS = 1.0
"""For the server to hear that a call was given up."""

# Said, not presumed: the database's or the role's default may be another.
BEGIN = Query("BEGIN ISOLATION LEVEL READ COMMITTED", ())
COMMIT = Query("COMMIT", ())


def open_store(url: str, tables: Tables, *, connections: int = 2) -> SqlStore:
    """A store that holds at most ``connections`` connections."""
    statements = Statements(tables, POSTGRESQL, "numeric")
    steps = StoreSteps(statements, POSTGRESQL, OneStatement(statements))
    return SqlStore(steps, Psycopg(url, connections, statements))


class Psycopg:
    """A few psycopg connections, made when they are needed.

    One that failed or whose caller was cancelled is closed; so a database that is away is told of at once,
    and one that came back is found by the next call.
    """

    def __init__(self, url: str, connections: int, statements: Statements) -> None:
        self._url = url
        self._statements = statements
        self._lasting = frozenset(statements.texts())
        self._places = asyncio.Semaphore(connections)
        self._idle: list[Session] = []

    async def run(self, begin: Callable[[], Steps[T]], *, checked: bool = False) -> T:
        """Drive the steps on one connection."""
        try:
            async with self._places:
                session = self._idle.pop() if self._idle else await self._connect()
                result = await _answered(session.connection, session.drive(begin()))
                self._idle.append(session)
                return result
        except psycopg.Error as error:
            raise refusal(error, self._url) from error

    async def close(self) -> None:
        """Give up every connection."""
        while self._idle:
            await self._idle.pop().connection.close()

    async def _connect(self) -> Session:
        options: dict[str, Any] = {
            **CONNECT,
            **conninfo_to_dict(self._url),
            "autocommit": True,
        }
        connection: Connection = await AsyncConnection.connect(**options)
        return await _answered(connection, self._open(connection))

    async def _open(self, connection: Connection) -> Session:
        """A pooler invents the process number that a server would tell, and its sessions may change.

        So what is set and what is prepared holds for one transaction only.
        """
        cursor = await connection.execute("SELECT pg_backend_pid()")
        if await cursor.fetchone() != (connection.info.backend_pid,):
            return Session(connection, [BEGIN, self._statements("pin_plan")], [COMMIT])
        session = Session(connection, [self._statements("unpin_plan")], lasting=self._lasting)
        await session.pipeline.run([self._statements("pin_session")])
        return session


class Session:
    """A connection, and what goes around the statements of a transaction that are not all ``lasting``."""

    def __init__(
        self,
        connection: Connection,
        before: Sequence[Query],
        after: Sequence[Query] = (),
        lasting: frozenset[str] = frozenset(),
    ) -> None:
        self.connection = connection
        self.pipeline = Pipeline(connection, lasting)
        self._before = before
        self._after = after
        self._lasting = lasting

    async def drive(self, steps: Steps[T]) -> T:
        """What the steps come to."""
        try:
            queries = next(steps)
            while True:
                queries = steps.send(await self._transact(queries))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def _transact(self, queries: Sequence[Query]) -> list[list[Row]]:
        if all(query.sql in self._lasting for query in queries):
            return await self.pipeline.run(queries)
        results = await self.pipeline.run([*self._before, *queries, *self._after])
        return results[len(self._before) : len(self._before) + len(queries)]


async def _answered(connection: Connection, work: Coroutine[Any, Any, T]) -> T:
    """The result of what is done on the connection, which is given up when it fails or takes too long."""
    timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, _hang_up, connection)
    try:
        return await work
    except BaseException as error:
        try:
            if isinstance(error, asyncio.CancelledError):
                await _cancel(connection)
        finally:
            await connection.close()
        raise
    finally:
        timer.cancel()


async def _cancel(connection: Connection) -> None:
    """Else the server, once it has the locks, would still do what is under way: lease rows to nobody."""
    with suppress(psycopg.Error):
        await connection.cancel_safe(timeout=CANCEL_SECONDS)


def _hang_up(connection: Connection) -> None:
    with suppress(psycopg.Error):
        hang_up(connection.fileno())
