"""Clocks step while relays work: the database's, which decides leases and due times, and a relay's own."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from relaybox import Event, parts
from relaybox.store import Want
from tests.chaos.mortal_relay import Plan
from tests.conftest import available
from tests.integration.receivers import answer
from tests.integration.runner import Runner, running
from tests.integration.shop import MEMBERSHIP, SOON, Shop, until
from tests.servers import faketime, fresh, postgres18
from tests.servers.faketime import WallClock

log = logging.getLogger(__name__)
ROOT = Path(__file__).parents[2]
DAY = 86_400.0
KEYS = 10
LEASE = 1.0
BACK = 4.0
"""Seconds: longer than a lease."""
LAST = 100
OPTIONS: dict[str, Any] = {
    "ordered": True,
    "lease": f"{LEASE:g}s",
    "timeout": "500ms",
    "concurrency": 5,
    "batch_size": 10,
    "poll_interval": "20ms",
    "backoff": {"base": "500ms", "cap": "500ms", "jitter": 0},
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEMBERSHIP, "interval", SOON)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[WallClock, str]]:
    """A server that goes by a clock, for all tests that step it."""
    with (
        available("libfaketime", faketime.clock()) as clock,
        available("PostgreSQL 18", postgres18.server(prefix=clock.prefix)) as url,
    ):
        yield clock, url


@pytest.fixture
def clock(server: tuple[WallClock, str]) -> WallClock:
    """The server's clock, which is right as yet."""
    server[0].step(0)
    return server[0]


@pytest.fixture
def database(server: tuple[WallClock, str]) -> Iterator[str]:
    with fresh.database(server[1]) as url:
        yield url


@contextmanager
def relay(plan: Plan, clock: WallClock) -> Iterator[None]:
    """A relay in a process of its own, that goes by the clock."""
    command = [sys.executable, "-m", "tests.chaos.mortal_relay", msgspec.json.encode(plan).decode()]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **clock.environment}) as process:
        try:
            yield
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


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
        """Between the first and the second try of an event."""
        return min(second - first for first, second in (times for times in self.tried.values() if times[1:]))


async def test_a_relay_whose_own_clock_steps_delivers_everything_once_and_nothing_early(
    fresh_database: Callable[[str], str],
) -> None:
    with available("libfaketime", faketime.clock()) as clock:
        await step_a_relay(clock, fresh_database("postgresql-18"))


async def step_a_relay(clock: WallClock, url: str) -> None:
    async with running() as runner:
        moody = Moody(runner)
        options = {**OPTIONS, "ordered": False, "allow": ["127.0.0.0/8"]}
        plan = Plan(url, {"runner": runner.url}, options)
        settings = plan.outbox().settings
        shop = Shop(plan.database, destinations=settings.destinations, routes=settings.routes)
        with relay(plan, clock):
            appointment = Appointment(shop, 3.0)
            for turn, step in enumerate((DAY, 0, -DAY, 0)):
                clock.step(step)
                shop.emit(25, first=25 * turn)
                arrived = 25 * (turn + 1)
                await until(lambda arrived=arrived: len(runner.taken) >= arrived, "what was emitted arrives")
            await until(lambda: shop.states() == {"delivered": 101}, "everything is settled")
    assert sorted(arrival.n for arrival in runner.taken) == list(range(101))
    assert {len(times) for n, times in moody.tried.items() if n % 5 == 0} == {2}
    assert moody.shortest_backoff() >= 0.45
    assert moody.tried[LAST][0] >= appointment.at


class Appointment:
    """An event that is not to be delivered before its time."""

    def __init__(self, shop: Shop, seconds: float) -> None:
        self.at = time.monotonic() + seconds
        at = datetime.now(UTC) + timedelta(seconds=seconds)
        with shop.engine.begin() as connection:
            shop.outbox.emit(connection, "Order", 1, "order.paid", {"n": LAST}, deliver_at=at)


class Scene:
    """A shop on a server that goes by a clock, its handler, and two relays."""

    def __init__(self, url: str, clock: WallClock, **options: Any) -> None:
        self.shop = Shop(url)
        self.clock = clock
        self.taken: list[int] = []
        self.shop.outbox.handler("*", name="on_order", **{**OPTIONS, **options})(self._take)

    async def _take(self, event: Event) -> None:
        self.taken.append(event.payload["n"])
        await asyncio.sleep(0.02)

    @asynccontextmanager
    async def relays(self) -> AsyncIterator[None]:
        async with self.shop.outbox.relay(), self.shop.outbox.relay():
            yield

    async def step(self, seconds: float) -> set[int]:
        """Step the server's clock; what the relays held at that moment."""
        # In a thread: the relays, which run in this loop, have to end what they hold a lock for.
        return await asyncio.to_thread(self._step, seconds)

    def _step(self, seconds: float) -> set[int]:
        event = self.shop.outbox.tables.event
        held = sa.select(event.c.payload).where(event.c.lease_token.is_not(None))
        with self.shop.engine.begin() as connection:
            # No claim is under way, whose lease would be over before it is seen.
            connection.execute(sa.text("LOCK TABLE outbox_event IN EXCLUSIVE MODE"))
            numbers = {payload["n"] for payload in connection.scalars(held)}
            self.clock.step(seconds)
        return numbers

    async def finish(self, count: int, seconds: float) -> float:
        """Until everything is delivered; how long that took."""
        begun = time.monotonic()
        await until(lambda: self.shop.states() == {"delivered": count}, "everything delivered", seconds)
        return time.monotonic() - begun

    def duplicates(self, count: int) -> set[int]:
        """What was delivered twice, where nothing is lost and first deliveries were in order."""
        counts = Counter(self.taken)
        assert set(counts) == set(range(count))
        assert max(counts.values()) <= 2
        by_key: dict[int, list[int]] = defaultdict(list)
        for n in counts:
            by_key[n % KEYS].append(n)
        assert all(numbers == sorted(numbers) for numbers in by_key.values())
        assert self.shop.leases() == 0
        return {n for n, times in counts.items() if times > 1}


async def test_a_server_whose_clock_steps_forward_repeats_no_more_than_was_in_flight(
    database: str, clock: WallClock
) -> None:
    scene = Scene(database, clock)
    scene.shop.emit(300, keys=KEYS)
    async with scene.relays():
        await until(lambda: len(scene.taken) >= 60, "a part delivered")
        held = await scene.step(DAY)
        took = await scene.finish(300, 15.0)
    repeated = scene.duplicates(300)
    log.info("a day forward: %d held, %d repeated, done after %.1f s", len(held), len(repeated), took)
    assert repeated <= held


async def test_a_server_whose_clock_steps_back_holds_nothing_up_for_longer_than_the_step(
    database: str, clock: WallClock
) -> None:
    scene = Scene(database, clock)
    scene.shop.emit(300, keys=KEYS)
    orphans = await claim_and_die(scene.shop)
    async with scene.relays():
        await until(lambda: len(scene.taken) >= 60, "a part delivered")
        await scene.step(-BACK)
        scene.shop.emit(50, keys=KEYS, first=300)
        took = await scene.finish(350, 30.0)
    repeated = scene.duplicates(350)
    log.info(
        "back %g s: %d of a dead relay, %d repeated, done after %.1f s", BACK, orphans, len(repeated), took
    )
    assert repeated == set()
    assert took < BACK + LEASE + 3


async def claim_and_die(shop: Shop) -> int:
    """What a relay leaves that died right after its claim: how many leases."""
    store = parts.open_store(shop.outbox.settings.database, shop.outbox.tables)
    claim = await store.claim(Want("on_order", "elsewhere", limit=10, lease=LEASE, ordered=True))
    await store.close()
    return len(claim.deliveries)


async def test_a_rate_limit_holds_nothing_up_for_longer_than_its_clock_was_wrong(
    database: str, clock: WallClock
) -> None:
    scene = Scene(database, clock, ordered=False, rate_limit="500/s")
    async with scene.relays():
        await scene.step(BACK)
        scene.shop.emit(50)
        await scene.finish(50, 10.0)
        await scene.step(0)
        scene.shop.emit(50, first=50)
        took = await scene.finish(100, 20.0)
    log.info("ahead %g s and right again: a rate limit went on after %.1f s", BACK, took)
    assert sorted(scene.taken) == list(range(100))
    assert took < BACK + 3
