"""faststream-outbox: asyncpg, few workers, large fetches and batched deletes, its autovacuum settings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from benchmarks.harness import PAYLOAD
from benchmarks.peers.base import Arrivals, MeasuredPeer, check, emit_steadily, lanes, settle_down
from benchmarks.process import begin

QUEUE = "order.paid"
FILL = 1_000


# docs/concepts/performance.md and docs/usage/subscriber.md of faststream-outbox: each knob below.
@dataclass(frozen=True)
class FastStreamOutbox:
    """One configuration."""

    max_workers: int
    fetch_batch_size: int
    terminal_flush_batch_size: int
    min_fetch_interval: float = 0.01

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name):g}" for field in fields(self))

    async def drain(self, url: str, rows: int, keys: int) -> float:
        """Drain until every row is deleted."""
        seen, done = 0, asyncio.Event()
        async with self._open(url, self.max_workers + 1) as (engine, broker):
            await self._fill(engine, broker, rows)
            settle_down(url)

            @self._subscriber(broker)
            async def handle(body: dict) -> None:  # type: ignore[type-arg]
                nonlocal seen
                seen += 1
                if seen == rows:
                    done.set()

            began = begin()
            await broker.start()
            await done.wait()
            await broker.stop()
            spent = time.monotonic() - began
            async with engine.connect() as connection:
                left = await connection.scalar(sa.text("SELECT count(*) FROM outbox"))
        check(seen, rows - left, rows)
        return rows / spent

    async def receive(self, url: str, count: int, ready: Callable[[], None]) -> dict[int, float]:
        """Wake by the notifications of its ``publish``."""
        arrivals = Arrivals(count)
        async with self._open(url, self.max_workers + 1) as (_, broker):

            @self._subscriber(broker)
            async def handle(body: dict) -> None:  # type: ignore[type-arg]
                arrivals.note(body["n"])

            await broker.start()
            ready()
            await arrivals.complete.wait()
            await broker.stop()
        return arrivals.times

    async def emit(self, url: str, rate: float, count: int) -> list[float]:
        """Emit in the transaction of an asynchronous SQLAlchemy session."""
        async with self._open(url, lanes(rate)) as (engine, broker):
            sessions = async_sessionmaker(engine, expire_on_commit=False)

            async def emit(n: int) -> None:
                async with sessions() as session, session.begin():
                    await broker.publish({"n": n, **PAYLOAD}, queue=QUEUE, session=session)

            return await emit_steadily(rate, count, [emit] * lanes(rate))

    def _subscriber(self, broker: Any) -> Any:
        return broker.subscriber(
            QUEUE,
            max_workers=self.max_workers,
            fetch_batch_size=self.fetch_batch_size,
            terminal_flush_batch_size=self.terminal_flush_batch_size,
            min_fetch_interval=self.min_fetch_interval,
        )

    @asynccontextmanager
    async def _open(self, url: str, connections: int) -> AsyncIterator[tuple[Any, Any]]:
        from faststream_outbox import OutboxBroker, make_outbox_table, outbox_autovacuum_ddl

        metadata = sa.MetaData()
        table = make_outbox_table(metadata, table_name="outbox")
        engine = create_async_engine(
            sa.make_url(url).set(drivername="postgresql+asyncpg"), pool_size=connections
        )
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
            await connection.execute(sa.text(outbox_autovacuum_ddl("outbox", vacuum_cost_delay=0)))
        try:
            yield engine, OutboxBroker(engine, outbox_table=table, logger=None)
        finally:
            await engine.dispose()

    async def _fill(self, engine: Any, broker: Any, rows: int) -> None:
        async with engine.begin() as connection:
            await connection.execute(sa.text("TRUNCATE outbox"))
            for begun in range(0, rows, FILL):
                bodies = [PAYLOAD] * min(FILL, rows - begun)
                await broker.publish_batch(*bodies, queue=QUEUE, session=connection)


def peer() -> MeasuredPeer:
    """Return faststream-outbox, which deletes its rows."""
    setups = [
        FastStreamOutbox(workers, fetch, flush)
        for workers in (1, 4)
        for fetch, flush in ((100, 100), (500, 100), (1000, 500))
    ]
    return MeasuredPeer("faststream-outbox", ordered=False, keeps=False, setups=setups)


def prompt() -> MeasuredPeer:
    """Return faststream-outbox for short waits; its ``publish`` notifies by default."""
    setups = [FastStreamOutbox(*both, 100, 0.001) for both in ((1, 100), (4, 100), (1, 10))]
    return MeasuredPeer("faststream-outbox", ordered=False, keeps=False, setups=setups)
