"""Compare asyncpg with psycopg for the store: the store's own statements in bare loops.

psycopg sends every transaction as one pipeline, which is one round trip. asyncpg has no pipelines: a
transaction of one statement is one round trip, every other transaction takes several. Each pins its plan when
it connects, or in every transaction, as behind a pooler. ``python -m benchmarks.drivers``
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import msgspec
import psycopg
import sqlalchemy as sa

from benchmarks.harness import Sample, fill, interleave, outbox, report, run, server
from relaybox.database.dialects import POSTGRESQL
from relaybox.database.pools.pipeline import Pipeline
from relaybox.database.pools.postgresql import BEGIN
from relaybox.database.schema import Tables
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.transactions import TRANSACTION

Transaction: TypeAlias = Sequence[Query]
ID, KEY = 0, 9
"""Their positions among the columns of a claim."""
DESTINATION = "runner"
_json = msgspec.json.Encoder()


class Row(NamedTuple):
    """The values of a claimed row that a settle needs."""

    id: Any
    key: str | None
    token: UUID


class Loop(Protocol):
    """A bare driver that claims and settles."""

    async def claim(self, limit: int) -> Sequence[Row]:
        """Lease rows."""
        ...

    async def settle(self, rows: Sequence[Row]) -> None:
        """Mark them delivered."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class Queries:
    """The store's statements, with the parameters of a claim and of a settle."""

    def __init__(self, tables: Tables, *, ordered: bool) -> None:
        self._sql = Statements(tables, POSTGRESQL, "numeric")
        self._ordered = ordered
        self.lasting = frozenset(self._sql.texts())
        self.pin, self.pin_session = self._sql("pin_plan"), self._sql("pin_session")

    def claim(self, limit: int, token: UUID) -> Transaction:
        """Return the transaction of one claim."""
        lease = {
            "destination": DESTINATION,
            "owner": "bench",
            "seconds": 60.0,
            "token": token,
            "probe": False,
            "suspects": True,
        }
        if not self._ordered:
            return [self._sql("claim", limit=limit, **lease)]
        claim = self._sql("claim_ordered", limit=limit, spread=limit, run=limit, block=True, **lease)
        return [self._lock(), claim]

    def settle(self, rows: Sequence[Row], array: Callable[[Iterable[Any]], Any]) -> list[Transaction]:
        """Return the transactions that settle claimed rows as delivered."""
        ids, tokens = (array(values) for values in ([row.id for row in rows], [row.token for row in rows]))
        deliver = [self._sql("deliver", ids=ids, tokens=tokens, count=len(rows))]
        if not self._ordered:
            return [deliver]
        keys = _json.encode(list(dict.fromkeys(row.key for row in rows))).decode()
        heads = self._sql("make_heads_due", destination=DESTINATION, keys=keys, block=True)
        return [deliver, [self._lock(), heads]]

    def rows(self, results: Sequence[Sequence[Any]], token: UUID) -> Sequence[Row]:
        """Return the claimed rows among the results of a claim."""
        # The first column of an ordered claim is the number of rows that it parked.
        first = 1 if self._ordered else 0
        claimed = [row for row in results[-1] if row[first + ID] is not None]
        return [Row(row[first + ID], row[first + KEY], token) for row in claimed]

    def _lock(self) -> Query:
        return self._sql("lock_destination", destination=DESTINATION)


class PsycopgLoop:
    """One pipeline per transaction, as the store sends it."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], queries: Queries, at_connect: bool) -> None:
        self._connection = connection
        self._queries = queries
        self._pipeline = Pipeline(connection, queries.lasting if at_connect else ())
        self._around = ([], []) if at_connect else ([*BEGIN, queries.pin], [TRANSACTION.commit])

    @classmethod
    async def open(cls, url: str, tables: Tables, *, ordered: bool, at_connect: bool = True) -> PsycopgLoop:
        """Connect."""
        connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
        loop = cls(connection, Queries(tables, ordered=ordered), at_connect)
        if at_connect:
            await loop._pipeline.run([loop._queries.pin_session])
        return loop

    async def claim(self, limit: int) -> Sequence[Row]:
        """Lease rows."""
        token = uuid4()
        return self._queries.rows(await self._run(self._queries.claim(limit, token)), token)

    async def settle(self, rows: Sequence[Row]) -> None:
        """Mark them delivered."""
        for transaction in self._queries.settle(rows, _text):
            await self._run(transaction)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def _run(self, transaction: Transaction) -> list[list[Any]]:
        before, after = self._around
        results = await self._pipeline.run([*before, *transaction, *after])
        return results[len(before) : len(before) + len(transaction)]


def _text(values: Iterable[UUID]) -> str:
    return f"{{{','.join(value.hex for value in values)}}}"


class AsyncpgLoop:
    """One message per statement."""

    def __init__(self, connection: Any, queries: Queries, at_connect: bool) -> None:
        self._connection = connection
        self._queries = queries
        self._at_connect = at_connect

    @classmethod
    async def open(cls, url: str, tables: Tables, *, ordered: bool, at_connect: bool = True) -> AsyncpgLoop:
        """Connect."""
        connection = await asyncpg.connect(url)
        loop = cls(connection, Queries(tables, ordered=ordered), at_connect)
        if at_connect:
            await connection.execute(loop._queries.pin_session.sql)
        return loop

    async def claim(self, limit: int) -> Sequence[Row]:
        """Lease rows."""
        token = uuid4()
        return self._queries.rows(await self._run(self._queries.claim(limit, token)), token)

    async def settle(self, rows: Sequence[Row]) -> None:
        """Mark them delivered."""
        for transaction in self._queries.settle(rows, tuple):
            await self._run(transaction)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def _run(self, transaction: Transaction) -> list[Sequence[Any]]:
        if self._at_connect and len(transaction) == 1:
            return [await self._connection.fetch(transaction[0].sql, *transaction[0].params)]
        # Without parameters several statements fit into one message.
        await self._connection.execute("BEGIN" if self._at_connect else f"BEGIN; {self._queries.pin.sql}")
        results = [await self._connection.fetch(query.sql, *query.params) for query in transaction]
        await self._connection.execute("COMMIT")
        return results


@contextmanager
def delayed(url: str, seconds: float) -> Iterator[str]:
    """Yield the URL of a proxy, in a process of its own, that adds ``seconds`` to every round trip."""
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
                # Use threads: asyncio's timers are no finer than a millisecond.
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
    """Return how to open each variant; the first is the one of the store."""
    return {
        f"{name}, pinned {when}": functools.partial(loop.open, ordered=ordered, at_connect=at_connect)
        for when, at_connect in (("at connect", True), ("per transaction", False))
        for name, loop in (("psycopg", PsycopgLoop), ("asyncpg", AsyncpgLoop))
    }


def drain(loop: Loop, batch: int, batches: int) -> Callable[[], Awaitable[float]]:
    """Claim and settle some batches; return events per second."""

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
    """Return events per second of each variant."""
    rounds, batches = 10, max(1, rows // 10 // batch)
    makes = variants(ordered=ordered)
    fill(url, len(makes) * (rounds + 1) * batches * batch, keys=1000 if ordered else 0)
    with delayed(url, delay) as through:
        loops = {name: await make(through, tables) for name, make in makes.items()}
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
