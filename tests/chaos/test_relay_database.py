"""The database goes away while a relay works, and comes back: the relay goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.chaos.cluster import Cluster, running
from tests.chaos.scene import KEYS, Scene
from tests.conftest import available
from tests.integration.shop import MEMBERSHIP, SOON
from tests.waiting import await_for

FIRST, SECOND = 200, 50


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with available("PostgreSQL 18", running("postgresql-18")) as cluster:
        assert isinstance(cluster, Cluster)
        yield cluster


@pytest.mark.fast
async def test_a_relay_goes_on_when_its_database_was_killed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MEMBERSHIP, "interval", SOON)
    # Over when the database is back: what was in flight is another's to take, if there were another.
    scene = Scene(cluster.url, lease="2s", timeout="2s", concurrency=10)
    scene.shop.emit(FIRST, keys=KEYS)
    event = scene.shop.outbox.tables.event.c
    async with scene.shop.outbox.relay():
        await await_for(lambda: len(scene.taken) >= FIRST // 4, "a part delivered")
        await asyncio.to_thread(cluster.kill)
        await asyncio.sleep(2.2)
        await asyncio.to_thread(cluster.start)
        in_flight = set(scene.taken) - scene.numbers(event.status == "delivered")
        scene.shop.emit(SECOND, keys=KEYS, first=FIRST)
        await await_for(
            lambda: scene.shop.states() == {"delivered": FIRST + SECOND}, "everything, after the restart"
        )
    assert scene.repeated(range(FIRST + SECOND)) <= in_flight
