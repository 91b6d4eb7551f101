"""One round trip to PostgreSQL: statements that travel together in one transaction, through psycopg's libpq.

The driver's own pipeline takes a turn of the event loop for each statement, and a process that is stopped in
between keeps its locks. Here all of them leave in one write, and their answers are read as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

import psycopg
from psycopg import AsyncConnection, abc
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader, PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult
from psycopg.types.string import TextLoader

from relaybox.database.dialects import EARLIEST, LATEST
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Row

# The driver's own: the one in C where that is installed.
_TIME_LOADER: Any = psycopg.adapters.get_loader(
    psycopg.adapters.types["timestamptz"].oid, psycopg.pq.Format.TEXT
)


class Pipeline:
    """A connection that nobody else uses; one call at a time. ``lasting`` statements are prepared."""

    def __init__(self, connection: AsyncConnection[Any], lasting: Container[str] = ()) -> None:
        connection.adapters.register_loader("jsonb", TextLoader)
        self._libpq = connection.pgconn
        self._libpq.enter_pipeline_mode()
        self._lasting = lasting
        self._names: dict[tuple[str, tuple[int, ...]], bytes] = {}
        self._named = 0
        self._exchange: _Exchange | None = None
        self._looking = False
        self._values: abc.Transformer = Transformer(connection)
        self._any_values: abc.Transformer | None = None
        self._connection = connection
        self._encoding = connection.info.encoding

    async def run(self, queries: Sequence[Query]) -> list[list[Row]]:
        """The rows of each. After an error that the server answered the connection may go on."""
        known = len(self._names)
        # Of what is only prepared there is an answer, too.
        answers = [answer for query in queries for answer in self._send(query)]
        self._libpq.pipeline_sync()
        self._exchange = _Exchange(self._libpq)
        self._look_now_and_then()
        try:
            results = await self._exchange.results()
        finally:
            self._exchange = None
        for result in results:
            if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
                # What was to be prepared behind it is not.
                self._names = dict(islice(self._names.items(), known))
                raise error_from_result(result)
        return [self._rows(result) for result, wanted in zip(results, answers, strict=True) if wanted]

    def _look_now_and_then(self) -> None:
        """Have one timer for many exchanges: one for each would cost it more."""
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = False
        if self._exchange is not None:
            self._exchange.look()
            self._look_now_and_then()

    def _send(self, query: Query) -> Sequence[bool]:
        """Which of the answers to come are asked for."""
        values = self._values.dump_sequence(query.params, [PyFormat.AUTO] * len(query.params))
        types, formats = self._values.types or (), self._values.formats
        name = self._names.get((query.sql, types))
        if name is not None:
            self._libpq.send_query_prepared(name, values, formats)
            return (True,)
        sql = query.sql.encode(self._encoding)
        if query.sql not in self._lasting:
            self._libpq.send_query_params(sql, values, types, formats)
            return (True,)
        self._named += 1
        name = self._names[query.sql, types] = f"relaybox_{self._named}".encode()
        self._libpq.send_prepare(name, sql, types)
        self._libpq.send_query_prepared(name, values, formats)
        return (False, True)

    def _rows(self, result: PGresult) -> list[Row]:
        if not result.nfields:
            return []
        try:
            return _load(self._values, result)
        except psycopg.DataError:
            if self._any_values is None:
                self._connection.adapters.register_loader("timestamptz", AnyTime)
                self._any_values = Transformer(self._connection)
            return _load(self._any_values, result)


def _load(values: abc.Transformer, result: PGresult) -> list[Row]:
    values.set_pgresult(result)
    return values.load_rows(0, result.ntuples, tuple)


LOOK_SECONDS = 0.5
"""Seconds between two looks at a silent socket: uvloop calls no reader for one that was reset, such as that
of a session that the server ended while it was idle.
"""


class _Exchange:
    """Sends what is waiting to be sent, and reads answers up to the next sync."""

    def __init__(self, libpq: Any) -> None:
        self._libpq = libpq
        self._results: list[PGresult] = []

    async def results(self) -> list[PGresult]:
        """One of each statement, in their order."""
        loop = asyncio.get_running_loop()
        self._done: asyncio.Future[list[PGresult]] = loop.create_future()
        socket = self._libpq.socket
        loop.add_reader(socket, self._guarded, self._read)
        try:
            if self._libpq.flush():
                loop.add_writer(socket, self._guarded, self._write, loop, socket)
            return await self._done
        finally:
            loop.remove_reader(socket)
            loop.remove_writer(socket)

    def look(self) -> None:
        """Read what the loop may not have told of."""
        self._guarded(self._read)

    def _guarded(self, step: Any, *arguments: Any) -> None:
        if self._done.done():
            return
        try:
            step(*arguments)
        except Exception as error:
            self._done.set_exception(error)

    def _write(self, loop: asyncio.AbstractEventLoop, socket: int) -> None:
        if not self._libpq.flush():
            loop.remove_writer(socket)

    def _read(self) -> None:
        self._libpq.consume_input()
        nothing = False
        while not self._libpq.is_busy():
            result = self._libpq.get_result()
            if result is None:
                if nothing:
                    raise psycopg.OperationalError("the connection ended in the midst of an answer")
                nothing = True
            elif result.status == ExecStatus.PIPELINE_SYNC:
                self._done.set_result(self._results)
                return
            else:
                nothing = False
                self._results.append(result)


class AnyTime(Loader):
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
