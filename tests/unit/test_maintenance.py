"""The jobs of upkeep, on an upkeep that answers as the test wants."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from relaybox.config import Destination
from relaybox.errors import StoreError
from relaybox.event import Delivery
from relaybox.maintenance import prune
from relaybox.maintenance.caretaker import Caretaker, Chores
from relaybox.maintenance.lag import LAST, bucket, ends, percentile
from relaybox.maintenance.leadership import LEASE, Leadership
from relaybox.maintenance.moment import DatabaseTime
from relaybox.maintenance.prune import Prune
from relaybox.maintenance.round import Batch, Round, take_turns
from relaybox.maintenance.tally import Tally
from relaybox.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.schema import make_tables
from relaybox.store import Claim, Settlement
from relaybox.stores.dialects import MARIADB
from relaybox.stores.statements import Statements
from relaybox.stores.upkeep_statements import templates
from relaybox.upkeep import Member, Minute, Slice
from tests.unit.deliveries import make
from tests.unit.upkeep import NOON, Clock, going_on
from tests.waiting import PATIENCE, await_for

ME = Member("me", "host", 1, "0.1.0")


def delivery(age: float = 0.0) -> Delivery:
    return make(created_at=NOON - timedelta(seconds=age))


@given(st.floats(0, 1e7))
def test_a_lag_is_in_the_bucket_that_it_fits(seconds: float) -> None:
    index = bucket(seconds)
    assert 0 <= index <= LAST
    assert index == LAST or seconds <= ends(index) * 1.000001
    assert index == 0 or seconds >= ends(index - 1) * 0.999999


def test_the_end_of_a_bucket_is_in_it_and_percentiles_are_read_from_the_counts() -> None:
    assert [bucket(ends(index)) for index in range(LAST)] == list(range(LAST))
    assert bucket(-5.0) == 0
    assert bucket(1e12) == LAST
    counts = {0: 90, 4: 8, 20: 2}
    assert percentile(counts, 0.5) == percentile(counts, 0.9) == ends(0)
    assert percentile(counts, 0.95) == ends(4)
    assert percentile(counts, 0.99) == ends(20)
    assert percentile({}, 0.5) is None


@pytest.fixture
def tally(clock: Clock) -> Tally:
    return Tally("me", DatabaseTime(clock, lambda: NOON))


def settle(tally: Tally, *outcomes: Outcome, age: float = 0.0) -> None:
    tally.settled("shop", [Settlement(delivery(age), outcome) for outcome in outcomes], frozenset())


async def test_outcomes_count_by_minute_and_destination(tally: Tally, clock: Clock, upkeep: Any) -> None:
    settle(tally, Delivered(), Delivered(keep=False), Retried(1.0, "e"), Failed("e"), Released(), age=1.0)
    tally.claimed("other", Claim(failed=(delivery(),)))
    clock.time += 60
    settle(tally, Delivered())
    await tally.flush(upkeep)
    assert sorted(upkeep.recorded, key=lambda row: (row.minute, row.destination)) == [
        Minute(NOON, "other", "me", 0, 0, 1, {}),
        Minute(NOON, "shop", "me", 2, 1, 1, {bucket(1.0): 2}),
        Minute(NOON + timedelta(minutes=1), "shop", "me", 1, 0, 0, {bucket(60.0): 1}),
    ]


async def test_what_was_lost_is_not_counted(tally: Tally, upkeep: Any) -> None:
    lost, mine = delivery(), delivery()
    tally.settled("shop", [Settlement(one, Delivered()) for one in (lost, mine)], frozenset([lost.id]))
    await tally.flush(upkeep)
    assert [row.delivered for row in upkeep.recorded] == [1]


async def test_counts_that_could_not_be_written_are_kept_and_written_once(tally: Tally, upkeep: Any) -> None:
    settle(tally, Delivered())
    upkeep.commits_and_fails = True
    with pytest.raises(StoreError):
        await tally.flush(upkeep)
    assert [row.delivered for row in upkeep.recorded] == [1]
    upkeep.commits_and_fails = False
    settle(tally, Delivered())
    await tally.flush(upkeep)
    assert [row.delivered for row in upkeep.recorded] == [2], "the whole minute, in place of what was written"
    await tally.flush(upkeep)
    assert upkeep.calls.count("record") == 2, "nothing new, nothing to write"


async def test_what_is_settled_during_a_flush_is_written_by_the_next(tally: Tally, upkeep: Any) -> None:
    settle(tally, Delivered())
    upkeep.meanwhile = lambda: settle(tally, Delivered())
    await tally.flush(upkeep)
    upkeep.meanwhile = None
    await tally.flush(upkeep)
    assert [row.delivered for row in upkeep.recorded] == [2]


async def test_minutes_that_are_written_and_over_are_forgotten(
    tally: Tally, clock: Clock, upkeep: Any
) -> None:
    settle(tally, Delivered())
    await tally.flush(upkeep)
    assert tally._counts
    clock.time += 3600
    await tally.flush(upkeep)
    assert not tally._counts


async def test_a_clock_that_is_set_back_does_not_begin_a_minute_anew(clock: Clock, upkeep: Any) -> None:
    time = DatabaseTime(clock, lambda: NOON)
    tally = Tally("me", time)
    settle(tally, Delivered())
    clock.time += 120
    settle(tally, Delivered())
    await tally.flush(upkeep)
    time.set(NOON)
    settle(tally, Delivered())
    await tally.flush(upkeep)
    assert [(row.minute, row.delivered) for row in upkeep.recorded] == [(NOON, 2)]


async def test_works_take_turns_until_they_have_nothing_more_to_do(clock: Clock) -> None:
    done: list[str] = []

    def work(name: str, batches: int) -> Callable[[int], Any]:
        async def batch(term: int) -> Batch:
            done.append(name)
            return Batch(10, more=done.count(name) < batches)

        return batch

    works = [work("a", 3), work("b", 1), work("c", 2)]
    assert await take_turns(1, works, clock, going_on, 100) == Round(60, done=True)
    assert done == list("abcaca")
    done.clear()
    assert await take_turns(1, works, clock, going_on, 4) == Round(40, done=False)


async def test_the_rest_after_a_batch_is_as_long_as_the_batch_took(clock: Clock) -> None:
    rests: list[float] = []
    took = [0.0, 2.0]

    async def batch(term: int) -> Batch:
        clock.time += took[len(rests)]
        return Batch(1, more=True)

    async def rest(seconds: float) -> bool:
        rests.append(seconds)
        return len(rests) < 2

    assert await take_turns(1, [batch], clock, rest, 100) == Round(2, done=False)
    assert rests == [0.05, 2.0]


async def test_a_round_ends_with_its_term(clock: Clock) -> None:
    async def over(term: int) -> None:
        return None

    assert await take_turns(1, [over, over], clock, going_on, 100) == Round(0, done=False, led=False)


async def test_a_walk_takes_a_few_steps_a_round_and_goes_on_where_it_was(clock: Clock, upkeep: Any) -> None:
    upkeep.slices = [Slice(1, uuid4()) for _ in range(prune.STEPS + 1)]
    job = Prune(upkeep, [], clock, going_on)
    assert (await job(1)).changed == prune.STEPS
    assert len(upkeep.slices) == 1
    assert (await job(1)).changed == 1


def caretaker(upkeep: Any, clock: Clock) -> Caretaker:
    tally = Tally("me", DatabaseTime(clock, lambda: NOON))
    return Caretaker(upkeep, [Destination("shop", "console:")], ME, clock, tally)


async def run_until(caretaker: Caretaker, condition: Callable[[], bool]) -> None:
    task = asyncio.create_task(caretaker.run())
    await await_for(condition)
    caretaker.stop()
    await asyncio.wait_for(task, PATIENCE)


async def test_every_job_is_done_in_its_time_and_at_the_end_it_leaves(clock: Clock, upkeep: Any) -> None:
    here = caretaker(upkeep, clock)
    await run_until(here, lambda: upkeep.calls.count("kept") >= 3)
    assert upkeep.calls[-2:] == ["resign", "leave"]
    assert {"beat", "lead", "prune_delivered", "unpark"} <= set(upkeep.calls)


@pytest.mark.parametrize("broken", ["beat", "lead", "kept", "unpark", "record"])
async def test_a_job_that_fails_is_logged_once_and_the_others_go_on(
    broken: str, clock: Clock, upkeep: Any, caplog: pytest.LogCaptureFixture
) -> None:
    here = caretaker(upkeep, clock)
    upkeep.broken = {broken}
    settle(here.tally, Delivered())
    with caplog.at_level(logging.INFO):
        await run_until(here, lambda: upkeep.calls.count(broken) > 3)
        for job in {"beat", "lead", "record"} - {broken}:
            assert job in upkeep.calls
        told = [record.message for record in caplog.records if f"no {broken}" in record.message]
        assert told == [caplog.records[0].message]
    assert upkeep.calls[-2:] == ["resign", "leave"]


async def test_a_job_that_works_again_is_said(
    clock: Clock, upkeep: Any, caplog: pytest.LogCaptureFixture
) -> None:
    here = caretaker(upkeep, clock)
    upkeep.broken = {"beat"}
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            await here._try("beat", here._beat)
        upkeep.broken = set()
        for _ in range(2):
            await here._try("beat", here._beat)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_who_does_not_lead_prunes_and_sweeps_nothing(clock: Clock, upkeep: Any) -> None:
    upkeep.term = None
    here = caretaker(upkeep, clock)
    await run_until(here, lambda: upkeep.calls.count("lead") > 20)
    assert not {"kept", "unpark", "prune_orphans"} & set(upkeep.calls)
    assert await here.once() == Chores()


async def test_a_killed_caretaker_neither_resigns_nor_leaves(clock: Clock, upkeep: Any) -> None:
    task = asyncio.create_task(caretaker(upkeep, clock).run())
    await await_for(lambda: "kept" in upkeep.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not {"resign", "leave"} & set(upkeep.calls)


async def test_a_leader_that_cannot_renew_stops_to_lead_by_its_own_clock(clock: Clock, upkeep: Any) -> None:
    leadership = Leadership(upkeep, "me", clock)
    assert await leadership.renew() == 1
    upkeep.broken = {"lead"}
    clock.time += LEASE - 1
    with pytest.raises(StoreError):
        await leadership.renew()
    assert leadership.term == 1
    clock.time += 1
    assert leadership.term is None


def test_the_name_of_mysqls_index_has_the_prefix_of_the_tables() -> None:
    statements = Statements(make_tables(sa.MetaData(), prefix="my_"), MARIADB, "format")
    assert statements.by_due == "FORCE INDEX (`idx_my_outbox_event_due`)"
    parked = statements.others(templates("mysql"))("parked", destination="runner", after=0, limit=1)
    assert statements.by_due in parked.sql
