"""Measure what the database and its drivers allow: bare loops on the outbox's tables, without work per event.

Each loop leases 1,000 rows at a time in the simplest correct form, reads every column that a relay reads, and
settles the rows by their ids. As in the store, a claim does not wait for the disk, and a settle does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, Protocol, TypeAlias
from uuid import uuid4

import asyncpg
import psycopg
from psycopg.adapt import Loader
from psycopg.pq import Format
from psycopg.types.uuid import UUIDBinaryDumper

from benchmarks.harness import fill, run
from benchmarks.peers.base import check
from benchmarks.process import PATIENCE, SLOWEST, apart, begin

Driver: TypeAlias = Literal["psycopg", "asyncpg"]

BATCH = 1_000
DESTINATION = "runner"

CLAIM = """
UPDATE outbox_event
SET attempts = attempts + 1, leased_until = clock_timestamp() + interval '60 s', lease_token = {token},
    lease_owner = 'bench', last_attempt_at = clock_timestamp(), updated_at = clock_timestamp()
WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM outbox_event
    WHERE destination = 'runner' AND status = 'pending' AND next_attempt_at <= (SELECT clock_timestamp())
      AND (leased_until IS NULL OR leased_until <= (SELECT clock_timestamp()))
      AND (SELECT set_config('synchronous_commit', 'off', true)) = 'off'
    ORDER BY next_attempt_at, position LIMIT {limit}
    FOR UPDATE SKIP LOCKED))
RETURNING id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_data, payload_encoding,
    headers, ordering_key, position, idempotency_key, attempts, max_attempts, crashes, created_at"""
SETTLE = """
UPDATE outbox_event
SET status = 'delivered', delivered_at = clock_timestamp(), next_attempt_at = NULL, crashes = 0,
    leased_until = NULL, lease_token = NULL, lease_owner = NULL, updated_at = clock_timestamp()
WHERE id = ANY ({ids}) AND lease_token = {token}"""
DELETE = "DELETE FROM outbox_event WHERE id = ANY ({ids}) AND lease_token = {token}"


async def two_connections(url: str, rows: int, *, keep: bool, driver: Driver = "asyncpg") -> float:
    """Return events per second if one connection claims while the other settles the previous batch."""
    rate: float = await apart(_drain, url, rows, keep, driver, seconds=PATIENCE + rows / SLOWEST)
    return rate


class _Connection(Protocol):
    async def claim(self, token: Any) -> Sequence[Any]: ...

    async def settle(self, token: Any, ids: Sequence[Any]) -> None: ...


async def _drain(url: str, rows: int, keep: bool, driver: Driver) -> float:
    run(url, "TRUNCATE outbox_event")
    fill(url, rows, destination=DESTINATION)
    async with AsyncExitStack() as stack:
        claimer, settler = [await OPEN[driver](url, keep, stack) for _ in range(2)]
        began = begin()
        settled = await _loop(claimer, settler)
        spent = time.monotonic() - began
    with psycopg.connect(url) as connection:
        done = "SELECT count(*) FROM outbox_event WHERE status = 'delivered'"
        left = connection.execute(done if keep else "SELECT count(*) FROM outbox_event").fetchone()
    check(settled, left[0] if keep else rows - left[0], rows)
    return rows / spent


async def _loop(claimer: _Connection, settler: _Connection) -> int:
    """Claim and settle until nothing is left; return the number of rows."""
    settled = 0
    pending: asyncio.Task[None] | None = None
    while True:
        token = uuid4()
        ids = await claimer.claim(token)
        if pending:
            await pending
        if not ids:
            return settled
        settled += len(ids)
        pending = asyncio.create_task(settler.settle(token, ids))


class _Id(bytes):
    """A UUID as the driver returned it."""


class _IdLoader(Loader):
    format = Format.BINARY

    def load(self, data: Any) -> _Id:
        return _Id(data)


class _IdDumper(UUIDBinaryDumper):
    def dump(self, obj: Any) -> Any:
        return obj


class _Raw(Loader):
    format = Format.BINARY

    def load(self, data: Any) -> Any:
        return data


class _Psycopg:
    def __init__(self, connection: psycopg.AsyncConnection[Any], keep: bool) -> None:
        self._connection = connection
        self._claim = CLAIM.format(token="%b", limit="%b")
        self._settle = (SETTLE if keep else DELETE).format(ids="%b", token="%b")

    @classmethod
    async def open(cls, url: str, keep: bool, stack: AsyncExitStack) -> _Psycopg:
        connection = await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=0)
        await stack.enter_async_context(connection)
        connection.adapters.register_loader("uuid", _IdLoader)
        connection.adapters.register_dumper(_Id, _IdDumper)
        for kind in ("jsonb", "timestamptz"):
            connection.adapters.register_loader(kind, _Raw)
        return cls(connection, keep)

    async def claim(self, token: Any) -> Sequence[Any]:
        cursor = self._connection.cursor(binary=True)
        await cursor.execute(self._claim, (token, BATCH))
        return [row[0] for row in await cursor.fetchall()]

    async def settle(self, token: Any, ids: Sequence[Any]) -> None:
        await self._connection.execute(self._settle, (ids, token))


class _Asyncpg:
    def __init__(self, connection: Any, keep: bool) -> None:
        self._connection = connection
        self._claim = CLAIM.format(token="$1", limit="$2")
        self._settle = (SETTLE if keep else DELETE).format(token="$1", ids="$2")

    @classmethod
    async def open(cls, url: str, keep: bool, stack: AsyncExitStack) -> _Asyncpg:
        connection = await asyncpg.connect(url)
        stack.push_async_callback(connection.close)
        return cls(connection, keep)

    async def claim(self, token: Any) -> Sequence[Any]:
        return [row[0] for row in await self._connection.fetch(self._claim, token, BATCH)]

    async def settle(self, token: Any, ids: Sequence[Any]) -> None:
        await self._connection.execute(self._settle, token, ids)


OPEN: dict[Driver, Any] = {"psycopg": _Psycopg.open, "asyncpg": _Asyncpg.open}
