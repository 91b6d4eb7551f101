"""One of fifty destinations hangs: the others do not notice, and the database sees no more of the relay."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from relaybox import Event
from tests.integration.shop import Shop, until

log = logging.getLogger(__name__)
DESTINATIONS = 50
EVENTS = 25
EVERY = 0.03
TURNS = 4
TRIES = 3
GROWTH = 1.5
FLOOR = 0.005
"""Seconds: less than this, more or less, is one claim's place in the line for a connection."""
CONNECTIONS = 4
"""Two of the store, one that listens, and for a moment the one that proves that it hears."""


class Crowd:
    """Fifty functions that note how long their events took; the first of them hangs when told so."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._committed: dict[int, float] = {}
        self._took: list[float] = []
        self._emitted = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.connections = 0
        for number in range(DESTINATIONS):
            shop.outbox.handler("*", name=f"d{number}", timeout="60s")(self._handler(number))

    def _handler(self, number: int) -> Callable[[Event], object]:
        async def handle(event: Event) -> None:
            if number == 0:
                await self.go_on.wait()
            else:
                self._took.append(time.monotonic() - self._committed[event.payload["n"]])

        return handle

    async def times(self) -> list[float]:
        """Emit at a steady rate; the times from commit to function, without the first one's."""
        self._took = []
        first, self._emitted = self._emitted, self._emitted + EVENTS
        with self._shop.engine.connect() as connection:
            for n in range(first, first + EVENTS):
                self._emit(connection, n)
                await asyncio.sleep(EVERY)
            self._count(connection)
        healthy = sum(n % DESTINATIONS > 0 for n in range(first, first + EVENTS))
        await until(lambda: len(self._took) == healthy, "all of the healthy ones")
        return self._took

    async def compare(self) -> tuple[float, float]:
        """The 99th percentile with all healthy and while one hangs, taken by turns: noise meets both."""
        healthy, hanging = [], []
        for _ in range(TURNS):
            self.go_on.set()
            healthy += await self.times()
            self.go_on.clear()
            hanging += await self.times()
        self.go_on.set()
        return p99(healthy), p99(hanging)

    def _emit(self, connection: sa.Connection, n: int) -> None:
        name = f"d{n % DESTINATIONS}"
        self._shop.outbox.emit(connection, "Order", n, "order.paid", {"n": n}, destinations=[name])
        connection.commit()
        self._committed[n] = time.monotonic()
        self._shop.outbox.wake(name)

    def _count(self, connection: sa.Connection) -> None:
        others = sa.text(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        self.connections = max(self.connections, connection.scalars(others).one())
        connection.rollback()


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]


@pytest.mark.slow
async def test_the_others_are_not_slower_while_one_hangs(fresh_database: Callable[[str], str]) -> None:
    shop = Shop(fresh_database("postgresql-18"))
    crowd = Crowd(shop)
    seen = []
    async with shop.outbox.relay(patience=1):
        await crowd.times()
        # A machine that is busy with something else may spoil one comparison, not all of them.
        while len(seen) < TRIES:
            usual, then = await crowd.compare()
            seen.append(f"p99 {usual * 1000:.1f} ms with all healthy, {then * 1000:.1f} ms while one hangs")
            if then <= GROWTH * usual + FLOOR:
                break
        else:
            pytest.fail("; ".join(seen))
    log.info("%s; %d connections", "; ".join(seen), crowd.connections)
    assert crowd.connections <= CONNECTIONS
