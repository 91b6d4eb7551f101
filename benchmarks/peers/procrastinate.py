"""Procrastinate: several workers with many jobs at once; keys are its locks."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from benchmarks.harness import PAYLOAD, run
from benchmarks.peers.base import Arrivals, MeasuredPeer, check, emit_steadily, lanes, settle_down
from benchmarks.process import begin

TASK = "order.paid"
FILL = """
INSERT INTO procrastinate_jobs (queue_name, task_name, lock, args)
SELECT 'default', 'order.paid', 'Order:' || n %% nullif(%(keys)s, 0), %(args)s
FROM generate_series(0, %(rows)s - 1) AS n"""


# docs/howto/concurrency.md of Procrastinate: several workers, concurrency; delete_jobs: run_worker_async.
@dataclass(frozen=True)
class Procrastinate:
    """One configuration."""

    workers: int
    concurrency: int
    keeps: bool

    @property
    def connections(self) -> int:
        """Return the pool's connections: to fetch, to settle and to listen."""
        return 3 * self.workers

    def __str__(self) -> str:
        gone = "" if self.keeps else ", delete_jobs=successful"
        return f"workers={self.workers}, concurrency={self.concurrency}, pool of {self.connections}{gone}"

    async def drain(self, url: str, rows: int, keys: int) -> float:
        """Drain until every job has succeeded."""
        seen = 0
        async with self._open(url, self.connections) as app:
            run(url, "TRUNCATE procrastinate_jobs CASCADE")
            run(url, FILL, {"keys": keys, "args": json.dumps(PAYLOAD), "rows": rows})
            settle_down(url)

            @app.task(name=TASK)
            async def handle(**payload: Any) -> None:
                nonlocal seen
                seen += 1

            began = begin()
            # A worker that does not wait also ends when every remaining job waits for a lock.
            while seen < rows:
                await self._work(app, wait=False, listen_notify=False)
            spent = time.monotonic() - began
        with psycopg.connect(url) as connection:
            counts = "SELECT count(*), count(*) FILTER (WHERE status = 'succeeded') FROM procrastinate_jobs"
            kept, done = connection.execute(counts).fetchone() or (0, 0)
        check(seen, done if self.keeps else rows - kept, rows)
        return rows / spent

    async def receive(self, url: str, count: int, ready: Callable[[], None]) -> dict[int, float]:
        """Wake by its trigger."""
        arrivals = Arrivals(count)
        async with self._open(url, self.connections) as app:

            @app.task(name=TASK)
            async def handle(n: int, **payload: Any) -> None:
                arrivals.note(n)

            ready()
            workers = asyncio.create_task(self._work(app, wait=True, listen_notify=True))
            await arrivals.complete.wait()
            workers.cancel()
            await asyncio.wait([workers])
        return arrivals.times

    async def emit(self, url: str, rate: float, count: int) -> list[float]:
        """Emit on a psycopg connection, in its transaction (docs/howto/production/external_connection.md)."""
        async with AsyncExitStack() as stack:
            app = await stack.enter_async_context(self._open(url, 1))

            @app.task(name=TASK)
            async def handle(**payload: Any) -> None: ...

            async def emit(connection: psycopg.AsyncConnection[Any], n: int) -> None:
                await handle.configure(connection=connection).defer_async(n=n, **PAYLOAD)
                await connection.commit()

            opened = [await psycopg.AsyncConnection.connect(url) for _ in range(lanes(rate))]
            for one in opened:
                await stack.enter_async_context(one)
            return await emit_steadily(rate, count, [functools.partial(emit, one) for one in opened])

    async def _work(self, app: Any, **options: Any) -> None:
        options |= {
            "concurrency": self.concurrency,
            "delete_jobs": "never" if self.keeps else "successful",
            "install_signal_handlers": False,
        }
        await asyncio.gather(*(app.run_worker_async(**options) for _ in range(self.workers)))

    @asynccontextmanager
    async def _open(self, url: str, connections: int) -> AsyncIterator[Any]:
        from procrastinate import App, PsycopgConnector

        connector = PsycopgConnector(conninfo=url, min_size=connections, max_size=connections)
        app = App(connector=connector)
        async with app.open_async():
            with psycopg.connect(url) as connection:
                [there] = connection.execute("SELECT to_regclass('procrastinate_jobs')").fetchone() or [None]
            if there is None:
                await app.schema_manager.apply_schema_async()
            yield app


def peer(*, keeps: bool) -> MeasuredPeer:
    """Return Procrastinate, which keeps its jobs or deletes successful ones."""
    setups = [Procrastinate(workers, at_once, keeps) for workers, at_once in ((4, 30), (8, 10))]
    return MeasuredPeer("procrastinate", ordered=True, keeps=keeps, setups=setups, trial=500)


def prompt() -> MeasuredPeer:
    """Return Procrastinate for short waits; its workers listen to its trigger."""
    setups = [Procrastinate(workers, 10, keeps=False) for workers in (4, 8)]
    return MeasuredPeer("procrastinate", ordered=True, keeps=False, setups=setups)
