"""Relays that are killed, stopped or asked to leave while they work, and those that take over from them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from tests.chaos.mortal_relay import KILLED, POISON, Death, Plan, process
from tests.chaos.scene import repeated, stored
from tests.integration.runner import Runner, running
from tests.integration.shop import MEMBERSHIP, SOON, Shop
from tests.waiting import await_for

EVENTS = 40
KEYS = 8
CONCURRENCY = 3
OPTIONS: dict[str, Any] = {"poll_interval": "20ms", "backoff": {"base": "10ms", "cap": "50ms"}}
FEW = 10


def shop_of(plan: Plan) -> Shop:
    settings = plan.outbox().settings
    return Shop(plan.database, destinations=settings.destinations, routes=settings.routes)


def end_leases(shop: Shop) -> None:
    """End the leases of the dead, which are so long that no busy moment of the living ends one."""
    event = shop.outbox.tables.event
    with shop.engine.begin() as connection:
        held = event.c.lease_token.is_not(None)
        connection.execute(event.update().where(held).values(leased_until=event.c.created_at))


class Scene:
    """A shop whose events go to a runner; the first relay and its successor use paths of their own."""

    def __init__(self, url: str, runner: Runner) -> None:
        self.runner = runner
        self._url = url
        self.shop = shop_of(self.plan("successor"))
        self.event = self.shop.outbox.tables.event

    def plan(self, path: str, death: Death = "never", seconds: float = 30.0) -> Plan:
        sink = f"http://127.0.0.1:{self.runner.port}/{path}"
        own = {"ordered": True, "concurrency": CONCURRENCY, "batch_size": 10, "allow": ["127.0.0.0/8"]}
        times = {"lease": f"{seconds:g}s", "timeout": f"{seconds:g}s"}
        return Plan(self._url, {"runner": sink}, {**OPTIONS, **own, **times}, death)

    def taken(self, path: str | None = None) -> list[int]:
        """Return the numbers that arrived, at both paths or at one."""
        return [arrival.n for arrival in self.runner.taken if path in (None, arrival.path.strip("/"))]

    async def under_way(self) -> None:
        await await_for(
            lambda: len(self.taken()) == CONCURRENCY, "as many requests as may be under way at once"
        )

    def in_flight(self) -> set[int]:
        """Return what arrived and is not yet recorded as delivered."""
        return set(self.taken()) - self.delivered()

    def delivered(self) -> set[int]:
        return {row.payload["n"] for row in self.all_rows() if row.status == "delivered"}

    def all_rows(self) -> list[Any]:
        return stored(self.shop.engine, self.shop.outbox)

    async def take_over(self) -> None:
        async with self.shop.outbox.relay():
            await await_for(lambda: self.shop.states() == {"delivered": EVENTS}, "all delivered by another")

    def check(self, in_flight: set[int]) -> None:
        """Check that nothing is lost, that only what was in flight came twice, and that the order is kept."""
        assert repeated(self.taken(), range(EVENTS), KEYS) <= in_flight
        assert {row[:2] for row in self.shop.rows()} == {("delivered", 1)}
        assert self.shop.leases() == 0


@pytest.fixture
async def scene(
    migrated_database: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    monkeypatch.setitem(MEMBERSHIP, "interval", SOON)
    async with running() as runner:
        scene = Scene(migrated_database("postgresql-18"), runner)
        scene.shop.emit(EVENTS, keys=KEYS)
        yield scene


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.wait_for(asyncio.to_thread(process.wait), 60)


@pytest.mark.parametrize(("death", "arrived"), [("after claim", 0), ("after acknowledgement", 1)])
async def test_killed_between_two_steps(scene: Scene, death: Death, arrived: int) -> None:
    """After it claimed, or when it was answered and has not settled."""
    with process(scene.plan("first", death)) as first:
        assert await ended(first) == -signal.SIGKILL
    in_flight = scene.in_flight()
    assert arrived or scene.shop.leases() == 10
    assert arrived <= len(in_flight) == len(scene.taken()) <= 10 * arrived
    end_leases(scene.shop)
    await scene.take_over()
    scene.check(in_flight)


@pytest.mark.fast
async def test_killed_when_requests_have_arrived_and_are_not_answered(scene: Scene) -> None:
    scene.runner.go_on.clear()
    with process(scene.plan("first")) as first:
        await scene.under_way()
        first.kill()
        assert await ended(first) == -signal.SIGKILL
    scene.runner.go_on.set()
    in_flight = scene.in_flight()
    assert len(in_flight) == CONCURRENCY
    end_leases(scene.shop)
    await scene.take_over()
    scene.check(in_flight)
    assert {n for n, count in Counter(scene.taken()).items() if count > 1} == in_flight


async def test_killed_while_its_settle_is_under_way(scene: Scene) -> None:
    """Lock the rows in another transaction, so that the statement is sent and its outcome open."""
    scene.runner.go_on.clear()
    with process(scene.plan("first")) as first, scene.shop.engine.connect() as locker:
        await await_for(scene.taken, "a request")
        locker.execute(sa.select(scene.event.c.id).with_for_update())
        scene.runner.go_on.set()
        waiting = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")

        def settling() -> bool:
            with scene.shop.engine.connect() as connection:
                return connection.scalars(waiting).one() > 0

        await await_for(settling, "a settle that waits for the rows")
        first.kill()
        assert await ended(first) == -signal.SIGKILL
        in_flight = scene.in_flight()
        assert 1 <= len(in_flight) <= scene.shop.leases()
    end_leases(scene.shop)
    await scene.take_over()
    scene.check(in_flight)


def until_locked(process: subprocess.Popen[bytes], count: int) -> None:
    """Return when the relay has found so many rows locked, or is dead."""
    assert process.stdout
    found: set[bytes] = set()
    while len(found) < count and (line := process.stdout.readline()):
        found.add(line)


@pytest.mark.parametrize("transactions", [1, 2, 3])
async def test_killed_between_the_transactions_of_a_settle_beside_a_locked_row(
    scene: Scene, transactions: int
) -> None:
    """It has looked what comes next, looked what is locked, or written what it could, and does not know."""
    scene.runner.go_on.clear()
    plan = msgspec.structs.replace(scene.plan("first"), beside_locks=transactions)
    connect = scene.shop.engine.connect
    with process(plan) as first, connect() as locker, connect() as other:
        await scene.under_way()
        locked, *freed = scene.taken()
        row = sa.text("SELECT id FROM outbox_event WHERE payload ->> 'n' = ANY (:ns) FOR UPDATE")
        for connection, numbers in ((locker, [locked]), (other, freed)):
            assert connection.execute(row, {"ns": list(map(str, numbers))}).all()
        scene.runner.go_on.set()
        # Only now: a settle of the locked row alone would have nothing to write.
        await asyncio.to_thread(until_locked, first, CONCURRENCY)
        other.rollback()
        assert await ended(first) == -signal.SIGKILL
        in_flight = scene.in_flight()
    assert locked in in_flight
    assert bool(scene.delivered()) == (transactions == 3)
    end_leases(scene.shop)
    await scene.take_over()
    scene.check(in_flight)


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "unanswered"])
async def test_stopped_beyond_its_leases_it_settles_nothing_and_begins_nothing(
    scene: Scene, answered: bool
) -> None:
    scene.runner.go_on.clear()
    with process(scene.plan("first", seconds=3.0)) as first:
        await scene.under_way()
        with stopped(first):
            in_flight = scene.in_flight()
            held = scene.runner.go_on
            if not answered:
                # Only the first relay's requests stay without an answer.
                scene.runner.go_on = asyncio.Event()
            scene.runner.go_on.set()
            await scene.take_over()
            before = scene.all_rows()
            scene.runner.go_on = held
        # It is a relay like any other again: what is new, it delivers.
        scene.runner.go_on.set()
        scene.shop.emit(1, first=EVENTS)
        await await_for(lambda: EVENTS in scene.taken("first"), "the one that was stopped goes on")
        await await_for(lambda: scene.shop.leases() == 0, "it settles what it then delivered")
        assert scene.all_rows()[:EVENTS] == before
        assert set(scene.taken("first")) == in_flight | {EVENTS}
        first.terminate()
        assert await ended(first) == 0
    scene.runner.taken = [arrival for arrival in scene.runner.taken if arrival.n < EVENTS]
    last = scene.all_rows()[EVENTS].id
    with scene.shop.engine.begin() as connection:
        connection.execute(scene.event.delete().where(scene.event.c.id == last))
    scene.check(in_flight)


async def ask_to_leave(process: subprocess.Popen[bytes]) -> None:
    """Returns when the signal has arrived."""
    process.terminate()
    status = Path(f"/proc/{process.pid}/status")
    await await_for(lambda: "ShdPnd:\t0000000000000000" in status.read_text(), "the signal delivered")


async def test_asked_to_leave_in_mid_send_it_finishes_and_leaves_nothing(scene: Scene) -> None:
    scene.runner.go_on.clear()
    with process(scene.plan("first")) as first:
        await scene.under_way()
        await ask_to_leave(first)
        scene.runner.go_on.set()
        assert await ended(first) == 0
    assert CONCURRENCY <= len(scene.taken()) < EVENTS
    assert (scene.delivered(), scene.shop.leases()) == (set(scene.taken()), 0)
    await scene.take_over()
    scene.check(in_flight=set())


async def test_asked_twice_to_leave_it_leaves_at_once(scene: Scene) -> None:
    scene.runner.go_on.clear()
    with process(scene.plan("first")) as first:
        await scene.under_way()
        await ask_to_leave(first)
        first.terminate()
        assert await ended(first) != 0
    in_flight = scene.in_flight()
    assert len(in_flight) == CONCURRENCY
    scene.runner.go_on.set()
    end_leases(scene.shop)
    await scene.take_over()
    scene.check(in_flight)


class Supervised:
    """A relay that is started again whenever an event ended its process, until every row is final."""

    def __init__(self, url: str, sinks: dict[str, str], **options: Any) -> None:
        self._plan = Plan(url, sinks, {**OPTIONS, **options})
        self.shop = shop_of(self._plan)
        self.shop.emit(FEW, keys=5)
        self.deaths = 0
        self.taken: set[tuple[str, int]] = set()

    async def run(self) -> None:
        while True:
            with process(self._plan) as relay:
                await await_for(lambda: self._final(relay), "every row final, or the relay dead")
                if relay.poll() is None:
                    relay.terminate()
                status = await ended(relay)
                assert relay.stdout is not None
                self.taken.update(tuple(msgspec.json.decode(line)) for line in relay.stdout)
            if status == 0:
                return
            assert status == KILLED
            end_leases(self.shop)
            self.deaths += 1
            assert self.deaths <= 100, "it dies and dies"

    def _final(self, relay: subprocess.Popen[bytes]) -> bool:
        return relay.poll() is not None or "pending" not in self.shop.states()

    def not_delivered(self) -> list[tuple[str, int, str, str]]:
        rows = [row for row in stored(self.shop.engine, self.shop.outbox) if row.status != "delivered"]
        return [(row.destination, row.payload["n"], row.status, row.error_message) for row in rows]


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
async def test_an_event_that_kills_its_relay_is_failed_and_all_others_are_delivered(
    ordered: bool, migrated_database: Callable[[str], str]
) -> None:
    sinks = {"kills": "kill", "dawdles": "dawdle"}
    options = {"ordered": True, "on_failed": "skip"} if ordered else {"ordered": False}
    supervised = Supervised(migrated_database("postgresql-18"), sinks, max_attempts=2, **options)
    await supervised.run()
    # The first two deaths are a whole batch's, the next ones those of groups, and count for nobody.
    reason = f"the relay died {supervised.deaths} times while it held this event"
    assert supervised.deaths >= 4
    assert supervised.not_delivered() == [("kills", POISON, "failed", reason)]
    assert supervised.taken == {(name, n) for name in sinks for n in range(FEW)} - {("kills", POISON)}


async def test_lanes_with_suspects_at_the_same_time_blame_only_the_one_that_kills(
    migrated_database: Callable[[str], str],
) -> None:
    """The others are in flight at every death, and would be suspected each time."""
    others = [f"other {n}" for n in range(4)]
    sinks = {"kills": "kill", **dict.fromkeys(others, "dawdle")}
    supervised = Supervised(migrated_database("postgresql-18"), sinks, max_attempts=4)
    await supervised.run()
    assert [row[:3] for row in supervised.not_delivered()] == [("kills", POISON, "failed")]
    assert {key for key in supervised.taken if key[0] != "kills"} == {
        (name, n) for name in others for n in range(FEW)
    }
    blamed: Counter[str] = Counter(dict.fromkeys(sinks, 0))
    for row in stored(supervised.shop.engine, supervised.shop.outbox):
        blamed[row.destination] += row.attempts - (row.status != "failed")
    assert blamed == {"kills": 4, **dict.fromkeys(others, 0)}


@pytest.mark.parametrize(
    ("kind", "handler"),
    [
        ("postgresql-18", "once, asynchronous"),
        ("postgresql-18", "once"),
        ("mariadb", "once, asynchronous"),
        ("sqlite", "once"),
    ],
)
async def test_effects_are_there_exactly_once_while_deliveries_are_more(
    kind: str, handler: str, migrated_database: Callable[[str], str], tmp_path: Path
) -> None:
    options = {**OPTIONS, "concurrency": 4, "batch_size": 10, "max_attempts": 100}
    plan = Plan(migrated_database(kind), {"books": handler}, options)
    arrivals = tmp_path / "arrivals"
    shop = Shop(plan.database)
    shop.outbox = plan.outbox()
    with shop.engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE effect (n INTEGER)"))
    shop.emit(EVENTS, keys=EVENTS)
    deaths: tuple[Death, ...] = ("after acknowledgement", "after claim", "never", "never")
    with arrivals.open("ab") as file:
        for number, death in enumerate(deaths, 1):
            before = arrivals.stat().st_size
            with process(msgspec.structs.replace(plan, death=death), stdout=file) as relay:
                if death != "never":
                    assert await ended(relay) == -signal.SIGKILL
                elif number < len(deaths):
                    await await_for(lambda before=before: arrivals.stat().st_size > before, "a delivery")
                else:
                    # Suspects are delivered one after the other: on MariaDB that takes about a minute.
                    await await_for(
                        lambda: shop.states() == {"delivered": EVENTS}, "all delivered", seconds=240
                    )
            end_leases(shop)
    with shop.engine.connect() as connection:
        effects = Counter(connection.scalars(sa.text("SELECT n FROM effect")))
    deliveries = [int(line) for line in arrivals.read_text().splitlines()]
    assert effects == Counter(range(EVENTS))
    assert len(deliveries) > EVENTS
    assert set(deliveries) == set(range(EVENTS))
