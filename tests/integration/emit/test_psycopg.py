"""psycopg's own ways: pipelines, raw cursors, and calls that are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg
import pytest

from relaybox import Destination, Outbox, Route
from relaybox.errors import NotInTransaction


@pytest.fixture
def outbox(fresh_database: Callable[[str], str]) -> Outbox:
    outbox = Outbox(
        fresh_database("postgresql-18"),
        destinations=[Destination("runner", "console:")],
        routes=[Route("*", to="runner")],
    )
    outbox.migrate()
    return outbox


def events(outbox: Outbox) -> int:
    with psycopg.connect(outbox.settings.database) as connection:
        return connection.execute("SELECT count(*) FROM outbox_event").fetchone()[0]  # type: ignore[index]


def test_a_pipeline_in_autocommit_is_no_transaction(outbox: Outbox) -> None:
    with psycopg.connect(outbox.settings.database, autocommit=True) as connection, connection.pipeline():
        connection.execute("SELECT 1")
        with pytest.raises(NotInTransaction):
            outbox.emit(connection, "Order", 1, "order.paid", {})
    assert events(outbox) == 0


def test_a_transaction_in_a_pipeline_is_one(outbox: Outbox) -> None:
    with (
        psycopg.connect(outbox.settings.database, autocommit=True) as connection,
        connection.pipeline(),
        connection.transaction(),
    ):
        connection.execute("SELECT 1")
        outbox.emit(connection, "Order", 1, "order.paid", {}, idempotency_key="k")
    assert events(outbox) == 1


def test_raw_cursors_do_not_matter(outbox: Outbox) -> None:
    with psycopg.connect(outbox.settings.database, cursor_factory=psycopg.RawCursor) as connection:
        outbox.emit(connection, "Order", 1, "order.paid", {}, idempotency_key="k")
    assert events(outbox) == 1


async def test_a_call_that_is_cancelled_leaves_no_transaction_open(outbox: Outbox) -> None:
    connection = await psycopg.AsyncConnection.connect(outbox.settings.database, autocommit=True)
    for turns in range(60):
        call = asyncio.create_task(
            outbox.aemit(
                connection, "Order", 1, "order.paid", {}, idempotency_key=f"k{turns}", autocommit=True
            )
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    await connection.close()
