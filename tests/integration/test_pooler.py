"""Everything goes through a transaction pooler: sessions change from one transaction to the next."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa

from relaybox.emit.wakes.postgres import ListeningWake
from relaybox.relay.upkeep import caretaker
from tests.databases import engine
from tests.integration.shop import MEMBERSHIP, SOON, Databases, Shop, in_order
from tests.servers import pgbouncer
from tests.waiting import await_for

KEYS = 10
BACKLOG, EVENTS = 400, 400 + 3 * 30
DEAF = "LISTEN does not get through (a transaction pooler?): until it does, the relay polls"


@pytest.fixture
def direct(migrated_database: Databases) -> str:
    """Return the database without the pooler."""
    return migrated_database("postgresql-18")


@pytest.fixture
def url(direct: str, pgbouncer_url: str) -> str:
    return pgbouncer.through(pgbouncer_url, direct)


@pytest.fixture
def shop(direct: str, url: str) -> Shop:
    """Return a shop whose outbox uses the pooler, and whose tests look at the database directly.

    The relays hold the pooler's few sessions: a test that waited for one would block the relays' loop.
    """
    shop = Shop(url)
    shop.engine = engine(direct)
    return shop


@pytest.fixture
def taken(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of what the handler of the shop has taken."""
    monkeypatch.setitem(MEMBERSHIP, "interval", SOON)
    return shop.collect(ordered=True, poll_interval="50ms")


def emit_by_psycopg(shop: Shop, url: str, n: int) -> None:
    with psycopg.connect(url, prepare_threshold=None) as connection:
        shop.outbox.emit(connection, "Order", n % KEYS, "order.paid", {"n": n})


def emit_by_sqlalchemy(shop: Shop, url: str, n: int) -> None:
    with engine(url).begin() as connection:
        shop.outbox.emit(connection, "Order", n % KEYS, "order.paid", {"n": n})


async def emit_by_asyncpg(shop: Shop, url: str, n: int) -> None:
    connection = await asyncpg.connect(url, statement_cache_size=0)
    try:
        async with connection.transaction():
            await shop.outbox.aemit(connection, "Order", n % KEYS, "order.paid", {"n": n})
    finally:
        await connection.close()


async def test_relays_deliver_everything_once_in_order_and_without_trouble(
    shop: Shop, url: str, taken: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    shop.emit(BACKLOG, keys=KEYS)
    async with AsyncExitStack() as running:
        for _ in range(3):
            await running.enter_async_context(shop.outbox.relay())
        for n in range(BACKLOG, EVENTS, 3):
            await asyncio.to_thread(emit_by_psycopg, shop, url, n)
            await asyncio.to_thread(emit_by_sqlalchemy, shop, url, n + 1)
            await emit_by_asyncpg(shop, url, n + 2)
        await await_for(lambda: shop.states() == {"delivered": EVENTS}, "everything delivered")
    assert sorted(taken) == list(range(EVENTS))
    assert in_order(taken, KEYS)
    trouble = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert trouble == []


async def test_a_listen_that_the_pooler_swallows_is_noticed_and_polling_takes_over(
    shop: Shop, taken: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = ListeningWake.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "patience", 0.3)
    async with shop.outbox.relay():
        await await_for(lambda: DEAF in caplog.messages, "the relay says that it polls")
        await asyncio.to_thread(shop.emit, 20, keys=KEYS)
        await await_for(lambda: len(taken) == 20, "what was emitted meanwhile is found by polling")
        await await_for(lambda: shop.states() == {"delivered": 20}, "and settled")
    assert sorted(taken) == list(range(20))


async def test_one_of_two_relays_leads_and_the_other_after_it(
    shop: Shop, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caretaker, "RENEW", SOON)
    async with AsyncExitStack() as both, AsyncExitStack() as one:
        await one.enter_async_context(shop.outbox.relay())
        await await_for(lambda: len(leaders(shop)) == 1, "one leads")
        ((first, term),) = leaders(shop).items()
        await both.enter_async_context(shop.outbox.relay())
        await await_for(lambda: len(relays(shop)) == 2, "both are known")
        assert leaders(shop) == {first: term}
        await one.aclose()
        await await_for(lambda: leaders(shop).keys() == relays(shop) - {first}, "the other leads")
        assert [*leaders(shop).values()] == [term + 1]
    assert leaders(shop) == {}


def relays(shop: Shop) -> set[str]:
    with shop.engine.connect() as connection:
        return set(connection.scalars(sa.select(shop.outbox.tables.relay.c.name)))


def leaders(shop: Shop) -> dict[str, int]:
    """Return who leads, in which term."""
    leader = shop.outbox.tables.leader.c
    leads = leader.leads_until > sa.func.now()
    with shop.engine.connect() as connection:
        return {
            row[0]: row[1] for row in connection.execute(sa.select(leader.relay, leader.term).where(leads))
        }
