"""One of fifty destinations hangs: the others go on, and the database sees no more of the relay."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from relaybox import Event
from tests.integration.shop import Databases, Shop
from tests.waiting import await_for

DESTINATIONS = 50
ROUNDS = 4
CONNECTIONS = 4
"""Two of the store, one that listens, and for a moment the one that proves that it hears."""
OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"""


@pytest.mark.slow
async def test_the_others_go_on_while_one_hangs_and_take_no_more_connections(
    migrated_database: Databases,
) -> None:
    shop = Shop(migrated_database("postgresql-18"))
    hangs, go_on = asyncio.Event(), asyncio.Event()

    @shop.outbox.handler("*", name="hangs", timeout="10m", lease="10m")
    async def hang(event: Event) -> None:
        hangs.set()
        await go_on.wait()

    taken = {name: shop.collect(name) for name in (f"d{n}" for n in range(1, DESTINATIONS))}
    async with shop.outbox.relay(patience=1):
        for n in range(ROUNDS):
            shop.emit(1, first=n)
            await hangs.wait()
            expected = {name: list(range(n + 1)) for name in taken}
            await await_for(lambda: taken == expected, lambda: f"all of the healthy ones: {taken}")  # noqa: B023
            with shop.engine.connect() as connection:
                assert connection.scalars(sa.text(OTHERS)).one() <= CONNECTIONS
        assert shop.states("hangs") == {"pending": ROUNDS}
        go_on.set()
        await await_for(lambda: shop.states() == {"delivered": ROUNDS * DESTINATIONS}, "all of them")
