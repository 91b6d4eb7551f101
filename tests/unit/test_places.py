"""How calls share a store's connections, so that a lane that waits for a lock holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox.database.dialects import MARIADB
from relaybox.database.pools import places
from relaybox.database.pools.places import ConnectionPlaces
from relaybox.database.schema import make_tables
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.errors import Locked
from relaybox.stores.sql.steps import StoreSteps
from relaybox.stores.sql.store import SqlStore
from tests.unit import deliveries
from tests.waiting import PATIENCE, await_for


class Calls:
    """Calls of lanes that go on until a test ends them."""

    def __init__(self, connections: int, *, chained: bool = False) -> None:
        self.places = ConnectionPlaces(connections, chained=chained)
        self.under_way: list[str] = []
        self.most = 0
        self._end = asyncio.Event()

    def begin(self, lane: str, count: int = 1) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._call(lane)) for _ in range(count)]

    async def _call(self, lane: str) -> None:
        async with self.places.take(lane):
            self.under_way.append(lane)
            self.most = max(self.most, len(self.under_way))
            await self._end.wait()
            self.under_way.remove(lane)

    def end(self) -> None:
        self._end.set()

    async def meet_a_lock(self, lane: str) -> None:
        with suppress(Locked):
            async with self.places.take(lane):
                raise Locked("a lock")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "HELD_UP", 0.001)


async def test_a_lane_that_waits_has_not_every_place() -> None:
    calls = Calls(3)
    tasks = calls.begin("blocked", 5)
    await await_for(lambda: len(calls.under_way) == 2, "two of them")
    async with asyncio.timeout(PATIENCE):
        for _ in range(10):
            async with calls.places.take("other"):
                assert calls.under_way == ["blocked"] * 2
    calls.end()
    await asyncio.gather(*tasks)


async def test_a_call_that_takes_long_makes_room_for_another_lane() -> None:
    calls = Calls(2)
    tasks = calls.begin("slow")
    await await_for(lambda: calls.under_way, "the slow one")
    async with asyncio.timeout(PATIENCE), calls.places.take("other"):
        assert calls.under_way == ["slow"]
    calls.end()
    await asyncio.gather(*tasks)


async def test_lanes_that_met_a_lock_share_one_place_until_they_meet_none() -> None:
    calls = Calls(3)
    for lane in ("one", "two", "three"):
        await calls.meet_a_lock(lane)
    tasks = [task for lane in ("one", "two", "three") for task in calls.begin(lane)]
    await await_for(lambda: len(calls.under_way) == 1, "one of them")
    others = calls.begin("other") + calls.begin("another")
    await await_for(lambda: len(calls.under_way) == 3, "the other lanes")
    assert set(calls.under_way) >= {"other", "another"}
    calls.end()
    await asyncio.gather(*tasks, *others)
    async with asyncio.timeout(PATIENCE), calls.places.take("one"), calls.places.take("two"):
        pass  # None of them met another.


@pytest.mark.parametrize("connections", [1, 2, 3, 5])
async def test_no_more_calls_are_under_way_than_there_are_connections(connections: int) -> None:
    calls = Calls(connections)
    for lane in ("a", "b"):
        await calls.meet_a_lock(lane)
    tasks = [task for lane in ("a", "b", "c", "d", "") for task in calls.begin(lane, 3)]
    await await_for(lambda: calls.most == connections, "every connection is used")
    calls.end()
    await asyncio.gather(*tasks)
    assert calls.most == connections


async def test_a_call_that_is_cancelled_leaves_its_place() -> None:
    calls = Calls(2)
    for _ in range(3):
        tasks = calls.begin("one") + calls.begin("two")
        await await_for(lambda: len(calls.under_way) == 2, "both places are taken")
        waiting = calls.begin("three")
        await asyncio.sleep(0)
        for task in (*tasks, *waiting):
            task.cancel()
        await asyncio.gather(*tasks, *waiting, return_exceptions=True)
        calls.under_way.clear()
    calls.end()
    await asyncio.gather(*calls.begin("one"), *calls.begin("two"))


async def test_where_calls_of_a_lane_are_chained_they_leave_the_quick_places_to_other_lanes() -> None:
    calls = Calls(3, chained=True)
    waiting = calls.begin("one") + calls.begin("two")
    await await_for(lambda: calls.under_way == ["one", "two"], "a call of each blocked lane")
    more = calls.begin("one") + calls.begin("two")
    async with asyncio.timeout(PATIENCE):
        for _ in range(10):
            async with calls.places.take("other"):
                assert calls.under_way == ["one", "two"]
            await asyncio.sleep(places.HELD_UP)
    calls.end()
    await asyncio.gather(*waiting, *more)


async def test_a_call_does_not_wait_for_the_place_of_slow_ones_once_its_own_lane_is_free() -> None:
    calls = Calls(3, chained=True)
    slow = calls.begin("slow")
    await await_for(lambda: calls.under_way == ["slow"], "the slow call")
    await asyncio.sleep(5 * places.HELD_UP)
    async with asyncio.timeout(PATIENCE):
        async with calls.places.take("other"):
            await asyncio.sleep(5 * places.HELD_UP)
            second = asyncio.create_task(_pass(calls, "other"))
            await asyncio.sleep(0)
            assert not second.done()
        await second
    assert calls.under_way == ["slow"]
    calls.end()
    await asyncio.gather(*slow)


async def test_a_slow_call_of_upkeep_does_not_hold_up_the_rest_of_upkeep() -> None:
    calls = Calls(3, chained=True)
    slow = calls.begin(places.UPKEEP)
    await await_for(lambda: calls.under_way, "the slow call")
    await asyncio.sleep(5 * places.HELD_UP)
    async with asyncio.timeout(PATIENCE):
        await _pass(calls, places.UPKEEP)
    assert calls.under_way == [places.UPKEEP]
    calls.end()
    await asyncio.gather(*slow)


class Sharing:
    """A driver whose calls only take their place."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def run(self, begin: Callable[[], Steps[Any]], *, checked: bool = False, lane: str = "") -> Any:
        await _pass(self._calls, lane)

    async def close(self) -> None:
        """Do nothing."""


async def test_a_suspect_does_not_wait_for_a_slow_call_of_its_destination() -> None:
    calls = Calls(3, chained=True)
    suspect = deliveries.make()
    slow = calls.begin(suspect.destination)
    await await_for(lambda: calls.under_way, "the slow call")
    await asyncio.sleep(5 * places.HELD_UP)
    store = SqlStore(StoreSteps(Statements(make_tables(sa.MetaData()), MARIADB, "format")), Sharing(calls))
    async with asyncio.timeout(PATIENCE):
        # Meanwhile the suspects of all other destinations wait at the door.
        await store.hold_alone(suspect, True)
    assert calls.under_way == [suspect.destination]
    calls.end()
    await asyncio.gather(*slow)


async def _pass(calls: Calls, lane: str) -> None:
    async with calls.places.take(lane):
        pass
