"""What the stories have in common: a shop, its store, and transactions taken step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import sqlalchemy as sa

from relaybox import Destination, Route
from relaybox.parts import open_store
from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Query
from relaybox.stores.steps import Steps
from tests.integration.shop import Shop
from tests.locks import waiters

SERVERS = ["postgresql-18", "mariadb"]
BOTH_WAYS = ["postgresql-18", "sqlite"]
"""Where a claim is one statement, and where it is several; MariaDB has the texts of the latter."""
QUICK: dict[str, Any] = {"poll_interval": "20ms", "backoff": {"base": "10ms", "cap": "50ms"}}


def make_shop(url: str, **options: Any) -> Shop:
    """A shop with one destination, ``shop``."""
    destination = Destination("shop", "console:", **options)
    return Shop(url, destinations=[destination], routes=[Route("*", to="shop")])


@asynccontextmanager
async def store_of(shop: Shop) -> AsyncIterator[SqlStore]:
    """A store of its own on the shop's database."""
    store = open_store(shop.outbox.settings.database, shop.outbox.tables)
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def transaction(shop: Shop) -> Iterator[sa.Connection]:
    """An open READ COMMITTED transaction, committed at the end of the block."""
    with shop.engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
        yield connection


def drive(connection: sa.Connection, steps: Steps[Any]) -> Any:
    """Run a store's steps in the connection's transaction, without its end."""
    try:
        queries = next(steps)
        while True:
            queries = steps.send([_execute(connection, query) for query in queries])
    except StopIteration as end:
        return end.value


def _execute(connection: sa.Connection, query: Query) -> list[Any]:
    if connection.dialect.name == "postgresql":
        # Which takes the statements as the store writes them.
        cursor = psycopg.RawCursor(connection.connection.driver_connection)  # type: ignore[arg-type]
        cursor.execute(query.sql.encode(), query.params)
        return cursor.fetchall() if cursor.description else []
    result = connection.exec_driver_sql(*query)
    return list(result) if result.returns_rows else []


async def done_or_waiting(task: asyncio.Task[Any], shop: Shop) -> None:
    """Until the task is done, or some transaction of the database waits for a lock."""
    while not task.done() and not waiters(shop.engine):
        await asyncio.wait([task], timeout=0.02)


def end_leases(shop: Shop) -> None:
    """Let every lease run out."""
    event = shop.outbox.tables.event
    ended = sa.update(event).where(event.c.lease_token.is_not(None)).values(leased_until=event.c.created_at)
    with shop.engine.begin() as connection:
        connection.execute(ended)


def take_over(shop: Shop, owner: str) -> None:
    """Have another relay claim all that is leased, as if it had run out."""
    event = shop.outbox.tables.event
    taken = event.c.lease_token.is_not(None)
    with shop.engine.begin() as connection:
        connection.execute(sa.update(event).where(taken).values(lease_token=uuid4(), lease_owner=owner))


def column(shop: Shop, name: str) -> list[Any]:
    """The values of one column, in the order of positions."""
    event = shop.outbox.tables.event.c
    with shop.engine.connect() as connection:
        return list(connection.scalars(sa.select(event[name]).order_by(event.position)))
