"""PgQueuer: large batches, its autovacuum settings, all of its tables durable."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import asyncpg

from benchmarks.peers.base import Arrivals, MeasuredPeer, body, check, emit_steadily, lanes, settle_down
from benchmarks.process import begin

ENTRYPOINT = "order.paid"


# docs/guides/performance-tuning.md of PgQueuer: batch_size, drivers, the durable default, "pgq autovac".
@dataclass(frozen=True)
class PgQueuer:
    """One configuration."""

    batch_size: int
    pooled: bool

    def __str__(self) -> str:
        return f"batch_size={self.batch_size}, asyncpg {'pool' if self.pooled else 'connection'}"

    async def drain(self, url: str, rows: int, keys: int) -> float:
        """Drain until every job is out of the queue and in the log."""
        async with AsyncExitStack() as stack:
            queue, driver = await self._open(url, stack)
            await self._fill(queue.queries, rows)
            settle_down(url)
            seen = 0

            @queue.entrypoint(ENTRYPOINT)
            async def handle(job: Any) -> None:
                nonlocal seen
                json.loads(job.payload)
                seen += 1
                if seen == rows:
                    queue.shutdown.set()

            began = begin()
            await queue.run(batch_size=self.batch_size, dequeue_timeout=timedelta(seconds=1))
            spent = time.monotonic() - began
            [left] = await driver.fetch("SELECT count(*) AS count FROM pgqueuer")
        check(seen, rows - left["count"], rows)
        return rows / spent

    async def receive(self, url: str, count: int, ready: Callable[[], None]) -> dict[int, float]:
        """Wake by its trigger."""
        arrivals = Arrivals(count)
        async with AsyncExitStack() as stack:
            queue, _ = await self._open(url, stack)

            @queue.entrypoint(ENTRYPOINT)
            async def handle(job: Any) -> None:
                if arrivals.note(json.loads(job.payload)["n"]):
                    queue.shutdown.set()

            ready()
            await queue.run(batch_size=self.batch_size, dequeue_timeout=timedelta(seconds=1))
        return arrivals.times

    async def emit(self, url: str, rate: float, count: int) -> list[float]:
        """Emit on an asyncpg connection, in its transaction."""
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        async def emit(connection: Any, queries: Any, n: int) -> None:
            async with connection.transaction():
                await queries.enqueue(ENTRYPOINT, body(n))

        opened = [await asyncpg.connect(url) for _ in range(lanes(rate))]
        try:
            queries = [Queries(AsyncpgDriver(one)) for one in opened]
            emitters = [functools.partial(emit, *both) for both in zip(opened, queries, strict=True)]
            return await emit_steadily(rate, count, emitters)
        finally:
            for one in opened:
                await one.close()

    async def _open(self, url: str, stack: AsyncExitStack) -> tuple[Any, Any]:
        from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
        from pgqueuer.qm import QueueManager
        from pgqueuer.queries import Queries

        driver: Any
        if self.pooled:
            pool = await stack.enter_async_context(asyncpg.create_pool(url, min_size=2, max_size=5))
            driver = AsyncpgPoolDriver(pool)
        else:
            connection = await asyncpg.connect(url)
            stack.push_async_callback(connection.close)
            driver = AsyncpgDriver(connection)
        queries = Queries(driver)
        await queries.uninstall()
        await queries.install()
        await queries.optimize_autovacuum()
        return QueueManager(queries), driver

    async def _fill(self, queries: Any, rows: int) -> None:
        step = 5_000
        for begun in range(0, rows, step):
            count = min(step, rows - begun)
            await queries.enqueue([ENTRYPOINT] * count, [body()] * count, [0] * count)


def peer() -> MeasuredPeer:
    """Return PgQueuer, which deletes its rows and logs them."""
    setups = [PgQueuer(batch_size, pooled) for batch_size in (100, 500, 1000) for pooled in (True, False)]
    return MeasuredPeer("pgqueuer", ordered=False, keeps=False, setups=setups)


def prompt() -> MeasuredPeer:
    """Return PgQueuer for short waits; it always has its trigger."""
    setups = [PgQueuer(batch_size, pooled) for batch_size, pooled in ((10, False), (100, False), (10, True))]
    return MeasuredPeer("pgqueuer", ordered=False, keeps=False, setups=setups)
