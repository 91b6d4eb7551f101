"""A claim is bounded in bytes, by what the database says, whatever was claimed before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from relaybox import Event
from relaybox.core.outcome import Delivered
from relaybox.relay.batch import Batch, InFlight
from relaybox.relay.sizing import BYTES_A_CLAIM, BYTES_IN_FLIGHT
from relaybox.stores.store import Settlement, Want
from tests.databases import POSTGRESQL
from tests.integration.shop import Databases, Shop
from tests.waiting import PATIENCE, await_for

KINDS = [*POSTGRESQL, "mariadb", "sqlite"]
LARGE = 100_000
NOISE = Random("noise").randbytes(LARGE)
SIZED: dict[str, dict[str, Any]] = {
    "compressible": {"payload": {"text": "x" * LARGE}},
    "incompressible": {"payload": {"text": NOISE.hex()[:LARGE]}},
    "binary": {"payload": NOISE},
    "headers": {"payload": {}, "headers": {"note": "x" * LARGE}},
}
"""Events of about LARGE bytes, however a database stores them."""


class Sized(Shop):
    """A shop with a handler for events of all sizes, without order or all of one key."""

    def __init__(self, url: str, ordered: bool) -> None:
        super().__init__(url)
        self.outbox.handler("*", name="on_order", ordered=ordered, concurrency=1)(self.take)
        self.want = Want("on_order", "me", ordered=ordered, suspects=False)
        self.held = asyncio.Event()

    async def take(self, event: Event) -> None:
        await self.held.wait()

    def put(self, count: int, **parts: Any) -> None:
        """Insert all rows, one statement each: MariaDB takes at most 16 MB in one."""
        with self.engine.begin() as connection:
            for _ in range(count):
                self.outbox.emit(connection, "Order", 1, "order.paid", **parts)

    async def claims(self, **options: Any) -> list[list[int]]:
        """Claim and deliver until nothing is left; return the positions of each claim."""
        claims = []
        async with self.store() as store:
            while deliveries := (await store.claim(replace(self.want, **options))).deliveries:
                claims.append([delivery.position for delivery in deliveries])
                await store.settle([Settlement(delivery, Delivered()) for delivery in deliveries])
        return claims


def parts(positions: list[int], *lengths: int) -> list[list[int]]:
    """Cut some positions into parts of these lengths."""
    left = iter(positions)
    return [[next(left) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("sized", SIZED)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_claim_ends_where_its_rows_are_too_large_together(
    kind: str, sized: str, ordered: bool, migrated_database: Databases
) -> None:
    shop = Sized(migrated_database(kind), ordered)
    shop.put(3, payload={})
    shop.put(7, **SIZED[sized])
    positions = shop.column("position")
    for options in ({}, {"suspects": True}, {"only": tuple(shop.column("id"))}):
        claims = await shop.claims(bytes=int(2.5 * LARGE), **options)
        assert claims == parts(positions, 5, 2, 2, 1), options
        event = shop.outbox.tables.event
        with shop.engine.begin() as connection:
            again = {"status": "pending", "next_attempt_at": event.c.created_at, "delivered_at": None}
            connection.execute(event.update().values(**again))


@pytest.mark.parametrize("sized", SIZED)
@pytest.mark.parametrize("kind", POSTGRESQL)
async def test_a_claim_of_light_rows_gets_all_of_them_or_none(
    kind: str, sized: str, migrated_database: Databases
) -> None:
    shop = Sized(migrated_database(kind), ordered=False)
    shop.put(3, payload={})
    shop.put(2, **SIZED[sized])
    most = {"bytes": int(1.5 * LARGE), "light": True}
    assert await shop.claims(**most) == []
    assert await shop.claims(limit=3, **most) == parts(shop.column("position"), 3)


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_row_that_is_larger_than_a_claim_is_claimed_alone(
    kind: str, ordered: bool, migrated_database: Databases
) -> None:
    shop = Sized(migrated_database(kind), ordered)
    for size in (1, LARGE, 1, LARGE, LARGE, 1):
        shop.put(1, payload={"text": "x" * size})
    assert await shop.claims(bytes=LARGE // 2) == parts(shop.column("position"), *[1] * 6)


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("kind", KINDS)
async def test_large_events_after_small_ones_do_not_fill_the_memory(
    kind: str, ordered: bool, migrated_database: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From small events a relay learns to claim many; then all of the large ones are in flight at once."""
    shop, in_flight = Sized(migrated_database(kind), ordered), [0]
    add = InFlight.add

    def noted(self: InFlight, batch: Batch) -> None:
        add(self, batch)
        in_flight.append(self.bytes)

    monkeypatch.setattr(InFlight, "add", noted)
    shop.put(150, payload={})
    shop.held.set()
    async with shop.outbox.relay(), asyncio.timeout(PATIENCE):
        await await_for(lambda: shop.states() == {"delivered": 150}, "the small ones")
        shop.held.clear()
        shop.put(50, payload={"text": "x" * 1_000_000})
        await await_for(lambda: max(in_flight) > BYTES_A_CLAIM // 2, "a whole claim")
        shop.held.set()
        await await_for(lambda: shop.states() == {"delivered": 200}, "the large ones")
    assert max(in_flight) <= BYTES_IN_FLIGHT
