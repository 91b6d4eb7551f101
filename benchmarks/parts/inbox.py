"""Measure the cost of ``once``: an UPDATE with a hand-written INSERT, against the same with the inbox.

The INSERT has ON CONFLICT DO NOTHING. Messages are new, and some were processed before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import asyncpg
import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session
from uuid_utils.compat import uuid7

from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, Take, interleave, outbox, run
from benchmarks.parts.emit import ORDERS, ROUNDS, UPDATE, async_timed, timed
from relaybox import Inbox

BAR = 1.3
VARIANTS = ("INSERT and UPDATE", "once and UPDATE", "INSERT, duplicate", "once, duplicate")
INSERT = "INSERT INTO inbox_message (consumer, message_id) VALUES ('billing', {}) ON CONFLICT DO NOTHING"
SEEN = "processed before"

Variants: TypeAlias = dict[str, Take]
Opened: TypeAlias = AbstractAsyncContextManager[Variants]


def _variants(timing: Callable[..., Take], insert: Callable[..., Any], once: Callable[..., Any]) -> Variants:
    """Return both variants, with new messages and with a processed one."""
    transactions = (
        lambda order: insert(order, str(uuid7())),
        lambda order: once(order, str(uuid7())),
        lambda order: insert(order, SEEN),
        lambda order: once(order, SEEN),
    )
    return {name: timing(one) for name, one in zip(VARIANTS, transactions, strict=True)}


@asynccontextmanager
async def with_psycopg(url: str, inbox: Inbox) -> AsyncIterator[Variants]:
    """Yield the variants on a psycopg connection."""
    connection = psycopg.connect(url)

    def insert(order: int, message: str) -> None:
        if connection.execute(INSERT.format("%s"), (message,)).rowcount:
            connection.execute(UPDATE.format("%s"), (order,))
        connection.commit()

    def once(order: int, message: str) -> None:
        with inbox.once(connection, message) as first:
            if first:
                connection.execute(UPDATE.format("%s"), (order,))
        connection.commit()

    yield _variants(timed, insert, once)
    connection.close()


@asynccontextmanager
async def with_session(url: str, inbox: Inbox) -> AsyncIterator[Variants]:
    """Yield the variants with a SQLAlchemy session for each transaction."""
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    changed, inserted = sa.text(UPDATE.format(":order")), sa.text(INSERT.format(":message"))

    def insert(order: int, message: str) -> None:
        with Session(engine) as session, session.begin():
            result: Any = session.execute(inserted, {"message": message})
            if result.rowcount:
                session.execute(changed, {"order": order})

    def once(order: int, message: str) -> None:
        with Session(engine) as session, session.begin(), inbox.once(session, message) as first:
            if first:
                session.execute(changed, {"order": order})

    yield _variants(timed, insert, once)
    engine.dispose()


@asynccontextmanager
async def with_asyncpg(url: str, inbox: Inbox) -> AsyncIterator[Variants]:
    """Yield the variants on an asyncpg connection."""
    connection = await asyncpg.connect(url)

    async def insert(order: int, message: str) -> None:
        async with connection.transaction():
            if await connection.execute(INSERT.format("$1"), message) == "INSERT 0 1":
                await connection.execute(UPDATE.format("$1"), order)

    async def once(order: int, message: str) -> None:
        async with connection.transaction(), inbox.aonce(connection, message) as first:
            if first:
                await connection.execute(UPDATE.format("$1"), order)

    yield _variants(async_timed, insert, once)
    await connection.close()


DRIVERS: dict[str, Callable[[str, Inbox], Opened]] = {
    "psycopg": with_psycopg,
    "SQLAlchemy Session": with_session,
    "asyncpg": with_asyncpg,
}


async def measure(server_url: str, options: Options) -> Facts:
    """Measure microseconds per transaction, by driver, with commits that wait for the disk and others."""
    findings = Findings()
    with outbox(server_url) as (url, tables):
        run(url, "CREATE TABLE orders (id int PRIMARY KEY, version int NOT NULL) WITH (fillfactor = 50)")
        run(
            url, "INSERT INTO orders SELECT n, 0 FROM generate_series(0, %(most)s) AS n", {"most": ORDERS - 1}
        )
        inbox = Inbox(consumer="billing", tables=tables)
        for commit in ("durable", "asynchronous"):
            if commit == "asynchronous":
                run(url, "ALTER ROLE CURRENT_USER SET synchronous_commit = off")
            for driver, opened in DRIVERS.items():
                async with opened(url, inbox) as variants:
                    found = await interleave(variants, options.size(ROUNDS, 3), warm_up=2)
                _keep(findings, driver, commit, found)
        run(url, "ALTER ROLE CURRENT_USER RESET synchronous_commit")
    _show(findings)
    return findings.facts()


def _keep(findings: Findings, driver: str, commit: str, found: dict[str, Sample]) -> None:
    insert, once, *_ = found.values()
    for name, sample in found.items():
        findings.figure(f"{driver}, {commit}, {name}", sample)
    findings.at_most(
        f"inbox, {driver}, {commit}", BAR, "× the hand-written INSERT … ON CONFLICT", once.over(insert)
    )


def _show(findings: Findings) -> None:
    lines = []
    for commit in ("durable", "asynchronous"):
        for driver in DRIVERS:
            medians = [findings.figures[f"{driver}, {commit}, {name}"]["median"] for name in VARIANTS]
            ratios = [medians[1] / medians[0], medians[3] / medians[2]]
            figures = [*(f"{median:,.0f}" for median in medians), *(f"{ratio:.2f}" for ratio in ratios)]
            lines.append([f"{driver}, {commit} commits", *figures])
    columns = ["µs a transaction", *VARIANTS, "once / INSERT", "duplicate"]
    findings.table("the inbox", columns, lines)
