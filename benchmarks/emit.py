"""What emitting adds to a transaction: an UPDATE alone, with a hand-written INSERT of the row, with ``emit``.

The requirement: with psycopg and SQLAlchemy Core a transaction with ``emit`` takes at most 1.15 times as long
as one with the INSERT. ``python -m benchmarks.emit``
"""

from __future__ import annotations

import argparse
import asyncio
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

from benchmarks.harness import PAYLOAD, Sample, Take, interleave, outbox, report, run, server
from relaybox import Destination, Outbox, Route

ALLOWED_COST = 1.15
TRANSACTIONS = 50
"""Of one variant before it is the next one's turn."""
ORDERS = 1_000

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
    """The row of one event, as somebody would write it by hand."""
    event_id = str(uuid7())
    event = ("Order", str(order), "order.paid", json.dumps(PAYLOAD))
    return (event_id, event_id, "runner", *event, None, None, "{}", None, event_id, 5)


def timed(transaction: Callable[[int], None]) -> Take:
    """Microseconds a transaction."""

    async def take() -> float:
        start = time.perf_counter()
        for _ in range(TRANSACTIONS):
            transaction(random.randrange(ORDERS))
        return (time.perf_counter() - start) / TRANSACTIONS * 1e6

    return take


def async_timed(transaction: Callable[[int], Awaitable[None]]) -> Take:
    """Microseconds a transaction."""

    async def take() -> float:
        start = time.perf_counter()
        for _ in range(TRANSACTIONS):
            await transaction(random.randrange(ORDERS))
        return (time.perf_counter() - start) / TRANSACTIONS * 1e6

    return take


@asynccontextmanager
async def with_psycopg(url: str, box: Outbox) -> AsyncIterator[Variants]:
    """A psycopg connection."""
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

    yield {"update": timed(update), "insert": timed(insert), "emit": timed(emit)}
    connection.close()


@asynccontextmanager
async def with_core(url: str, box: Outbox) -> AsyncIterator[Variants]:
    """A SQLAlchemy connection."""
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

    yield {"update": timed(update), "insert": timed(insert), "emit": timed(emit)}
    connection.close()
    engine.dispose()


@asynccontextmanager
async def with_session(url: str, box: Outbox) -> AsyncIterator[Variants]:
    """A SQLAlchemy session for each transaction."""
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    changed, inserted = sa.text(UPDATE.format(":order")), sa.text(NAMED)

    def update(order: int) -> None:
        with Session(engine) as session, session.begin():
            session.execute(changed, {"order": order})

    def insert(order: int) -> None:
        with Session(engine) as session, session.begin():
            session.execute(changed, {"order": order})
            session.execute(inserted, dict(zip(NAMES, values(order), strict=True)))

    def emit(order: int) -> None:
        with Session(engine) as session, session.begin():
            session.execute(changed, {"order": order})
            box.emit(session, "Order", order, "order.paid", PAYLOAD)

    yield {"update": timed(update), "insert": timed(insert), "emit": timed(emit)}
    engine.dispose()


@asynccontextmanager
async def with_asyncpg(url: str, box: Outbox) -> AsyncIterator[Variants]:
    """An asyncpg connection."""
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

    yield {"update": async_timed(update), "insert": async_timed(insert), "emit": async_timed(emit)}
    await connection.close()


DRIVERS: dict[str, Callable[[str, Outbox], Opened]] = {
    "psycopg": with_psycopg,
    "SQLAlchemy Core": with_core,
    "SQLAlchemy Session": with_session,
    "asyncpg": with_asyncpg,
}
REQUIRED = ("psycopg", "SQLAlchemy Core")


def check_rows(url: str) -> None:
    """The rows by hand and by ``emit`` differ in nothing but their ids, aggregates and times."""
    query = """
        SELECT DISTINCT to_jsonb(e) - '{id, event_id, idempotency_key, aggregate_id, position, created_at,
            updated_at, next_attempt_at}'::text[] FROM outbox_event AS e"""
    with psycopg.connect(url) as connection:
        kinds = connection.execute(query).fetchall()
    if len(kinds) != 1:
        raise RuntimeError(f"the rows are not alike: {kinds}")


async def measure(url: str, box: Outbox, rounds: int) -> dict[str, dict[str, Sample]]:
    """Microseconds a transaction, by driver and variant."""
    found = {}
    for name, opened in DRIVERS.items():
        async with opened(url, box) as variants:
            found[name] = await interleave(variants, rounds, warm_up=2)
    check_rows(url)
    return found


def show(title: str, found: dict[str, dict[str, Sample]]) -> None:
    """Print one table."""
    lines: list[list[str]] = []
    facts: list[dict[str, Any]] = []
    for name, samples in found.items():
        cost = samples["emit"].over(samples["insert"])
        lines.append([name, *(sample.show() for sample in samples.values()), cost.show(2)])
        medians = {f"{kind}_us": sample.median for kind, sample in samples.items()}
        facts.append({"driver": name, "cost": cost.median, **medians})
    met = all(fact["cost"] <= ALLOWED_COST for fact in facts if fact["driver"] in REQUIRED)
    columns = ["µs a transaction", "UPDATE", "and INSERT", "and emit", "emit / INSERT"]
    report(title, columns, lines, {"results": facts, "allowed": ALLOWED_COST, "met": met})


async def main(version: str, rounds: int) -> None:
    """Measure every driver, with commits that wait for the disk and with commits that do not."""
    with server(version) as server_url, outbox(server_url) as (url, _):
        run(url, "CREATE TABLE orders (id int PRIMARY KEY, version int NOT NULL) WITH (fillfactor = 50)")
        run(url, f"INSERT INTO orders SELECT n, 0 FROM generate_series(0, {ORDERS - 1}) AS n")  # noqa: S608
        box = Outbox(url, destinations=[Destination("runner", "console:")], routes=[Route("*", to="runner")])
        show(f"emit on PostgreSQL {version}", await measure(url, box, rounds))
        run(url, "ALTER ROLE CURRENT_USER SET synchronous_commit = off")
        show(f"emit on PostgreSQL {version}, asynchronous commit", await measure(url, box, rounds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postgres", choices=["18", "15"], default="18")
    parser.add_argument("--rounds", type=int, default=60)
    chosen = parser.parse_args()
    asyncio.run(main(chosen.postgres, chosen.rounds))
