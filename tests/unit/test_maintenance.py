"""The jobs of upkeep, on an upkeep that answers as the test wants: counts, samples, test events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from relaybox import Outbox
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.core.settings import Destination, Settings
from relaybox.database.dialects import MARIADB
from relaybox.database.schema import make_tables
from relaybox.database.statements.delivery import Statements
from relaybox.database.statements.upkeep import texts
from relaybox.errors import ConfigError, Locked, RowRefused, StoreError
from relaybox.operate import open_relay as parts
from relaybox.relay.upkeep import prune
from relaybox.relay.upkeep.agreement import Agreement
from relaybox.relay.upkeep.canary import GRACE, Canary
from relaybox.relay.upkeep.caretaker import AGAIN, SWEEP, Caretaker, Chores
from relaybox.relay.upkeep.membership import LEASE, Leadership
from relaybox.relay.upkeep.prune import Prune
from relaybox.relay.upkeep.sample import CAP, Sampling
from relaybox.relay.upkeep.schedule import Round, take_turns
from relaybox.relay.upkeep.tally import LAST, DatabaseTime, Tally, bucket, ends, percentile
from relaybox.stores.store import Claim, Settlement
from relaybox.stores.upkeep import Member, Minute, Sample, Sampled, Slice
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
    assert tally._minutes
    clock.time += 3600
    await tally.flush(upkeep)
    assert not tally._minutes


async def test_a_clock_that_is_set_back_does_not_begin_a_minute_again(clock: Clock, upkeep: Any) -> None:
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
        async def batch(term: int) -> Round:
            done.append(name)
            return Round(10, done=done.count(name) >= batches)

        return batch

    works = [work("a", 3), work("b", 1), work("c", 2)]
    assert await take_turns(1, works, clock, going_on, 100) == Round(60, done=True)
    assert done == list("abcaca")
    done.clear()
    assert await take_turns(1, works, clock, going_on, 4) == Round(40, done=False)


async def test_each_work_has_a_turn_however_many_there_are(clock: Clock) -> None:
    done: list[int] = []

    def work(number: int) -> Callable[[int], Any]:
        async def batch(term: int) -> Round:
            done.append(number)
            return Round(0, done=False)

        return batch

    assert await take_turns(1, [work(number) for number in range(7)], clock, going_on, 3) == Round(done=False)
    assert done == list(range(7))


@pytest.mark.parametrize("error", [Locked("held"), RowRefused("spoilt")])
async def test_a_work_that_a_lock_or_a_row_stops_holds_up_no_other(clock: Clock, error: StoreError) -> None:
    done: list[int] = []

    async def stopped(term: int) -> Round:
        raise error

    async def healthy(term: int) -> Round:
        done.append(term)
        return Round(1, done=len(done) >= 3)

    with pytest.raises(type(error)):
        await take_turns(1, [stopped, healthy], clock, going_on, 100)
    assert len(done) == 3


async def test_a_round_that_locks_slow_down_ends_when_it_is_asked_to(clock: Clock) -> None:
    tried: list[int] = []

    async def locked(term: int) -> Round:
        tried.append(term)
        raise Locked("held")

    async def rest(seconds: float) -> bool:
        return len(tried) < 2

    assert await take_turns(1, [locked] * 20, clock, rest, 100) == Round(done=False)
    assert len(tried) == 2


async def test_the_rest_after_a_batch_is_as_long_as_the_batch_took(clock: Clock) -> None:
    rests: list[float] = []
    took = [0.0, 2.0]

    async def batch(term: int) -> Round:
        clock.time += took[len(rests)]
        return Round(1, done=False)

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
    job = Prune(upkeep.prune, Agreement(upkeep.reports, [], "me"), clock, going_on)
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
    assert upkeep.calls[-3:] == ["resign", "outdate", "leave"]
    assert {"beat", "lead", "delivered", "unpark"} <= set(upkeep.calls)


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
        logged = [record.message for record in caplog.records if f"no {broken}" in record.message]
        assert logged == [caplog.records[0].message]
    assert upkeep.calls[-3:] == ["resign", "outdate", "leave"]


async def test_a_job_that_works_again_is_said(
    clock: Clock, upkeep: Any, caplog: pytest.LogCaptureFixture
) -> None:
    here = caretaker(upkeep, clock)
    upkeep.broken = {"beat"}
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            await here._schedule.attempt("beat", here._beat)
        upkeep.broken = set()
        for _ in range(2):
            await here._schedule.attempt("beat", here._beat)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_who_does_not_lead_prunes_nothing(clock: Clock, upkeep: Any) -> None:
    upkeep.term = None
    await run_until(caretaker(upkeep, clock), lambda: upkeep.calls.count("lead") > 20)
    assert await caretaker(upkeep, clock).once() == Chores(swept=Round())
    assert not {"kept", "orphans"} & set(upkeep.calls)


class Still(Clock):
    """A clock that stands still: a rest has no end, unless it has no length."""

    def __init__(self) -> None:
        super().__init__()
        self.rests: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        if seconds:
            await asyncio.Event().wait()


async def test_a_relay_sweeps_at_once_when_it_begins_and_when_it_begins_to_lead(upkeep: Any) -> None:
    clock = Still()
    here = caretaker(upkeep, clock)
    task = asyncio.create_task(here.run())
    for term in (1, 2, 3):
        await await_for(lambda term=term: upkeep.calls.count("unpark") == term, "it sweeps")
        upkeep.term = term + 1
        await here.leadership.renew()
    upkeep.term = None
    await await_for(lambda: upkeep.calls.count("unpark") == 4, "it sweeps")
    await here.leadership.renew()
    here.stop()
    await asyncio.wait_for(task, PATIENCE)
    assert upkeep.calls.count("unpark") == 4


@pytest.mark.parametrize(("term", "turns"), [(1, 1), (None, 4)])
async def test_the_leader_sweeps_as_often_as_all_others_together(
    term: int | None, turns: int, upkeep: Any
) -> None:
    upkeep.term, upkeep.others = term, ("a", "b", "c")
    clock = Still()
    here = caretaker(upkeep, clock)
    await run_until(here, lambda: turns * SWEEP in clock.rests)
    assert upkeep.calls.count("unpark") == 1


async def test_a_sweep_that_failed_is_tried_again_soon(upkeep: Any) -> None:
    upkeep.broken = {"unpark"}
    clock = Still()
    await run_until(caretaker(upkeep, clock), lambda: AGAIN in clock.rests)


async def test_a_sweep_that_fails_takes_at_most_half_of_the_time(upkeep: Any) -> None:
    clock = Still()
    fail = upkeep.unpark

    async def fail_late(*given: Any) -> Any:
        clock.time += 7 * AGAIN
        return await fail(*given)

    upkeep.broken = {"unpark"}
    upkeep.unpark = fail_late
    await run_until(caretaker(upkeep, clock), lambda: 7 * AGAIN in clock.rests)


async def test_a_killed_caretaker_neither_resigns_nor_leaves(clock: Clock, upkeep: Any) -> None:
    task = asyncio.create_task(caretaker(upkeep, clock).run())
    await await_for(lambda: "kept" in upkeep.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not {"resign", "leave"} & set(upkeep.calls)


async def test_a_leader_that_cannot_renew_stops_to_lead_by_its_own_clock(clock: Clock, upkeep: Any) -> None:
    leadership = Leadership(upkeep.members, "me", clock)
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
    parked = statements.others(texts("mysql"))("parked", destination="runner", limit=1)
    assert statements.by_due in parked.sql


START = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)


class Time:
    """The database's clock."""

    def __init__(self) -> None:
        self.moment = START

    def now(self) -> datetime:
        return self.moment


class FakeSamples:
    """Records its calls."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self.led = True
        self.broken = False
        self.measured: list[str] = []
        self.kept: dict[datetime, Sequence[Sample]] = {}
        self.pruned: list[str] = []

    async def names(self) -> tuple[str, ...]:
        return ("gone", "shop")

    async def measure(self, destination: str, cap: int) -> Sample:
        self.measured.append(destination)
        return {
            "shop": Sample("shop", cap, 1, 7.0),
            "mail": Sample("mail", 5, 0, None),
            "": Sample("", 2, 0, 1.0),
        }.get(destination, Sample(destination, 0, 0, None))

    async def position(self) -> tuple[int | None, datetime]:
        return 42, self._time.moment

    async def keep(self, term: int, minute: datetime, samples: Sequence[Sample]) -> int | None:
        if self.broken:
            raise StoreError("a table is missing")
        self.kept[minute] = samples
        return len(samples) if self.led else None

    async def prune(self, term: int, what: Sampled, age: float, limit: int) -> int | None:
        self.pruned.append(what)
        return 0


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def samples(time: Time) -> FakeSamples:
    return FakeSamples(time)


@pytest.fixture
def sampling(samples: FakeSamples, time: Time) -> Sampling:
    destinations = [Destination("shop", "console:"), Destination("mail", "console:")]
    return Sampling(samples, destinations, time, Clock(), going_on)  # type: ignore[arg-type]


async def test_a_minute_is_sampled_once(sampling: Sampling, samples: FakeSamples, time: Time) -> None:
    for _ in range(3):
        assert (await sampling(1)).led
        time.moment += timedelta(seconds=5)
    assert samples.measured == ["", "shop", "mail", "gone"]
    time.moment += timedelta(minutes=1)
    await sampling(1)
    assert [minute.minute for minute in samples.kept] == [0, 1]
    assert samples.pruned == ["sample", "operation"] * 2


async def test_the_whole_is_what_all_are_together(
    sampling: Sampling, samples: FakeSamples, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(destination: str, cap: int) -> Sample:
        return Sample(destination, 1, 0, 0.0)

    await sampling(1)
    monkeypatch.setattr(samples, "measure", measure)
    time.moment += timedelta(minutes=1)
    await sampling(1)
    kept, new = samples.kept.values()
    assert [one.destination for one in kept] == ["shop", "mail", "gone", ""]
    assert kept[-1] == Sample("", CAP, 1, 7.0, 42)
    assert new[-1].oldest_seconds == 0.0, "an event that has just come has an age"


async def test_a_relay_that_no_longer_leads_learns_it(sampling: Sampling, samples: FakeSamples) -> None:
    samples.led = False
    assert not (await sampling(1)).led
    assert samples.pruned == []


async def test_after_a_failure_the_next_minute_is_tried(
    sampling: Sampling, samples: FakeSamples, time: Time
) -> None:
    samples.broken = True
    with pytest.raises(StoreError):
        await sampling(1)
    assert (await sampling(1)).led
    assert len(samples.measured) == 4
    samples.broken = False
    time.moment += timedelta(minutes=1)
    await sampling(1)
    assert len(samples.kept) == 1


async def test_one_that_is_stopped_writes_nothing(samples: FakeSamples, time: Time) -> None:
    async def stop(seconds: float) -> bool:
        return False

    sampling = Sampling(samples, [], time, Clock(), stop)  # type: ignore[arg-type]
    assert not (await sampling(1)).done
    assert samples.kept == {}


class Place:
    """A service, a clock and what became of the test events."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.sent: list[UUID] = []
        self.status: str | None = "pending"
        self.forgotten: list[UUID] = []
        self.unheard = False
        """Whether what is sent arrives, and its answer does not."""
        self.took: list[tuple[str, float]] = []
        self.woken: list[str] = []
        self.away = False
        service = SimpleNamespace(send=self.send, look=self.look_at, left=self.left, forget=self.forget)
        report = lambda *one: self.took.append(one)  # noqa: E731
        self.canary = Canary(service, "runner", 60.0, self, report, self.woken.extend)

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError

    async def send(self) -> UUID:
        if self.away:
            raise StoreError("gone")
        self.sent.append(uuid4())
        self.status = "pending"
        if self.unheard:
            raise StoreError("gone")
        return self.sent[-1]

    async def look_at(self, id_: UUID) -> Any:
        assert id_ == self.sent[-1]
        if self.status is None:
            return None
        created = datetime(2026, 1, 1, tzinfo=UTC)
        times = {"delivered_at": created + timedelta(seconds=0.25), "seen_at": created + timedelta(seconds=5)}
        error = "422 unknown\nevent type"
        return SimpleNamespace(id=id_, status=self.status, created_at=created, error_message=error, **times)

    async def left(self) -> Any:
        waits = self.sent and self.status in ("pending", "failed")
        return await self.look_at(self.sent[-1]) if waits else None

    async def forget(self, id_: UUID) -> None:
        assert (id_, self.status) == (self.sent[-1], "failed")
        self.forgotten.append(id_)
        self.status = None

    async def look(self, seconds: float = 0.0) -> None:
        self.time += seconds
        await self.canary.look()


@pytest.fixture
def place() -> Place:
    return Place()


async def test_one_is_sent_at_once_and_then_on_time(place: Place) -> None:
    await place.look()
    assert (len(place.sent), place.woken) == (1, ["runner"])
    place.status = "delivered"
    await place.look(1)
    assert place.took == [("runner", 0.25)]
    await place.look(58)
    assert len(place.sent) == 1
    await place.look(1)
    assert len(place.sent) == 2


async def test_none_is_sent_while_one_is_under_way_and_it_becomes_overdue(place: Place) -> None:
    await place.look()
    for _ in range(9):
        await place.look(10)
    assert (len(place.sent), place.canary.overdue) == (1, None)
    await place.look(GRACE)
    assert place.canary.overdue == 120.0
    place.status = "delivered"
    await place.look(1)
    assert place.canary.overdue is None
    assert len(place.sent) == 2


async def test_one_that_failed_gives_way_to_the_next(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    await place.look()
    for number in range(1, 10):
        place.status = "failed"
        await place.look(1)
        assert (len(place.sent), len(place.forgotten)) == (number, number - 1)
        assert place.canary.refused == "422 unknown event type"
        await place.look(59)
        assert (len(place.sent), place.forgotten) == (number + 1, place.sent[:-1])
    assert caplog.text.count("the test event for runner failed: 422 unknown event type") == 1
    assert (place.took, place.canary.overdue, place.canary.unproven) == ([], 540.0, 540.0)
    place.status = "delivered"
    await place.look(1)
    assert (place.canary.refused, place.canary.overdue, len(place.took)) == (None, None, 1)


async def test_one_that_another_leader_left_is_followed(place: Place) -> None:
    await place.look()
    for _ in range(5):
        place.canary.rest()
        await place.look(60)
    assert len(place.sent) == 1
    place.status = "delivered"
    await place.look(1)
    assert place.took == [("runner", 0.25)]


async def test_one_that_failed_under_another_leader_gives_way_to_the_next(place: Place) -> None:
    await place.look()
    place.status = "failed"
    place.canary.rest()
    await place.look(1)
    assert (len(place.sent), place.forgotten) == (2, place.sent[:1])


async def test_one_that_was_written_though_nobody_heard_it_is_followed(place: Place) -> None:
    place.unheard = True
    with pytest.raises(StoreError):
        await place.look()
    for _ in range(5):
        await place.look(60)
    assert len(place.sent) == 1


async def test_one_that_is_deleted_when_delivered_is_timed_here(place: Place) -> None:
    await place.look()
    place.status = None
    await place.look(1.5)
    assert place.took == [("runner", 1.5)]


async def test_a_relay_that_no_longer_leads_is_not_overdue(place: Place) -> None:
    await place.look()
    await place.look(500)
    assert place.canary.overdue == 500.0
    place.canary.rest()
    assert place.canary.overdue is None
    await place.look(1)
    assert (len(place.sent), place.canary.overdue) == (1, None)


async def test_a_database_that_is_away_gets_no_flood_afterwards(place: Place) -> None:
    place.away = True
    for _ in range(3):
        with pytest.raises(StoreError):
            await place.look(60)
        await place.look(1)
    place.away = False
    await place.look(60)
    assert len(place.sent) == 1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"canary": "60s"}, "canary has no destination"),
        ({"canary_destination": "runner"}, "also set how often"),
        ({"canary": "1ms", "canary_destination": "runner"}, "must be 1s or longer"),
        ({"canary": "60s", "canary_destination": "lake"}, "no relay sees what Debezium sends"),
        ({"namespace": "9 lives"}, "namespace = '9 lives'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, str], problem: str) -> None:
    destinations = [Destination("runner", "memory:"), Destination("lake", "debezium:")]
    with pytest.raises(ConfigError, match=problem):
        Settings("postgresql://localhost/shop", destinations, **given)


def test_a_canary_for_nobody_is_refused_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = Outbox("postgresql://localhost/shop", canary="60s", canary_destination="runer")
    outbox.handler("*", name="runner")(print)
    opened: list[object] = []
    monkeypatch.setattr(parts, "open_wake", opened.append)
    monkeypatch.setattr(parts, "open_store", lambda *given: opened.append(given))
    with pytest.raises(ConfigError, match="did you mean 'runner'"):
        outbox.relay()
    assert opened == []
