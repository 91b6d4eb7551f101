"""PostgreSQL through psycopg: each yield of the steps is one round trip and one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import LockNotAvailable

from relaybox.database.connect import hang_up
from relaybox.database.dialects import refusal
from relaybox.database.pools.pipeline import Pipeline
from relaybox.database.pools.places import ConnectionPlaces
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Rows, Steps, adrive
from relaybox.database.transactions import BEGIN_WRITING, TRANSACTION
from relaybox.errors import Locked

T = TypeVar("T")
Connection: TypeAlias = AsyncConnection[tuple[Any, ...]]

CONNECT = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Defaults for the URL's options: they detect a vanished server within seconds."""

ANSWER_SECONDS = 60.0
"""Seconds until a silent server counts as gone."""
CANCEL_SECONDS = 1.0

BEGIN = [Query(sql, ()) for sql in BEGIN_WRITING["postgresql"]]


class Psycopg:
    """A few psycopg connections, opened on demand.

    A failure or a cancelled call closes the connection, so the next call reconnects; a lock timeout does not.
    """

    def __init__(self, url: str, connections: int, statements: Statements) -> None:
        self._url = url
        self._statements = statements
        self._lasting = frozenset(statements.texts())
        self._places = ConnectionPlaces(connections)
        self._idle: list[Session] = []

    async def run(self, begin: Callable[[], Steps[T]], *, checked: bool = False, lane: str = "") -> T:
        """Drive the steps on one connection."""
        async with self._places.take(lane):
            try:
                return await self._run(begin())
            except psycopg.Error as error:
                raise refusal(error, self._url) from error

    async def _run(self, steps: Steps[T]) -> T:
        session = self._idle.pop() if self._idle else await self._connect()
        try:
            return await _answered(session.connection, session.drive(steps))
        finally:
            if not session.connection.closed:
                self._idle.append(session)

    async def close(self) -> None:
        """Close every connection."""
        while self._idle:
            await self._idle.pop().connection.close()

    async def _connect(self) -> Session:
        options: dict[str, Any] = {**CONNECT, **conninfo_to_dict(self._url), "autocommit": True}
        connection: Connection = await AsyncConnection.connect(**options)
        return await _answered(connection, self._open(connection))

    async def _open(self, connection: Connection) -> Session:
        """Prepare a connection. Behind a pooler, which invents process ids, settings last one transaction."""
        cursor = await connection.execute("SELECT pg_backend_pid()")
        direct = await cursor.fetchone() == (connection.info.backend_pid,)
        name = "pin_session" if direct else "pin_plan"
        if await self._can_notice_hang_up(connection):
            name += "_and_notice_hang_up"
        pin = self._statements(name)
        if not direct:
            return Session(connection, [*BEGIN, pin], [TRANSACTION.commit], [TRANSACTION.rollback])
        session = Session(connection, [self._statements("unpin_plan")], lasting=self._lasting)
        await session.pipeline.run([pin])
        return session

    async def _can_notice_hang_up(self, connection: Connection) -> bool:
        """True if the server supports the setting; it is tried for one statement only."""
        try:
            await connection.execute(self._statements("notice_hang_up").sql.encode())
        except (psycopg.errors.UndefinedObject, psycopg.errors.InvalidParameterValue):
            return False
        return True


class Session:
    """A connection, and the statements around a transaction unless all its statements are ``lasting``."""

    def __init__(
        self,
        connection: Connection,
        before: Sequence[Query],
        after: Sequence[Query] = (),
        undo: Sequence[Query] = (),
        lasting: frozenset[str] = frozenset(),
    ) -> None:
        self.connection = connection
        self.pipeline = Pipeline(connection, lasting)
        self._before = before
        self._after = after
        self._undo = undo
        self._lasting = lasting

    async def drive(self, steps: Steps[T]) -> T:
        """Drive the steps, which may continue after a lock timeout."""
        return await adrive(steps, self._answer)

    async def _answer(self, queries: list[Query]) -> list[Rows]:
        try:
            return await self._transact(queries)
        except LockNotAvailable as error:
            if self._undo:
                await self.pipeline.run(self._undo)
            raise Locked(str(refusal(error))) from error

    async def _transact(self, queries: Sequence[Query]) -> list[Rows]:
        if all(query.sql in self._lasting for query in queries):
            return await self.pipeline.run(queries)
        results = await self.pipeline.run([*self._before, *queries, *self._after])
        return results[len(self._before) : len(self._before) + len(queries)]


async def _answered(connection: Connection, work: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task[None]] = []
    timer = loop.call_later(ANSWER_SECONDS, lambda: ending.append(loop.create_task(_end(connection))))
    try:
        return await work
    except Locked:
        raise
    except BaseException as error:
        try:
            if isinstance(error, asyncio.CancelledError):
                await _cancel(connection)
        finally:
            await connection.close()
        if ending and isinstance(error, psycopg.Error):
            raise psycopg.OperationalError(f"no answer within {ANSWER_SECONDS:g} s") from error
        raise
    finally:
        timer.cancel()
        if ending:
            await connection.close()


async def _cancel(connection: Connection) -> None:
    """Cancel the statement: otherwise the server, once it has the locks, leases rows to nobody."""
    # Older versions of libpq cancel in a thread without a time limit.
    with suppress(psycopg.Error, TimeoutError):
        async with asyncio.timeout(CANCEL_SECONDS):
            await connection.cancel_safe(timeout=CANCEL_SECONDS)


async def _end(connection: Connection) -> None:
    await _cancel(connection)
    with suppress(psycopg.Error):
        hang_up(connection.fileno())
