"""PostgreSQL through psycopg: every yield of the steps is one pipeline: one round trip, one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.string import TextLoader

from relaybox.connect import hang_up
from relaybox.schema import Tables
from relaybox.stores.dialects import EARLIEST, LATEST, POSTGRESQL, refusal
from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Query, Statements
from relaybox.stores.steps import OneStatement, Row, Steps, StoreSteps

T = TypeVar("T")
# The driver's own: the one in C where that is installed.
_TIME_LOADER: Any = psycopg.adapters.get_loader(
    psycopg.adapters.types["timestamptz"].oid, psycopg.pq.Format.TEXT
)
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


def open_store(url: str, tables: Tables, *, connections: int = 2) -> SqlStore:
    """A store that holds at most ``connections`` connections."""
    statements = Statements(tables, POSTGRESQL, "format")
    steps = StoreSteps(statements, POSTGRESQL, OneStatement(statements))
    return SqlStore(steps, Psycopg(url, connections, statements("pin_plan")))


class Psycopg:
    """A few psycopg connections, made when they are needed. ``preamble`` goes ahead of every pipeline.

    One that failed or whose caller was cancelled is closed; so a database that is away is told of at once,
    and one that came back is found by the next call.
    """

    def __init__(self, url: str, connections: int, preamble: Query) -> None:
        self._url = url
        self._preamble = preamble
        self._places = asyncio.Semaphore(connections)
        self._idle: list[Connection] = []

    async def run(self, begin: Callable[[], Steps[T]], *, checked: bool = False) -> T:
        """Drive the steps on one connection."""
        try:
            async with self._places:
                connection = self._idle.pop() if self._idle else await self._connect()
                result = await _answered(connection, self._drive(connection, begin()))
                self._idle.append(connection)
                return result
        except psycopg.Error as error:
            raise refusal(error) from error

    async def close(self) -> None:
        """Give up every connection."""
        while self._idle:
            await self._idle.pop().close()

    async def _drive(self, connection: Connection, steps: Steps[T]) -> T:
        try:
            queries = next(steps)
            while True:
                queries = steps.send(await self._pipeline(connection, queries))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def _connect(self) -> Connection:
        options: dict[str, Any] = {
            **CONNECT,
            **conninfo_to_dict(self._url),
            "autocommit": True,
        }
        connection: Connection = await AsyncConnection.connect(**options)
        connection.adapters.register_loader("jsonb", TextLoader)
        connection.adapters.register_loader("timestamptz", _AnyTime)
        if await _answered(connection, _pooled(connection)):
            connection.prepare_threshold = None
        return connection

    async def _pipeline(self, connection: Connection, queries: Sequence[Query]) -> list[list[Row]]:
        async with connection.pipeline() as pipeline:
            with _gathered(pipeline):
                # Said, not presumed: the database's or the role's default may be another.
                await connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
                await connection.execute(self._preamble.sql)
                cursors = [await connection.execute(query.sql, query.params) for query in queries]
            await connection.execute("COMMIT")
        return [list(await cursor.fetchall()) if cursor.description else [] for cursor in cursors]


class _AnyTime(Loader):
    """Also of a time that Python cannot hold, such as infinity, which would fail the whole statement."""

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._load = _TIME_LOADER(oid, context).load

    def load(self, data: Buffer) -> datetime:
        """The time, else the end of Python's calendar that is nearer to it."""
        try:
            moment: datetime = self._load(data)
        except psycopg.DataError:
            text = bytes(data)
            return EARLIEST if text.startswith((b"-", b"0")) or text.endswith(b"BC") else LATEST
        return moment


async def _answered(connection: Connection, work: Coroutine[Any, Any, T]) -> T:
    """The result of what is done on the connection, which is given up when it fails or takes too long."""
    timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, _hang_up, connection)
    try:
        return await work
    except BaseException:
        await connection.close()
        raise
    finally:
        timer.cancel()


async def _pooled(connection: Connection) -> bool:
    """Whether its sessions may change: a pooler invents the process number that a server would tell.

    A statement that is prepared stays with the session, where another client has one of the same name.
    """
    cursor = await connection.execute("SELECT pg_backend_pid()")
    return await cursor.fetchone() != (connection.info.backend_pid,)


def _hang_up(connection: Connection) -> None:
    with suppress(psycopg.Error):
        hang_up(connection.fileno())


@contextmanager
def _gathered(pipeline: Any) -> Iterator[None]:
    """Let statements wait for the one behind the block, so that all of them leave at once.

    The driver would send each by itself, with whatever else the event loop has to do in between; a process
    that is stopped there would keep its locks.
    """
    pipeline._communicate_gen = _nothing
    try:
        yield
    finally:
        del pipeline._communicate_gen


def _nothing() -> Generator[Any, Any, None]:
    yield from ()
