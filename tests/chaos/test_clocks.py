"""Clocks step while relays work: the database's, which decides leases and due times, and a relay's own."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox.operate import open_relay as parts
from relaybox.stores.store import Want
from tests.chaos.mortal_relay import Plan, process
from tests.chaos.scene import KEYS, OPTIONS, Scene, repeated
from tests.conftest import available
from tests.integration.receivers import answer
from tests.integration.runner import Runner, running
from tests.integration.shop import MEMBERSHIP, SOON, Shop
from tests.servers import faketime, fresh, postgres18
from tests.servers.faketime import WallClock
from tests.waiting import await_for

DAY = 86_400.0
LEASE = 300.0
AHEAD = 4.0
LAST = 100
BACKOFF = {"base": "500ms", "cap": "500ms", "jitter": 0}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEMBERSHIP, "interval", SOON)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[WallClock, str]]:
    """Run a server with a clock of its own, for all tests that step it."""
    with (
        available("libfaketime", faketime.clock()) as clock,
        available("PostgreSQL 18", postgres18.server(prefix=clock.prefix)) as url,
    ):
        yield clock, url


@pytest.fixture
def clock(server: tuple[WallClock, str]) -> WallClock:
    server[0].step(0)
    return server[0]


@pytest.fixture
def database(server: tuple[WallClock, str]) -> Iterator[str]:
    with fresh.database(server[1]) as url:
        yield url


class Moody:
    """Makes a runner answer 500 to the first try of every fifth event, and notes when each was tried."""

    def __init__(self, runner: Runner) -> None:
        self.tried: dict[int, list[float]] = defaultdict(list)
        self._refuse = False
        runner.on_request = self._look
        runner.throttle = lambda: answer("500 Internal Server Error") if self._refuse else None

    def _look(self, n: int) -> None:
        self.tried[n].append(time.monotonic())
        self._refuse = n % 5 == 0 and len(self.tried[n]) == 1

    def shortest_backoff(self) -> float:
        return min(second - first for first, second in (times for times in self.tried.values() if times[1:]))


async def test_a_relay_whose_own_clock_steps_delivers_everything_once_and_nothing_early(
    migrated_database: Callable[[str], str],
) -> None:
    with available("libfaketime", faketime.clock()) as clock:
        await step_a_relay(clock, migrated_database("postgresql-18"))


async def step_a_relay(clock: WallClock, url: str) -> None:
    async with running() as runner:
        moody = Moody(runner)
        options = {**OPTIONS, "ordered": False, "backoff": BACKOFF, "allow": ["127.0.0.0/8"]}
        plan = Plan(url, {"runner": runner.url}, options)
        settings = plan.outbox().settings
        shop = Shop(plan.database, destinations=settings.destinations, routes=settings.routes)
        with process(plan, clock.environment) as relay:
            at = time.monotonic() + 3.0
            with shop.engine.begin() as connection:
                due = datetime.now(UTC) + timedelta(seconds=3.0)
                shop.outbox.emit(connection, "Order", 1, "order.paid", {"n": LAST}, deliver_at=due)
            for turn, step in enumerate((DAY, 0, -DAY, 0)):
                clock.step(step)
                shop.emit(25, first=25 * turn)
                arrived = 25 * (turn + 1)
                await await_for(lambda arrived=arrived: len(runner.taken) >= arrived, "what was emitted")
            await await_for(lambda: shop.states() == {"delivered": 101}, "everything is settled")
            relay.terminate()
            assert await asyncio.to_thread(relay.wait, 60) == 0
    assert sorted(arrival.n for arrival in runner.taken) == list(range(101))
    assert {len(times) for n, times in moody.tried.items() if n % 5 == 0} == {2}
    assert moody.shortest_backoff() >= 0.45
    assert moody.tried[LAST][0] >= at


class Clocked(Scene):
    def __init__(self, url: str, clock: WallClock, **options: Any) -> None:
        super().__init__(url, **options)
        self.clock = clock

    @asynccontextmanager
    async def relays(self) -> AsyncIterator[None]:
        async with self.shop.outbox.relay(), self.shop.outbox.relay():
            yield

    async def step(self, seconds: float) -> set[int]:
        """Step the server's clock; what the relays held at that moment."""
        # In a thread: the relays, which run in this loop, have to end what they hold a lock for.
        return await asyncio.to_thread(self._step, seconds)

    def _step(self, seconds: float) -> set[int]:
        with self.shop.engine.begin() as connection:
            # No claim is under way, whose lease would be over before it is seen.
            connection.execute(sa.text("LOCK TABLE outbox_event IN EXCLUSIVE MODE"))
            numbers = self.numbers(self.shop.outbox.tables.event.c.lease_token.is_not(None))
            self.clock.step(seconds)
        return numbers

    def ahead(self, moment: sa.ColumnElement[datetime], *conditions: Any) -> float:
        """Return how many seconds the latest is ahead of the server's clock; 0 if there is none."""
        query = sa.select(sa.func.max(moment) - sa.func.clock_timestamp()).where(*conditions)
        with self.shop.engine.connect() as connection:
            latest = connection.execute(query).scalar_one()
        return float(latest.total_seconds()) if latest else 0.0

    async def finish(self, count: int) -> None:
        await await_for(lambda: self.shop.states() == {"delivered": count}, "everything delivered")


async def test_a_server_whose_clock_steps_forward_repeats_no_more_than_was_in_flight(
    database: str, clock: WallClock
) -> None:
    scene = Clocked(database, clock)
    scene.shop.emit(300, keys=KEYS)
    async with scene.relays():
        await await_for(lambda: len(scene.taken) >= 60, "a part delivered")
        held = await scene.step(DAY)
        await scene.finish(300)
    assert scene.repeated(range(300)) <= held


async def test_a_server_whose_clock_steps_back_holds_nothing_up_for_longer_than_the_step(
    database: str, clock: WallClock
) -> None:
    """By a day, which is longer than any lease."""
    scene = Clocked(database, clock)
    scene.shop.emit(300, keys=KEYS)
    orphans = await claim_and_die(scene.shop)
    event = scene.shop.outbox.tables.event.c
    async with scene.relays():
        await await_for(lambda: len(scene.taken) >= 60, "a part delivered")
        await scene.step(-DAY)
        assert 0 < scene.ahead(sa.func.greatest(event.created_at, event.next_attempt_at)) <= DAY
        assert DAY < scene.ahead(event.leased_until, event.lease_owner == "elsewhere") <= DAY + LEASE
        # Of new keys: nothing that was there before the step is ahead of them.
        scene.shop.emit(50, keys=1_000, first=300)
        await await_for(lambda: {*range(300, 350)} <= {*scene.taken}, "what is emitted after the step")
        await await_for(lambda: scene.shop.leases() == orphans, "the relays have settled what they held")
        held = await scene.step(LEASE)
        await scene.finish(350)
    old, new = ([n for n in scene.taken if (n < 300) is before] for before in (True, False))
    assert repeated(old, range(300), KEYS) <= held
    assert sorted(new) == list(range(300, 350))


async def claim_and_die(shop: Shop) -> int:
    """Claim rows and leave them leased, as a relay that dies right after its claim; return how many."""
    store = parts.open_store(shop.outbox.settings.database, shop.outbox.tables)
    claim = await store.claim(Want("on_order", "elsewhere", limit=3, lease=LEASE, ordered=True))
    await store.close()
    return len(claim.deliveries)


async def test_a_rate_limit_holds_nothing_up_for_longer_than_its_clock_was_wrong(
    database: str, clock: WallClock
) -> None:
    scene = Clocked(database, clock, ordered=False, rate_limit="500/s")
    async with scene.relays():
        await scene.step(AHEAD)
        scene.shop.emit(50)
        await scene.finish(50)
        await scene.step(0)
        assert scene.ahead(scene.shop.outbox.tables.destination.c.rate_at) <= AHEAD + 1
        scene.shop.emit(50, first=50)
        await scene.finish(100)
    assert sorted(scene.taken) == list(range(100))
