"""asyncpg against psycopg for the store: the very statements of the store in bare loops.

psycopg sends every operation as one pipeline, which is one round trip and one transaction. asyncpg has no
pipelines: an operation of one statement is one round trip, every other one a transaction in several.
``python -m benchmarks.drivers``
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias
from uuid import uuid4

import asyncpg
import msgspec
import psycopg
import sqlalchemy as sa
from psycopg.types.string import TextLoader

from benchmarks.harness import Sample, fill, interleave, outbox, report, run, server
from relaybox.schema import Tables
from relaybox.stores.dialects import POSTGRESQL
from relaybox.stores.statements import ParamStyle, Query, Statements

Row: TypeAlias = Sequence[Any]
ID, KEY, ATTEMPTS, TOKEN, OWNER = 0, 10, 13, 17, 18
DESTINATION = "runner"
PINNED = {"enable_seqscan": "off", "enable_bitmapscan": "off", "enable_nestloop": "off", "jit": "off"}
_json = msgspec.json.Encoder()


class Loop(Protocol):
    """A bare driver that claims and settles."""

    async def claim(self, limit: int) -> Sequence[Row]:
        """Lease rows."""
        ...

    async def settle(self, rows: Sequence[Row]) -> None:
        """Write that they were delivered."""
        ...

    async def close(self) -> None:
        """Give up the connection."""
        ...


class Queries:
    """The store's statements for one parameter style, with the parameters of a claim and of a settle."""

    def __init__(self, tables: Tables, style: ParamStyle, *, ordered: bool) -> None:
        self._sql = Statements(tables, POSTGRESQL, style)
        self.ordered = ordered
        self.pin = self._sql("pin_plan")

    def claim(self, limit: int) -> list[Query]:
        """The statements of one claim."""
        lease = {
            "destination": DESTINATION,
            "owner": "bench",
            "seconds": 60.0,
            "token": uuid4(),
            "probe": False,
            "suspects": True,
        }
        if not self.ordered:
            return [self._sql("claim", limit=limit, **lease)]
        lock = self._sql("lock_destination", destination=DESTINATION)
        return [lock, self._sql("claim_ordered", limit=limit, spread=limit, block=True, **lease)]

    def settle(self, rows: Sequence[Row]) -> list[Query]:
        """The statements that settle claimed rows as delivered."""
        items = [
            {
                "id": row[ID],
                "token": row[TOKEN],
                "attempt": row[ATTEMPTS],
                "relay": row[OWNER],
                "status": "delivered",
                "given_back": 0,
            }
            for row in rows
        ]
        settle = self._sql("settle", items=_json.encode(items).decode())
        if not self.ordered:
            return [settle]
        keys = _json.encode(list(dict.fromkeys(row[KEY] for row in rows))).decode()
        lock = self._sql("lock_destination", destination=DESTINATION)
        return [lock, settle, self._sql("make_heads_due", destination=DESTINATION, keys=keys, block=True)]

    def rows(self, results: Sequence[Sequence[Row]]) -> Sequence[Row]:
        """The claimed rows among the results of a claim."""
        return [row[1:] for row in results[-1] if row[1] is not None] if self.ordered else results[-1]


class PsycopgLoop:
    """One pipeline an operation, as the store sends it."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], queries: Queries) -> None:
        self._connection = connection
        self._queries = queries

    @classmethod
    async def open(cls, url: str, tables: Tables, *, ordered: bool) -> PsycopgLoop:
        """Connect."""
        connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
        connection.adapters.register_loader("jsonb", TextLoader)
        return cls(connection, Queries(tables, "format", ordered=ordered))

    async def claim(self, limit: int) -> Sequence[Row]:
        """Lease rows."""
        return self._queries.rows(await self._pipeline(self._queries.claim(limit)))

    async def settle(self, rows: Sequence[Row]) -> None:
        """Write that they were delivered."""
        await self._pipeline(self._queries.settle(rows))

    async def close(self) -> None:
        """Give up the connection."""
        await self._connection.close()

    async def _pipeline(self, queries: Sequence[Query]) -> list[list[Row]]:
        async with self._connection.pipeline():
            await self._connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
            await self._connection.execute(self._queries.pin.sql)
            cursors = [await self._connection.execute(query.sql, query.params) for query in queries]
            await self._connection.execute("COMMIT")
        return [list(await cursor.fetchall()) if cursor.description else [] for cursor in cursors]


class AsyncpgLoop:
    """The plan pinned when the connection is made (``at_connect``), or ahead of every operation."""

    def __init__(self, connection: Any, queries: Queries, *, at_connect: bool) -> None:
        self._connection = connection
        self._queries = queries
        self._at_connect = at_connect

    @classmethod
    async def open(cls, url: str, tables: Tables, *, ordered: bool, at_connect: bool) -> AsyncpgLoop:
        """Connect."""
        settings = PINNED if at_connect else {}
        connection = await asyncpg.connect(url, server_settings=settings)
        return cls(connection, Queries(tables, "numeric", ordered=ordered), at_connect=at_connect)

    async def claim(self, limit: int) -> Sequence[Row]:
        """Lease rows."""
        return self._queries.rows(await self._execute(self._queries.claim(limit)))

    async def settle(self, rows: Sequence[Row]) -> None:
        """Write that they were delivered."""
        await self._execute(self._queries.settle(rows))

    async def close(self) -> None:
        """Give up the connection."""
        await self._connection.close()

    async def _execute(self, queries: Sequence[Query]) -> list[Sequence[Row]]:
        if self._at_connect and len(queries) == 1:
            return [await self._connection.fetch(queries[0].sql, *queries[0].params)]
        # Without parameters several statements fit into one message.
        await self._connection.execute("BEGIN" if self._at_connect else f"BEGIN; {self._queries.pin.sql}")
        results = [await self._connection.fetch(query.sql, *query.params) for query in queries]
        await self._connection.execute("COMMIT")
        return results


@contextmanager
def delayed(url: str, seconds: float) -> Iterator[str]:
    """The URL of a proxy, a process of its own, that adds ``seconds`` to every round trip."""
    if not seconds:
        yield url
        return
    there = sa.make_url(url)
    ours, theirs = get_context("spawn").Pipe()
    arguments = ((there.host, there.port), seconds / 2, theirs)
    process = get_context("spawn").Process(target=_proxy, args=arguments, daemon=True)
    process.start()
    try:
        yield there.set(port=ours.recv()).render_as_string(hide_password=False)
    finally:
        process.terminate()
        process.join()


def _proxy(server: tuple[str, int], delay: float, ready: Pipe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ready.send(listener.getsockname()[1])
        while True:
            client, _ = listener.accept()
            upstream = socket.create_connection(server)
            for pair in ((client, upstream), (upstream, client)):
                # Threads and not asyncio, whose timers are no finer than a millisecond.
                threading.Thread(target=_carry, args=(*pair, delay), daemon=True).start()


def _carry(source: socket.socket, sink: socket.socket, delay: float) -> None:
    flying: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def land() -> None:
        while True:
            due, data = flying.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            if not data:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(data)

    threading.Thread(target=land, daemon=True).start()
    while data := source.recv(1 << 20):
        flying.put((time.perf_counter() + delay, data))
    flying.put((time.perf_counter(), b""))


Make: TypeAlias = Callable[[str, Tables], Awaitable[Loop]]


def variants(*, ordered: bool) -> dict[str, Make]:
    """How each variant is opened."""
    return {
        "psycopg, pipeline": lambda url, tables: PsycopgLoop.open(url, tables, ordered=ordered),
        "asyncpg, pinned at connect": lambda url, tables: AsyncpgLoop.open(
            url, tables, ordered=ordered, at_connect=True
        ),
        "asyncpg, pinned per transaction": lambda url, tables: AsyncpgLoop.open(
            url, tables, ordered=ordered, at_connect=False
        ),
    }


def drain(loop: Loop, batch: int, batches: int) -> Callable[[], Awaitable[float]]:
    """Claims and settles some batches; returns events a second."""

    async def take() -> float:
        count, start = 0, time.perf_counter()
        for _ in range(batches):
            rows = await loop.claim(batch)
            await loop.settle(rows)
            count += len(rows)
        if count != batch * batches:
            raise RuntimeError(f"{count} rows claimed where {batch * batches} were due")
        return count / (time.perf_counter() - start)

    return take


async def measure(
    url: str, tables: Tables, *, ordered: bool, batch: int, delay: float, rows: int
) -> dict[str, Sample]:
    """Events a second of each variant."""
    rounds, batches = 10, max(1, rows // 10 // batch)
    fill(url, 3 * (rounds + 1) * batches * batch, keys=1000 if ordered else 0)
    with delayed(url, delay) as through:
        loops = {name: await make(through, tables) for name, make in variants(ordered=ordered).items()}
        try:
            return await interleave({n: drain(loop, batch, batches) for n, loop in loops.items()}, rounds)
        finally:
            for loop in loops.values():
                await loop.close()


async def main(version: str, rows: int) -> None:
    """Measure every combination and print the table."""
    lines: list[list[str]] = []
    facts: list[dict[str, Any]] = []
    with server(version) as server_url:
        for delay in (0.0, 0.0005, 0.001):
            for ordered in (False, True):
                for batch in (100, 1000):
                    with outbox(server_url) as (url, tables):
                        run(url, "INSERT INTO outbox_destination (name) VALUES ('runner')")
                        found = await measure(
                            url, tables, ordered=ordered, batch=batch, delay=delay, rows=rows
                        )
                    first = next(iter(found.values()))
                    case = f"{delay * 1000:g} ms, {'ordered' if ordered else 'unordered'}, {batch}"
                    for name, sample in found.items():
                        lines.append([case, name, sample.show(), sample.over(first).show(2)])
                        facts.append(
                            {"delay_ms": delay * 1000, "ordered": ordered, "batch": batch, "variant": name}
                            | {"events_per_second": sample.median, "ratio": sample.over(first).median}
                        )
    columns = ["added delay, order, batch", "driver", "events/s", "× psycopg"]
    report(f"drivers on PostgreSQL {version}", columns, lines, {"results": facts})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postgres", choices=["18", "15"], default="18")
    parser.add_argument("--rows", type=int, default=20_000, help="per variant and case")
    chosen = parser.parse_args()
    asyncio.run(main(chosen.postgres, chosen.rows))
