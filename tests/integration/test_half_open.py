"""A connection that is open on one side alone: nothing is refused, and nothing is ever answered."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from relaybox import Event, parts
from relaybox.errors import StoreError
from relaybox.store import Want
from relaybox.stores import mysql, postgres
from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Query
from relaybox.stores.steps import Steps
from tests.chaos.proxy import Proxy
from tests.integration.shop import Shop

WANT = Want("on_order", "me", limit=5, lease=60.0)


@pytest.mark.parametrize("kind", ["postgresql-18", "mariadb"])
async def test_a_server_that_answers_no_more_is_given_up_and_found_again(
    kind: str, fresh_database: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (postgres, mysql):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.5)
    url = sa.make_url(fresh_database(kind))
    shop = Shop(url.render_as_string(hide_password=False))

    @shop.outbox.handler("*", name="on_order")
    async def handler(event: Event) -> None: ...

    shop.emit(10)
    with Proxy(url.host or "", url.port or 0) as proxy:
        way = url.set(port=proxy.port).render_as_string(hide_password=False)
        store = parts.open_store(way, shop.outbox.tables)
        assert len((await store.claim(WANT)).deliveries) == 5
        proxy.set(hole=True)
        asked = time.monotonic()
        with pytest.raises(StoreError):
            await asyncio.wait_for(store.claim(WANT), 10)
        assert time.monotonic() - asked < 3
        proxy.set()
        assert len((await store.claim(WANT)).deliveries) == 5
        await store.close()


async def test_a_server_that_takes_no_more_is_given_up_and_found_again(
    fresh_database: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mysql, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(mysql, "CLOSING_SECONDS", 0.5)
    url = sa.make_url(fresh_database("mariadb"))
    shop = Shop(url.render_as_string(hide_password=False))
    again = threading.Event()

    def more_than_the_buffers_hold(proxy: Proxy) -> Steps[None]:
        for link in proxy._links:
            link.ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        proxy._loop.call_soon_threadsafe(again.wait)
        yield [Query("SELECT LENGTH(%s)", ("x" * (1 << 24),))]

    with Proxy(url.host or "", url.port or 0) as proxy:
        way = url.set(port=proxy.port).render_as_string(hide_password=False)
        store = parts.open_store(way, shop.outbox.tables)
        assert isinstance(store, SqlStore)
        try:
            asked = time.monotonic()
            with pytest.raises(StoreError):
                await asyncio.wait_for(store.driver.run(lambda: more_than_the_buffers_hold(proxy)), 10)
            assert time.monotonic() - asked < 5
        finally:
            again.set()
        assert await store.now()
        await store.close()
