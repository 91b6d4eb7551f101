"""txoutbox: a pool, no timeout per message, strict order only with keys; woken by its trigger."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import asyncpg

from benchmarks.peers.base import Arrivals, MeasuredPeer, body, check, emit_steadily, lanes, settle_down
from benchmarks.process import begin

CHANNEL = "outbox"
FILL = """
INSERT INTO outbox (topic, key, payload, headers)
SELECT 'order.paid', 'Order:' || n % nullif($1::int, 0), $2::bytea, '{}'
FROM generate_series(0, $3::int - 1) AS n"""


# README of txoutbox: "Configuration", "Not polling: LISTEN/NOTIFY", and strict_ordering=False without keys.
# After a batch that is not full it pauses for poll_min, unless the trigger wakes it.
@dataclass(frozen=True)
class TxOutbox:
    """One configuration."""

    batch_size: int
    concurrency: int
    keeps: bool
    poll_min: float | None = None
    """``None``: the default, and no trigger."""

    def __str__(self) -> str:
        polling = "" if self.poll_min is None else f", poll_min={self.poll_min:g}, LISTEN/NOTIFY"
        gone = "" if self.keeps else ", delete_on_ack"
        return f"batch_size={self.batch_size}, concurrency={self.concurrency}{gone}{polling}"

    async def drain(self, url: str, rows: int, keys: int) -> float:
        """Drain until every row is acknowledged."""
        from txoutbox.adapters.postgres import PostgresStorage

        async with asyncpg.create_pool(url, min_size=2, max_size=4) as pool:
            storage = PostgresStorage(pool, strict_ordering=keys > 0, delete_on_ack=not self.keeps)
            await storage.create_schema()
            await pool.execute("TRUNCATE outbox")
            await pool.execute(FILL, keys, body(), rows)
            settle_down(url)
            seen = 0

            async def publish(message: Any) -> None:
                nonlocal seen
                message.json()
                seen += 1
                if seen == rows:
                    relay.stop()

            relay = self._relay(storage, publish)
            began = begin()
            await relay.run()
            spent = time.monotonic() - began
            left = await pool.fetchval("SELECT count(*) FROM outbox WHERE status <> 'done'")
            kept = await pool.fetchval("SELECT count(*) FROM outbox")
        check(seen, kept - left if self.keeps else rows - kept, rows)
        return rows / spent

    async def receive(self, url: str, count: int, ready: Callable[[], None]) -> dict[int, float]:
        """Wake by its trigger."""
        from txoutbox.adapters.postgres import PostgresStorage

        arrivals = Arrivals(count)
        async with asyncpg.create_pool(url, min_size=2, max_size=4) as pool:
            storage = PostgresStorage(
                pool, strict_ordering=False, delete_on_ack=not self.keeps, notify_channel=CHANNEL
            )
            await storage.create_schema()

            async def publish(message: Any) -> None:
                arrivals.note(message.json()["n"])

            relay = self._relay(storage, publish)
            async with await storage.listen(relay.wake), relay:
                ready()
                await arrivals.complete.wait()
        return arrivals.times

    async def emit(self, url: str, rate: float, count: int) -> list[float]:
        """Emit on an asyncpg connection."""
        from txoutbox.adapters.postgres import PostgresStorage

        async with AsyncExitStack() as stack:
            size = lanes(rate)
            pool = await stack.enter_async_context(asyncpg.create_pool(url, min_size=size, max_size=size))
            storage = PostgresStorage(pool, notify_channel=CHANNEL)

            async def emit(connection: Any, n: int) -> None:
                async with connection.transaction():
                    await storage.insert(connection, "order.paid", body(n))

            opened = [await stack.enter_async_context(pool.acquire()) for _ in range(size)]
            return await emit_steadily(rate, count, [functools.partial(emit, one) for one in opened])

    def _relay(self, storage: Any, publish: Any) -> Any:
        from txoutbox import Relay, RelayConfig

        rest: dict[str, Any] = {} if self.poll_min is None else {"poll_min": self.poll_min}
        config = RelayConfig(
            batch_size=self.batch_size,
            concurrency=self.concurrency,
            publish_timeout=None,
            lease=timedelta(seconds=60),
            **rest,
        )
        return Relay(storage, publish, config=config)


def peer(*, keeps: bool) -> MeasuredPeer:
    """Return txoutbox, which keeps its rows or deletes them."""
    setups = [TxOutbox(batch, at_once, keeps) for batch in (500, 1000) for at_once in (10, 50)]
    return MeasuredPeer("txoutbox", ordered=True, keeps=keeps, setups=setups)


def prompt() -> MeasuredPeer:
    """Return txoutbox with its trigger, for short waits."""
    setups = [TxOutbox(batch, 10, keeps, 0.001) for batch, keeps in ((50, True), (50, False), (10, False))]
    return MeasuredPeer("txoutbox", ordered=True, keeps=True, setups=setups)
