"""Relays do not wait for transactions of the application that are still open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from relaybox.core.outcome import Delivered, Released, Retried
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.store import Settlement, Want
from relaybox.stores.upkeep import Slice
from tests.databases import SERVERS
from tests.integration.shop import Databases, drive
from tests.integration.test_interleavings import Scene, opened
from tests.waiting import PATIENCE

WANT = Want("shop", "relay-1", ordered=True)


@pytest.fixture(params=SERVERS)
async def scene(request: pytest.FixtureRequest, migrated_database: Databases) -> AsyncIterator[Scene]:
    async with opened(migrated_database(request.param)) as scene:
        yield scene


async def test_a_settle_does_not_wait_for_an_event_of_its_key_that_is_not_committed(scene: Scene) -> None:
    store = scene.store
    scene.put("a")
    [head] = (await store.claim(WANT)).deliveries
    with scene.engine.begin() as connection:
        scene.insert(connection, "a")
        async with asyncio.timeout(PATIENCE):
            assert await store.settle([Settlement(head, Delivered())]) == frozenset()
            assert (await store.claim(WANT)).deliveries == ()
    assert len((await store.claim(WANT)).deliveries) == 1


async def test_a_sweep_steps_over_a_head_that_somebody_has_locked(scene: Scene) -> None:
    store, event, upkeep = scene.store, scene.outbox.tables.event, SqlUpkeep(scene.store)
    scene.put("a", "a")
    head, later = (await store.claim(WANT)).deliveries
    await store.settle([Settlement(head, Retried(60, "503")), Settlement(later, Released())])
    assert (await store.claim(WANT)).parked == 1
    with scene.engine.begin() as connection:
        connection.execute(sa.delete(event).where(event.c.id == head.id))
    with scene.engine.begin() as connection:
        scene.lock(connection, later.id)
        async with asyncio.timeout(PATIENCE):
            assert await upkeep.sweep.make_due("shop", True, None, 10) == Slice(0, None)
    assert await upkeep.sweep.make_due("shop", True, None, 10) == Slice(1, None)


async def test_a_claim_locks_only_what_it_takes(scene: Scene) -> None:
    """While its transaction is open, others settle what they hold, and find the suspects that it left."""
    store, event = scene.store, scene.outbox.tables.event
    scene.put("", "", "")
    held, *died = (await store.claim(Want("shop", "relay-1", limit=3))).deliveries
    suspects = event.c.id.in_([delivery.id for delivery in died])
    with scene.engine.begin() as connection:
        connection.execute(
            sa.update(event).where(suspects).values(crashes=1, leased_until=event.c.created_at)
        )
    with scene.transaction() as connection:
        careful = Want("shop", "relay-2", suspects=False)
        assert drive(connection, store.steps.claim(careful)).deliveries == ()
        async with asyncio.timeout(PATIENCE):
            assert await store.settle([Settlement(held, Delivered())]) == frozenset()
            [suspect] = (await store.claim(Want("shop", "relay-1", limit=1))).deliveries
    assert suspect.id in {delivery.id for delivery in died}
