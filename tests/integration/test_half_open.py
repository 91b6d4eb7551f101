"""A connection that is open on one side alone: nothing is refused, and nothing is ever answered."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox.database.pools import mysql, postgresql
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Steps
from relaybox.errors import StoreError
from relaybox.operate import open_relay as parts
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.store import Want
from tests.chaos.proxy import Proxy
from tests.databases import SERVERS
from tests.integration.shop import Databases, Shop
from tests.waiting import PATIENCE, await_for

WANT = Want("on_order", "me", limit=5, lease=60.0)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (postgresql, mysql):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(mysql, "CLOSING_SECONDS", 0.5)


@asynccontextmanager
async def behind_a_proxy(database: str) -> AsyncIterator[tuple[SqlStore, Proxy]]:
    shop, url = Shop(database), sa.make_url(database)
    shop.collect()
    shop.emit(50)
    with Proxy(url.host or "", url.port or 0) as proxy:
        way = url.set(port=proxy.port).render_as_string(hide_password=False)
        store: SqlStore = parts.open_store(way, shop.outbox.tables)
        yield store, proxy
        await store.close()


async def answered(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return what a server answers that may be too busy to do so in time, now and then."""

    async def ask() -> Any:
        try:
            return await call()
        except StoreError:
            return None

    return await await_for(ask, "an answer")


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_server_that_answers_no_more_is_given_up_and_found_again(
    kind: str, migrated_database: Databases
) -> None:
    async with behind_a_proxy(migrated_database(kind)) as (store, proxy):
        assert len((await answered(lambda: store.claim(WANT))).deliveries) == 5
        proxy.set(hole=True)
        with pytest.raises(StoreError):
            await asyncio.wait_for(store.claim(WANT), PATIENCE)
        proxy.set()
        assert len((await answered(lambda: store.claim(WANT))).deliveries) == 5


async def test_a_server_that_takes_no_more_is_given_up_and_found_again(migrated_database: Databases) -> None:
    again = threading.Event()

    def more_than_the_buffers_hold(proxy: Proxy) -> Steps[None]:
        for link in proxy._links:
            link.ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        proxy._loop.call_soon_threadsafe(again.wait)
        yield [Query("SELECT LENGTH(%s)", ("x" * (1 << 24),))]

    async with behind_a_proxy(migrated_database("mariadb")) as (store, proxy):
        try:
            sending = store.driver.run(lambda: more_than_the_buffers_hold(proxy))
            with pytest.raises(StoreError):
                await asyncio.wait_for(sending, PATIENCE)
        finally:
            again.set()
        assert await answered(store.now)
