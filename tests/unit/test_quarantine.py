"""Suspects of several lanes: none holds up the others, and only the death of a lone one counts."""

from __future__ import annotations

import asyncio

import pytest

from relaybox.core.event import Delivery, Event, Status
from relaybox.errors import Locked, StoreError
from relaybox.relay import quarantine
from relaybox.relay.observer import Observer
from relaybox.stores.memory import MemoryStore, Row
from relaybox.stores.store import Claim, Want
from tests.unit.lanes import make, nothing, running, shared, suspects
from tests.waiting import PATIENCE, await_for


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "PATIENCE", 0.02)
    monkeypatch.setattr(quarantine, "APART", 0.0)


def delivered(rows: list[Row]) -> bool:
    return all(row.status is Status.DELIVERED for row in rows)


class Hanging:
    """A handler whose events never end, until they may."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = asyncio.Event()

    async def __call__(self, event: Event) -> None:
        self.begun += 1
        await self.may_end.wait()


@pytest.mark.parametrize("deaths", [2, 9])
async def test_suspects_of_a_destination_that_hangs_hold_up_no_others(deaths: int) -> None:
    store, hanging = MemoryStore(), Hanging()
    suspects(store, "hangs", 3, deaths)
    others = suspects(store, "healthy", 40, deaths)
    together = shared(store)
    lanes = make(store, hanging, together, "hangs"), make(store, nothing, together, "healthy")
    async with running(*lanes, patience=0.0):
        await await_for(lambda: hanging.begun and delivered(others), "all suspects of the healthy one")


async def test_suspects_are_sent_in_groups() -> None:
    store, barrier = MemoryStore(), asyncio.Barrier(16)
    rows = suspects(store, "runner", 32)

    async def handler(event: Event) -> None:
        await barrier.wait()

    async with running(make(store, handler)):
        await await_for(lambda: delivered(rows), "two groups of 16")


async def test_the_death_of_a_suspect_counts_while_it_is_alone() -> None:
    store, hanging, other = MemoryStore(), Hanging(), Hanging()
    [row] = suspects(store, "hangs")
    together = shared(store)
    async with running(make(store, hanging, together, "hangs"), patience=0.0):
        await await_for(lambda: hanging.begun)
        assert row.alone
        [second] = suspects(store, "other")
        async with running(make(store, other, together, "other"), patience=0.0):
            await await_for(lambda: other.begun)
            assert (row.alone, second.alone) == (False, False), "either may be what kills the process"
            hanging.may_end.set()
            await await_for(lambda: row.status is Status.DELIVERED)
            [third] = suspects(store, "hangs")[1:]
            await await_for(lambda: hanging.begun == 2)
            assert not third.alone, "the other lane's is still being sent"


async def test_several_suspects_of_a_lane_are_not_alone() -> None:
    store, hanging = MemoryStore(), Hanging()
    rows = suspects(store, "hangs", 2)
    async with running(make(store, hanging, name="hangs"), patience=0.0):
        await await_for(lambda: hanging.begun == 2)
        assert [row.alone for row in rows] == [False, False]


class Refusing(MemoryStore):
    """A database that cannot be asked to end the solitude of a suspect."""

    error: StoreError | None = None
    refused = 0

    async def hold_alone(self, delivery: Delivery, alone: bool) -> None:
        if not alone and self.error is not None:
            self.refused += 1
            raise self.error
        await super().hold_alone(delivery, alone)


@pytest.mark.parametrize("locked", [False, True])
async def test_no_suspect_is_sent_before_the_database_knows_of_it(locked: bool) -> None:
    """But for a row that a stranger has locked: that would hold up the other lanes."""
    store, hanging, other = Refusing(), Hanging(), Hanging()
    store.error = Locked("by a stranger") if locked else StoreError("away")
    [row] = suspects(store, "hangs")
    together = shared(store, hasty=True)
    async with running(make(store, hanging, together, "hangs"), patience=0.0):
        await await_for(lambda: hanging.begun)
        suspects(store, "other")
        async with running(make(store, other, together, "other"), patience=0.0):
            await await_for(lambda: store.refused > (0 if locked else 3))
            assert locked or not other.begun
            store.error = None
            await await_for(lambda: other.begun)
            assert row.alone == locked


async def test_lanes_that_end_do_not_keep_others_from_being_alone() -> None:
    store, hanging = MemoryStore(), Hanging()
    suspects(store, "hangs")
    together = shared(store)
    async with running(make(store, hanging, together, "hangs"), patience=0.0):
        await await_for(lambda: hanging.begun)
    [row] = suspects(store, "other")
    other = Hanging()
    async with running(make(store, other, together, "other"), patience=0.0):
        await await_for(lambda: other.begun)
        assert row.alone


class Defective(MemoryStore):
    """Fails the lane of one destination with an error that does not come from a database."""

    broken: str | None = None

    async def claim(self, want: Want) -> Claim:
        if want.destination == self.broken:
            raise RuntimeError("a defect")
        return await super().claim(want)


async def test_a_suspect_that_a_failed_lane_left_behind_is_not_blamed_for_the_next_one() -> None:
    store, hanging, other, failed = Defective(), Hanging(), Hanging(), list[str]()

    class Watching(Observer):
        def trouble(self, destination: str, doing: str, error: BaseException) -> None:
            failed.append(doing)

    [row] = suspects(store, "hangs")
    together = shared(store, Watching(), hasty=True)
    async with running(make(store, hanging, together, "hangs"), patience=0.0):
        await await_for(lambda: hanging.begun)
        assert row.alone
        store.broken = "hangs"
        await await_for(lambda: "run" in failed, "the failure of its lane")
        suspects(store, "other")
        async with running(make(store, other, together, "other"), patience=0.0):
            await await_for(lambda: other.begun)
            assert not row.alone


def test_patience_doubles_with_each_death_and_ends() -> None:
    times = [quarantine.patience(deaths) / quarantine.PATIENCE for deaths in (2, 6, 7, 8, 9, 12)]
    assert times == [1, 1, 2, 4, 8, 64]
    assert quarantine.patience(900) <= quarantine.LONGEST


async def live(store: MemoryStore) -> None:
    """Run a lane for each destination, none of whose sends ends, until the first suspect is sent."""
    together, hanging = shared(store), Hanging()
    names = {row.destination for row in store.rows.values()}
    tasks = [asyncio.create_task(make(store, hanging, together, name).run(0.0)) for name in names]
    await await_for(lambda: hanging.begun, "the first suspect")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_killer_is_blamed_though_other_lanes_have_suspects_at_each_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lanes come in another order in each life, and the first is alone; it may be any of them."""
    monkeypatch.setattr(quarantine, "PATIENCE", PATIENCE)
    monkeypatch.setattr(quarantine, "APART", 0.1)
    store = MemoryStore()
    rows = [suspects(store, name, deaths=7)[0] for name in ("kills", "slow 1", "slow 2")]
    blamed = [0, 0, 0]
    while not all(blamed):
        await live(store)
        assert [row.alone for row in rows].count(True) == 1
        blamed = [times + row.alone for times, row in zip(blamed, rows, strict=True)]
        for row in rows:
            row.leased_until = 0.0
            row.attempts = 1
