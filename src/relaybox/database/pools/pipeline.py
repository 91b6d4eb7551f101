"""Sends the statements of one transaction to PostgreSQL in one write, through psycopg's libpq.

psycopg's pipeline yields to the event loop in between, and a process stopped there keeps its locks.
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

_TIME_LOADER: Any = psycopg.adapters.get_loader(
    psycopg.adapters.types["timestamptz"].oid, psycopg.pq.Format.TEXT
)


class Pipeline:
    """An exclusive connection, for one call at a time. It prepares ``lasting`` statements."""

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
        """Return the rows of each query. The connection stays usable after an error from the server."""
        known = len(self._names)
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
                # Nothing after the error was prepared.
                self._names = dict(islice(self._names.items(), known))
                raise error_from_result(result)
        return [self._rows(result) for result, wanted in zip(results, answers, strict=True) if wanted]

    def _look_now_and_then(self) -> None:
        """Start the timer that all exchanges share: a timer per exchange costs more."""
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = False
        if self._exchange is not None:
            self._exchange.look()
            self._look_now_and_then()

    def _send(self, query: Query) -> Sequence[bool]:
        """Send the query and return which of its answers hold rows."""
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
"""Seconds between checks of a silent socket: uvloop does not report one that was reset while idle."""


class _Exchange:
    def __init__(self, libpq: Any) -> None:
        self._libpq = libpq
        self._results: list[PGresult] = []

    async def results(self) -> list[PGresult]:
        """Return one result per statement, in order."""
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
        """Read input that the event loop did not report."""
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
                    raise psycopg.OperationalError("the connection ended in the middle of an answer")
                nothing = True
            elif result.status == ExecStatus.PIPELINE_SYNC:
                self._done.set_result(self._results)
                return
            else:
                nothing = False
                self._results.append(result)


class AnyTime(Loader):
    """Also loads times that Python cannot hold, such as infinity: they would fail the whole statement."""

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._load = _TIME_LOADER(oid, context).load

    def load(self, data: Buffer) -> datetime:
        """Return the time, or the nearer end of Python's calendar."""
        try:
            moment: datetime = self._load(data)
        except psycopg.DataError:
            text = bytes(data)
            return EARLIEST if text.startswith((b"-", b"0")) or text.endswith(b"BC") else LATEST
        return moment
