"""Measure what emitting adds to an UPDATE: against the UPDATE alone and with a hand-written INSERT.

Measure once without waking the relays, like the INSERT, and once with it, as the documentation recommends for
the driver: a session by its commit, a connection by ``transaction`` or ``wake``.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import asyncpg
import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import PAYLOAD, Sample, Take, interleave, outbox, run
from relaybox import Destination, Outbox, Route

TRANSACTIONS = 50
"""Transactions of one variant per turn."""
ORDERS = 1_000
ROUNDS = 20
INSERT_BAR, UPDATE_BAR = 1.10, 1.55
VARIANTS = ("UPDATE", "and INSERT", "and emit", "and wake-up")

COLUMNS = (
    "id, event_id, destination, aggregate_type, aggregate_id, event_type, payload, payload_data, "
    "payload_encoding, headers, ordering_key, idempotency_key, max_attempts, next_attempt_at"
)
NAMES = COLUMNS.split(", ")[:-1]
UPDATE = "UPDATE orders SET version = version + 1 WHERE id = {}"
INSERT = f"INSERT INTO outbox_event ({COLUMNS}) VALUES ({{}}, clock_timestamp())"  # noqa: S608
FORMAT = INSERT.format(", ".join(["%s"] * len(NAMES)))
NAMED = INSERT.format(", ".join(f":{name}" for name in NAMES))
NUMBERED = INSERT.format(", ".join(f"${number}" for number in range(1, len(NAMES) + 1)))

Variants: TypeAlias = dict[str, Take]
Opened: TypeAlias = AbstractAsyncContextManager[Variants]


def values(order: int) -> tuple[Any, ...]:
    """Return the row of one event, as written by hand."""
    event_id = str(uuid7())
    event = ("Order", str(order), "order.paid", json.dumps(PAYLOAD))
    return (event_id, event_id, "runner", *event, None, None, "{}", None, event_id, 5)


def made_outbox(url: str, **settings: Any) -> Outbox:
    """Return an outbox with one destination."""
    destinations = [Destination("runner", "console:")]
    return Outbox(url, destinations=destinations, routes=[Route("*", to="runner")], **settings)


def _variants(timing: Callable[..., Take], *transactions: Callable[[int], Any]) -> Variants:
    return {name: timing(one) for name, one in zip(VARIANTS, transactions, strict=True)}


def timed(transaction: Callable[[int], None]) -> Take:
    """Return the microseconds per transaction."""

    async def take() -> float:
        start = time.perf_counter()
        for _ in range(TRANSACTIONS):
            transaction(random.randrange(ORDERS))
        return (time.perf_counter() - start) / TRANSACTIONS * 1e6

    return take


def async_timed(transaction: Callable[[int], Awaitable[None]]) -> Take:
    """Return the microseconds per transaction."""

    async def take() -> float:
        start = time.perf_counter()
        for _ in range(TRANSACTIONS):
            await transaction(random.randrange(ORDERS))
        return (time.perf_counter() - start) / TRANSACTIONS * 1e6

    return take


@asynccontextmanager
async def with_psycopg(url: str, box: Outbox) -> AsyncIterator[Variants]:
    """Yield the variants on a psycopg connection."""
    connection = psycopg.connect(url)

    def update(order: int) -> None:
        connection.execute(UPDATE.format("%s"), (order,))
        connection.commit()

    def insert(order: int) -> None:
        connection.execute(UPDATE.format("%s"), (order,))
        connection.execute(FORMAT, values(order))
        connection.commit()

    def emit(order: int) -> None:
        connection.execute(UPDATE.format("%s"), (order,))
        box.emit(connection, "Order", order, "order.paid", PAYLOAD)
        connection.commit()

    def wake(order: int) -> None:
        with box.transaction(connection):
            connection.execute(UPDATE.format("%s"), (order,))
            box.emit(connection, "Order", order, "order.paid", PAYLOAD)

    yield _variants(timed, update, insert, emit, wake)
    connection.close()


@asynccontextmanager
async def with_core(url: str, box: Outbox) -> AsyncIterator[Variants]:
    """Yield the variants on a SQLAlchemy connection."""
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    connection = engine.connect()
    changed, inserted = sa.text(UPDATE.format(":order")), sa.text(NAMED)

    def update(order: int) -> None:
        connection.execute(changed, {"order": order})
        connection.commit()

    def insert(order: int) -> None:
        connection.execute(changed, {"order": order})
        connection.execute(inserted, dict(zip(NAMES, values(order), strict=True)))
        connection.commit()

    def emit(order: int) -> None:
        connection.execute(changed, {"order": order})
        box.emit(connection, "Order", order, "order.paid", PAYLOAD)
        connection.commit()

    def wake(order: int) -> None:
        emit(order)
        box.wake()

    yield _variants(timed, update, insert, emit, wake)
    connection.close()
    engine.dispose()


@asynccontextmanager
async def with_session(url: str, box: Outbox) -> AsyncIterator[Variants]:
    """Yield the variants with a SQLAlchemy session for each transaction."""
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    changed, inserted = sa.text(UPDATE.format(":order")), sa.text(NAMED)
    # A session's commit wakes the relays, unless the outbox wakes none.
    silent = made_outbox(url, notify=False)

    def update(order: int) -> None:
        with Session(engine) as session, session.begin():
            session.execute(changed, {"order": order})

    def insert(order: int) -> None:
        with Session(engine) as session, session.begin():
            session.execute(changed, {"order": order})
            session.execute(inserted, dict(zip(NAMES, values(order), strict=True)))

    def emit(order: int, through: Outbox = silent) -> None:
        with Session(engine) as session, session.begin():
            session.execute(changed, {"order": order})
            through.emit(session, "Order", order, "order.paid", PAYLOAD)

    yield _variants(timed, update, insert, emit, lambda order: emit(order, box))
    engine.dispose()


@asynccontextmanager
async def with_asyncpg(url: str, box: Outbox) -> AsyncIterator[Variants]:
    """Yield the variants on an asyncpg connection."""
    connection = await asyncpg.connect(url)

    async def update(order: int) -> None:
        async with connection.transaction():
            await connection.execute(UPDATE.format("$1"), order)

    async def insert(order: int) -> None:
        async with connection.transaction():
            await connection.execute(UPDATE.format("$1"), order)
            await connection.execute(NUMBERED, *values(order))

    async def emit(order: int) -> None:
        async with connection.transaction():
            await connection.execute(UPDATE.format("$1"), order)
            await box.aemit(connection, "Order", order, "order.paid", PAYLOAD)

    async def wake(order: int) -> None:
        async with box.transaction(connection):
            await connection.execute(UPDATE.format("$1"), order)
            await box.aemit(connection, "Order", order, "order.paid", PAYLOAD)

    yield _variants(async_timed, update, insert, emit, wake)
    await connection.close()


DRIVERS: dict[str, Callable[[str, Outbox], Opened]] = {
    "psycopg": with_psycopg,
    "SQLAlchemy Core": with_core,
    "SQLAlchemy Session": with_session,
    "asyncpg": with_asyncpg,
}


def check_rows(url: str) -> None:
    """Check that rows by hand and by ``emit`` differ only in their ids, aggregates and times."""
    query = """
        SELECT DISTINCT to_jsonb(e) - '{id, event_id, idempotency_key, aggregate_id, position, created_at,
            updated_at, next_attempt_at}'::text[] FROM outbox_event AS e"""
    with psycopg.connect(url) as connection:
        kinds = connection.execute(query).fetchall()
    if len(kinds) != 1:
        raise RuntimeError(f"the rows are not alike: {kinds}")


async def measure(server_url: str, options: Options) -> Facts:
    """Measure microseconds per transaction, by driver, with and without a flush.

    A transaction that emits also waits if ``synchronous_commit`` is off, so the server's setting is changed.
    """
    findings = Findings()
    with outbox(server_url) as (url, _):
        run(url, "CREATE TABLE orders (id int PRIMARY KEY, version int NOT NULL) WITH (fillfactor = 50)")
        run(
            url, "INSERT INTO orders SELECT n, 0 FROM generate_series(0, %(most)s) AS n", {"most": ORDERS - 1}
        )
        for commit in ("durable", "unflushed"):
            if commit == "unflushed":
                run(url, "ALTER SYSTEM SET fsync = off")
                run(url, "SELECT pg_reload_conf()")
            found = await _measure(url, options.size(ROUNDS, 3))
            _show(findings, commit, found)
            if commit == "durable":
                _judge(findings, found)
        run(url, "ALTER SYSTEM RESET fsync")
        run(url, "SELECT pg_reload_conf()")
    return findings.facts()


async def _measure(url: str, rounds: int) -> dict[str, dict[str, Sample]]:
    found = {}
    box = made_outbox(url)
    for name, opened in DRIVERS.items():
        async with opened(url, box) as variants:
            found[name] = await interleave(variants, rounds, warm_up=2)
    check_rows(url)
    return found


def _show(findings: Findings, commit: str, found: dict[str, dict[str, Sample]]) -> None:
    lines = []
    for driver, samples in found.items():
        for name, sample in samples.items():
            findings.figure(f"{driver}, {commit}, {name}", sample)
        update, insert, emit, wake = samples.values()
        costs = [emit.over(insert).show(2), wake.over(update).show(2)]
        lines.append([driver, *(sample.show() for sample in samples.values()), *costs])
    columns = ["µs a transaction", *VARIANTS, "emit / INSERT", "wake-up / UPDATE"]
    findings.table(f"emit, {commit} commits", columns, lines)


def _judge(findings: Findings, found: dict[str, dict[str, Sample]]) -> None:
    for driver, (update, insert, emit, wake) in ((name, by.values()) for name, by in found.items()):
        findings.at_most(f"emit, {driver}", INSERT_BAR, "× the hand-written INSERT", emit.over(insert))
        findings.at_most(f"emit with wake-up, {driver}", UPDATE_BAR, "× the bare UPDATE", wake.over(update))
