"""A relay that is killed, stopped or asked to leave while it works, and the one that takes over from it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from tests.chaos.mortal_relay import Death, Plan
from tests.integration.runner import Runner, running
from tests.integration.shop import MEMBERSHIP, SOON, Shop, until

ROOT = Path(__file__).parents[2]
EVENTS = 40
KEYS = 8
CONCURRENCY = 3
OPTIONS: dict[str, Any] = {
    "ordered": True,
    "lease": "1s",
    "timeout": "1s",
    "concurrency": CONCURRENCY,
    "batch_size": 10,
    "poll_interval": "20ms",
    "backoff": {"base": "10ms", "cap": "50ms"},
    "allow": ["127.0.0.0/8"],
}


@contextmanager
def relay(plan: Plan) -> Iterator[subprocess.Popen[bytes]]:
    """A process of ``mortal_relay.py``, killed at the end whatever happened."""
    command = [sys.executable, "-m", "tests.chaos.mortal_relay", msgspec.json.encode(plan).decode()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.kill()


class Scene:
    """A shop whose events go to a runner; the first relay and its successor use paths of their own."""

    def __init__(self, url: str, runner: Runner) -> None:
        self.runner = runner
        self._url = url
        plan = self.plan("successor")
        self.shop = Shop(
            url, destinations=plan.outbox().settings.destinations, routes=plan.outbox().settings.routes
        )

    def plan(self, path: str, death: Death = "never") -> Plan:
        sink = f"http://127.0.0.1:{self.runner.port}/{path}"
        return Plan(self._url, {"runner": sink}, OPTIONS, death)

    def taken(self, path: str | None = None) -> list[int]:
        """The numbers that arrived, at either path or at one."""
        return [arrival.n for arrival in self.runner.taken if path in (None, arrival.path.strip("/"))]

    def in_flight(self) -> set[int]:
        """What arrived and is not yet written down as delivered."""
        return set(self.taken()) - self.delivered()

    def delivered(self) -> set[int]:
        event = self.shop.outbox.tables.event.c
        with self.shop.engine.connect() as connection:
            query = sa.select(event.payload).where(event.status == "delivered")
            return {payload["n"] for payload in connection.scalars(query)}

    def all_rows(self) -> list[Any]:
        """Every row, as it stands there."""
        event = self.shop.outbox.tables.event.c
        columns = (event.id, event.status, event.attempts, event.crashes, event.lease_token, event.updated_at)
        with self.shop.engine.connect() as connection:
            return list(connection.execute(sa.select(*columns).order_by(event.position)))

    async def take_over(self) -> None:
        """Another relay brings it to its end."""
        async with self.shop.outbox.relay():
            delivered = {"delivered": EVENTS}
            await until(lambda: self.shop.states() == delivered, "all delivered by the successor", 60.0)

    def check(self, in_flight: set[int]) -> None:
        """Nothing lost; duplicates are of what was in flight, once each; first deliveries are in order."""
        counts = Counter(self.taken())
        assert set(counts) == set(range(EVENTS))
        assert {n for n, count in counts.items() if count > 1} <= in_flight
        assert max(counts.values()) <= 2
        by_key: dict[int, list[int]] = defaultdict(list)
        for n in dict.fromkeys(self.taken()):
            by_key[n % KEYS].append(n)
        assert all(numbers == sorted(numbers) for numbers in by_key.values())
        assert {row[:2] for row in self.shop.rows()} == {("delivered", 1)}
        assert self.shop.leases() == 0


@pytest.fixture
async def scene(
    fresh_database: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    monkeypatch.setitem(MEMBERSHIP, "interval", SOON)
    async with running() as runner:
        scene = Scene(fresh_database("postgresql-18"), runner)
        scene.shop.emit(EVENTS, keys=KEYS)
        yield scene


async def ended(process: subprocess.Popen[bytes]) -> int:
    """The status with which the process ended."""
    return await asyncio.wait_for(asyncio.to_thread(process.wait), 20)


async def test_killed_after_it_claimed(scene: Scene) -> None:
    with relay(scene.plan("first", "after claim")) as process:
        assert await ended(process) == -signal.SIGKILL
    assert scene.shop.leases() == 10
    assert scene.taken() == []
    await scene.take_over()
    scene.check(in_flight=set())


async def test_killed_when_requests_have_arrived_and_are_not_answered(scene: Scene) -> None:
    scene.runner.go_on.clear()
    with relay(scene.plan("first")) as process:
        await until(lambda: len(scene.taken()) == CONCURRENCY, "as many requests as may be under way")
        process.kill()
        assert await ended(process) == -signal.SIGKILL
    scene.runner.go_on.set()
    in_flight = scene.in_flight()
    assert len(in_flight) == CONCURRENCY
    await scene.take_over()
    scene.check(in_flight)
    assert {n for n, count in Counter(scene.taken()).items() if count > 1} == in_flight


async def test_killed_when_it_was_answered_and_has_not_settled(scene: Scene) -> None:
    with relay(scene.plan("first", "after acknowledgement")) as process:
        assert await ended(process) == -signal.SIGKILL
    in_flight = scene.in_flight()
    assert 1 <= len(in_flight) <= 10
    await scene.take_over()
    scene.check(in_flight)


async def test_killed_while_its_settle_is_under_way(scene: Scene) -> None:
    """The rows are locked by somebody else, so that the statement is sent and its outcome open."""
    arrived = asyncio.Event()
    scene.runner.go_on.clear()
    scene.runner.on_request = lambda n: arrived.set()
    with relay(scene.plan("first")) as process, scene.shop.engine.connect() as locker:
        await asyncio.wait_for(arrived.wait(), 20)
        locker.execute(sa.select(scene.shop.outbox.tables.event.c.id).with_for_update())
        scene.runner.go_on.set()
        waiting = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")

        def settling() -> bool:
            with scene.shop.engine.connect() as connection:
                return connection.scalars(waiting).one() > 0

        await until(settling, "a settle that waits for the rows")
        process.kill()
        assert await ended(process) == -signal.SIGKILL
        in_flight = scene.in_flight()
        assert 1 <= len(in_flight) <= scene.shop.leases()
    await scene.take_over()
    scene.check(in_flight)


@asynccontextmanager
async def stopped(process: subprocess.Popen[bytes]) -> AsyncIterator[None]:
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
    with relay(scene.plan("first")) as process:
        await until(lambda: len(scene.taken()) == CONCURRENCY, "as many requests as may be under way")
        async with stopped(process):
            in_flight = scene.in_flight()
            if answered:
                scene.runner.go_on.set()
                await scene.take_over()
            else:
                await take_over_while_the_first_waits(scene)
            before = scene.all_rows()
        # It is a relay like any other again: what is new, it delivers.
        scene.runner.go_on.set()
        scene.shop.emit(1, first=EVENTS)
        await until(lambda: EVENTS in scene.taken("first"), "the one that was stopped goes on")
        await until(lambda: scene.shop.leases() == 0, "it settles what it then delivered")
        assert scene.all_rows()[:EVENTS] == before
        assert set(scene.taken("first")) == in_flight | {EVENTS}
        process.terminate()
        assert await ended(process) == 0
    scene.runner.taken = [arrival for arrival in scene.runner.taken if arrival.n < EVENTS]
    with scene.shop.engine.begin() as connection:
        event = scene.shop.outbox.tables.event
        connection.execute(event.delete().where(event.c.position > EVENTS))
    scene.check(in_flight)


async def take_over_while_the_first_waits(scene: Scene) -> None:
    """Only the first relay's requests stay without an answer."""
    held, scene.runner.go_on = scene.runner.go_on, asyncio.Event()
    scene.runner.go_on.set()
    await scene.take_over()
    scene.runner.go_on = held


async def heard(process: subprocess.Popen[bytes]) -> None:
    """Until the process has been told of the signal that was sent to it."""
    status = Path(f"/proc/{process.pid}/status")
    await until(lambda: "ShdPnd:\t0000000000000000" in status.read_text(), "the signal delivered")


async def test_asked_to_leave_in_mid_send_it_finishes_and_leaves_nothing(scene: Scene) -> None:
    scene.runner.go_on.clear()
    with relay(scene.plan("first")) as process:
        await until(lambda: len(scene.taken()) == CONCURRENCY, "as many requests as may be under way")
        process.terminate()
        await heard(process)
        scene.runner.go_on.set()
        assert await ended(process) == 0
    assert CONCURRENCY <= len(scene.taken()) < EVENTS
    assert (scene.delivered(), scene.shop.leases()) == (set(scene.taken()), 0)
    await scene.take_over()
    scene.check(in_flight=set())
    assert len(scene.taken()) == EVENTS


async def test_asked_twice_to_leave_it_leaves_at_once(scene: Scene) -> None:
    scene.runner.go_on.clear()
    with relay(scene.plan("first")) as process:
        await until(lambda: len(scene.taken()) == CONCURRENCY, "as many requests as may be under way")
        process.terminate()
        await heard(process)
        process.terminate()
        assert await ended(process) != 0
    in_flight = scene.in_flight()
    assert len(in_flight) == CONCURRENCY
    scene.runner.go_on.set()
    await scene.take_over()
    scene.check(in_flight)
