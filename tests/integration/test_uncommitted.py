"""Relays do not wait for transactions of the application that are still open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox.config import Destination, Settings
from relaybox.emit.row import Call, RowBuilder
from relaybox.migrations import migrate
from relaybox.outcome import Delivered, Released, Retried
from relaybox.schema import make_tables
from relaybox.store import Settlement, Want
from relaybox.stores import mysql, postgres
from relaybox.stores.dialects import DIALECTS
from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Statements
from relaybox.stores.upkeep import SqlUpkeep
from relaybox.upkeep import Slice
from tests.databases import SERVERS
from tests.integration.shop import Databases

BUILDER = RowBuilder(Settings(destinations=[Destination("shop", "console:", ordered=True)]))
MODULES: dict[str, Any] = {"postgresql": postgres, "mysql": mysql}
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mariadb+pymysql"}
WANT = Want("shop", "relay-1", ordered=True)


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest, migrated_database: Databases) -> sa.URL:
    url = migrated_database(request.param)
    migrate(url)
    return sa.make_url(url)


@pytest.fixture
async def store(url: sa.URL) -> AsyncIterator[SqlStore]:
    text = url.render_as_string(hide_password=False)
    store: SqlStore = MODULES[url.drivername].open_store(text, make_tables(sa.MetaData()))
    yield store
    await store.close()


@pytest.fixture
def application(url: sa.URL) -> sa.Engine:
    return sa.create_engine(url.set(drivername=DRIVERS[url.drivername]), poolclass=sa.NullPool)


def emit(connection: sa.Connection, key: str) -> None:
    dialect = DIALECTS[connection.dialect.name]
    rows = BUILDER.build(Call("Order", 1, "order.paid", {}, key=key, destinations=["shop"]), dialect).rows
    statements = Statements(make_tables(sa.MetaData()), dialect, "format")
    connection.exec_driver_sql(*statements.insert(rows))


async def test_a_settle_does_not_wait_for_an_event_of_its_key_that_is_not_committed(
    store: SqlStore, application: sa.Engine
) -> None:
    with application.begin() as connection:
        emit(connection, "a")
    [head] = (await store.claim(WANT)).deliveries
    with application.begin() as connection:
        emit(connection, "a")
        async with asyncio.timeout(20):
            assert await store.settle([Settlement(head, Delivered())]) == frozenset()
            assert (await store.claim(WANT)).deliveries == ()
    assert len((await store.claim(WANT)).deliveries) == 1


async def test_a_sweep_steps_over_a_head_that_somebody_has_locked(
    store: SqlStore, application: sa.Engine
) -> None:
    event, upkeep = make_tables(sa.MetaData()).event, SqlUpkeep(store)
    with application.begin() as connection:
        emit(connection, "a")
        emit(connection, "a")
    head, later = (await store.claim(WANT)).deliveries
    await store.settle([Settlement(head, Retried(60, "503")), Settlement(later, Released())])
    assert (await store.claim(WANT)).parked == 1
    with application.begin() as connection:
        connection.execute(sa.delete(event).where(event.c.id == head.id))
    term = await upkeep.lead("relay-1", 60)
    assert term is not None
    with application.begin() as connection:
        connection.execute(sa.select(event.c.id).where(event.c.id == later.id).with_for_update())
        async with asyncio.timeout(20):
            assert await upkeep.sweep(term, "shop", True, None, 10) == Slice(0, None)
    assert await upkeep.sweep(term, "shop", True, None, 10) == Slice(1, None)
