"""What part of a limit is whose: never more than the whole, whatever happens."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaybox.errors import StoreError
from relaybox.relay.upkeep.membership import INTERVAL, LIVE, Membership, share
from relaybox.stores.upkeep import Beat, Member

NAMES = st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=12, unique=True)
TOTAL = 10


@given(st.integers(0, 1000), NAMES)
def test_the_parts_sum_to_the_whole(total: int, names: list[str]) -> None:
    parts = [share(total, names, name) for name in names]
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1


@given(st.integers(0, 1000), NAMES, st.data())
def test_lists_that_name_more_members_than_are_at_work_never_give_too_much(
    total: int, at_work: list[str], data: st.DataObject
) -> None:
    lists = [{*at_work, *data.draw(NAMES)} for _ in at_work]
    parts = [share(total, sorted(names), name) for name, names in zip(at_work, lists, strict=True)]
    assert sum(parts) <= total


@given(st.integers(0, 1000), NAMES)
def test_who_is_not_on_the_list_has_no_part(total: int, names: list[str]) -> None:
    assert share(total, names, "nobody of them") == 0


class World:
    """Virtual time, and a database whose rows are members; whatever takes time may also fail."""

    def __init__(self, chance: random.Random | None = None, *, faults: float = 0.0) -> None:
        self.time = 0.0
        self.rows: dict[str, float] = {}
        self._chance = chance or random.Random(0)
        self._faults = faults
        self._line: list[tuple[float, int, asyncio.Future[None]]] = []
        self._ticket = itertools.count()

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._line, (self.time + seconds, next(self._ticket), future))
        await future

    async def run(self, until: float, check: Callable[[], None]) -> None:
        """Let things happen, one at a time; ``check`` is called before and after each."""
        while True:
            for _ in range(10):
                await asyncio.sleep(0)
            check()
            while self._line and self._line[0][2].done():
                heapq.heappop(self._line)
            if not self._line or self._line[0][0] > until:
                break
            moment, _, future = heapq.heappop(self._line)
            self.time = moment
            check()
            future.set_result(None)

    async def _trouble(self) -> None:
        if self._chance.random() < self._faults:
            await self.sleep(self._chance.choice([0.0, 0.1, 1.0, 3.0, 7.0]))
            if self._chance.random() < 0.5:
                raise StoreError("the connection was lost")
        else:
            await self.sleep(self._chance.random() * 0.01)

    async def beat(self, member: Member, live: float, *, joins: bool) -> Beat:
        await self._trouble()
        mine = {member.name: self.time}
        await self._trouble()
        if joins:
            self.rows |= mine
            await self._trouble()
            beat = self._alive(self.rows, live)
        else:
            beat = self._alive(self.rows | mine, live)
            await self._trouble()
            self.rows |= mine
        await self._trouble()
        return beat

    def _alive(self, rows: dict[str, float], live: float) -> Beat:
        alive = tuple(sorted(name for name, seen in rows.items() if self.time - seen < live))
        return Beat(alive, datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.time))

    async def leave(self, name: str) -> None:
        await self._trouble()
        self.rows.pop(name, None)


class Lacking:
    """Members that lack the destination; each of the others learns that sooner or later."""

    def __init__(self, names: Sequence[str] = (), chance: random.Random | None = None) -> None:
        self.names = names
        self.chance = chance
        self._learned: set[tuple[str, str]] = set()

    def may_have(self, me: str, name: str, destination: str) -> bool:
        if name in self.names and (self.chance is None or self.chance.random() < 0.01):
            self._learned.add((me, name))
        return (me, name) not in self._learned


def membership(world: World, name: str, lacking: Lacking | None = None) -> Membership:
    upkeep: Any = world
    may_have = partial((lacking or Lacking()).may_have, name)
    return Membership(upkeep, Member(name, "host", 1, "0.1.0"), world, may_have=may_have)


async def live(world: World, me: Membership, chance: random.Random, faults: float) -> None:
    """Act as a relay that sometimes stalls, dies without a word, or leaves and joins again."""
    await world.sleep(chance.random() * 5)
    while True:
        with suppress(StoreError):
            await me.beat()
        fate = chance.random() if faults else 1.0
        if fate < 0.03:
            await world.sleep(chance.random() * 20)
        elif fate < 0.06:
            with suppress(StoreError):
                await me.leave()
                await world.sleep(chance.random() * 10)
                await me.join()
        await world.sleep(INTERVAL)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(0, 1), st.sampled_from([0.0, 0.05, 0.3]))
def test_at_no_moment_is_more_given_than_there_is(seed: int, count: int, lack: int, faults: float) -> None:
    chance = random.Random(seed)
    world = World(chance, faults=faults)
    names = [f"relay {number}" for number in range(count)]
    lacking = Lacking(names[:lack], random.Random(seed))
    relays = [membership(world, name, lacking) for name in names]
    members = relays[lack:]
    most = 0

    def check() -> None:
        nonlocal most
        given = sum(me.share("shop", TOTAL) for me in members)
        assert given <= TOTAL, [(me.alive, me.share("shop", TOTAL)) for me in members]
        most = max(most, given)

    async def simulate() -> None:
        tasks = [asyncio.create_task(live(world, me, chance, faults)) for me in relays]
        await world.run(120.0, check)
        assert all(not task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(simulate())
    if not faults:
        assert most == TOTAL or lack
        lacking.chance = None
        assert sum(me.share("shop", TOTAL) for me in members) == TOTAL, "without trouble all of it is given"


async def done(world: World, work: Coroutine[Any, Any, None], seconds: float) -> None:
    task = asyncio.create_task(work)
    await world.run(world.time + seconds, lambda: None)
    await task


async def joined(world: World, me: Membership) -> None:
    await done(world, me.join(), 1)


async def beaten(world: World, me: Membership) -> None:
    await done(world, me.beat(), 0.1)


async def test_a_member_that_is_known_to_have_died_is_not_waited_for() -> None:
    world = World()
    upkeep: Any = world
    await joined(world, membership(world, "dead"))
    me = Membership(upkeep, Member("me", "host", 2, "0.1.0"), world, died=lambda name: name == "dead")
    await joined(world, me)
    assert (me.alive, me.share("shop", TOTAL), list(world.rows)) == (("me",), TOTAL, ["me"])


async def test_who_is_alone_starts_at_once_and_who_is_not_waits_for_the_others() -> None:
    world = World()
    first, second = membership(world, "a"), membership(world, "b")
    assert first.share("shop", TOTAL) == 0
    await joined(world, first)
    assert first.share("shop", TOTAL) == TOTAL
    await joined(world, second)
    assert second.alive == ("a", "b")
    assert second.share("shop", TOTAL) == 0
    for _ in range(LIVE + 1):
        await beaten(world, first)
        await beaten(world, second)
        world.time += INTERVAL
    assert (first.share("shop", TOTAL), second.share("shop", TOTAL)) == (5, 5)


async def test_who_waits_starts_when_the_others_are_gone() -> None:
    world = World()
    first, second = membership(world, "a"), membership(world, "b")
    await joined(world, first)
    await joined(world, second)
    await done(world, first.leave(), 0.1)
    assert first.share("shop", TOTAL) == 0
    await beaten(world, second)
    assert second.share("shop", TOTAL) == TOTAL


async def test_out_of_touch_nothing_is_used_until_it_has_joined_again() -> None:
    world = World()
    first, second = membership(world, "a"), membership(world, "b")
    await joined(world, first)
    world.time += LIVE * INTERVAL
    assert first.share("shop", TOTAL) == 0
    await joined(world, second)
    assert second.share("shop", TOTAL) == TOTAL
    await beaten(world, first)
    assert first.share("shop", TOTAL) == 0, "the other may not have seen it yet"
    world.time += LIVE * INTERVAL - 0.5
    await beaten(world, second)
    await beaten(world, first)
    world.time += 0.5
    assert (first.share("shop", TOTAL), second.share("shop", TOTAL)) == (5, 5)


async def test_a_beat_that_fails_changes_nothing() -> None:
    world = World()
    me = membership(world, "a")
    await joined(world, me)
    failing = World(faults=1.0, chance=random.Random(3))
    me._members = failing  # type: ignore[assignment]
    task = asyncio.create_task(me.beat())
    await failing.run(100.0, lambda: None)
    with pytest.raises(StoreError):
        await task
    assert me.share("shop", TOTAL) == TOTAL


async def test_a_beat_that_was_committed_too_late_does_not_count() -> None:
    """Its row was too old when it became visible: what counts is the next beat, which the others can see."""
    world = World()
    me = membership(world, "b")
    alive: tuple[str, ...] = ("a",)

    async def answer(member: Member, live: float, *, joins: bool) -> Beat:
        world.time += 0.1
        return Beat(alive, datetime(2026, 1, 1, tzinfo=UTC))

    world.beat = answer  # type: ignore[method-assign]
    await me.join()
    alive = ("a", "b")
    for _ in range(LIVE):
        await me.beat()
        assert me.share("shop", TOTAL) == 0
        world.time += INTERVAL
    await me.beat()
    assert me.share("shop", TOTAL) == 5


@pytest.mark.parametrize("others", [("b",), ()])
async def test_who_goes_on_too_late_has_to_join_again_unless_it_is_alone(others: tuple[str, ...]) -> None:
    """While its beat hung, another may have found its row too old, started alone, and is not on its list."""
    world = World()
    me = membership(world, "a")
    await joined(world, me)

    async def hangs(member: Member, live: float, *, joins: bool) -> Beat:
        world.time += 0.0 if joins else live - 1
        return Beat(("a", *others) if joins else ("a",), datetime(2026, 1, 1, tzinfo=UTC))

    world.beat = hangs  # type: ignore[method-assign]
    world.time += INTERVAL
    await me.beat()
    assert me.share("shop", TOTAL) == (0 if others else TOTAL), "another may not have seen it yet"
