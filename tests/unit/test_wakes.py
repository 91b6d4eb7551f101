"""Wakes within a process: flags that lose nothing, and the bell of an outbox."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Iterable, Iterator

import pytest

from relaybox.emit.wakes.local import Bell, LocalWake
from relaybox.emit.wakes.postgres import channel_name
from tests.waiting import PATIENCE

LONG = 10_000.0


async def asleep(wake: LocalWake, *destinations: str) -> list[asyncio.Task[bool]]:
    """Lanes that wait."""
    tasks = [asyncio.create_task(wake.wait(name, LONG)) for name in destinations]
    await asyncio.sleep(0)
    return tasks


async def test_a_wait_lasts_its_time_and_a_wake_between_two_waits_counts_once() -> None:
    wake = LocalWake()
    start = asyncio.get_running_loop().time()
    assert not await wake.wait("shop", 0.05)
    assert asyncio.get_running_loop().time() - start >= 0.049
    assert not await wake.wait("shop", 0)
    wake = LocalWake()
    assert not await wake.wait("shop", 0)
    wake.wake("shop")
    wake.wake("shop")
    assert await wake.wait("shop", LONG)
    assert not await wake.wait("shop", 0)


async def test_a_wake_ends_the_wait_of_its_destination_alone() -> None:
    wake = LocalWake()
    shop, audit = await asleep(wake, "shop", "audit")
    wake.wake("shop")
    assert await asyncio.wait_for(shop, PATIENCE)
    assert not audit.done()
    wake.wake()
    assert await asyncio.wait_for(audit, PATIENCE)


@pytest.mark.parametrize("destination", ["shop", None])
async def test_a_wake_before_the_first_wait_is_not_lost(destination: str | None) -> None:
    wake = LocalWake()
    wake.wake(destination)
    assert await wake.wait("shop", LONG)
    assert not await wake.wait("shop", 0)


async def test_a_wake_during_a_cancelled_wait_is_there_for_the_next() -> None:
    wake = LocalWake()
    (shop,) = await asleep(wake, "shop")
    wake.wake("shop")
    shop.cancel()
    await asyncio.wait([shop])
    assert await wake.wait("shop", LONG)


async def test_a_wake_at_the_moment_of_falling_asleep_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wake = LocalWake()
    loop = asyncio.get_running_loop()
    create = loop.create_future

    def wake_and_create() -> asyncio.Future[None]:
        wake.wake("shop")
        return create()

    monkeypatch.setattr(loop, "create_future", wake_and_create)
    async with asyncio.timeout(PATIENCE):
        assert await wake.wait("shop", LONG)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads that take turns after every few steps."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


async def test_a_wake_is_never_lost_however_it_meets_the_end_of_a_wait(hasty_threads: None) -> None:
    """The thread wakes again only when its wake was seen: a lost one would stop it for good."""
    wake = LocalWake()
    seen = threading.Semaphore(0)
    rounds = 3_000
    done: list[int] = []

    def emitter() -> None:
        for number in range(rounds):
            wake.wake("shop")
            if not seen.acquire(timeout=PATIENCE):
                return
            done.append(number)

    thread = threading.Thread(target=emitter)
    thread.start()
    while thread.is_alive():
        if await wake.wait("shop", 0):
            seen.release()
    assert len(done) == rounds


def test_a_wake_after_the_loop_has_ended_does_nothing() -> None:
    wake = LocalWake()

    async def lane() -> None:
        await asleep(wake, "shop")

    asyncio.run(lane())
    wake.wake("shop")
    wake.wake()
    assert asyncio.run(wake.wait("shop", LONG))


class Calls:
    """A caller that records its calls."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []
        self.closed = False

    def call(self, destinations: Iterable[str]) -> None:
        self.names.append(set(destinations))

    def close(self) -> None:
        self.closed = True


async def test_a_bell_wakes_the_relays_of_the_process_and_calls_the_others_for_the_rest() -> None:
    beyond = Calls()
    bell = Bell(lambda: beyond)
    first, second = LocalWake(), LocalWake()
    bell.add(first, ["shop", "audit"])
    bell.add(second, ["shop"])
    bell.call(iter(["shop", "search"]))
    assert await first.wait("shop", LONG)
    assert await second.wait("shop", LONG)
    assert not await first.wait("audit", 0)
    assert beyond.names == [{"search"}]
    bell.call(["audit"])
    assert await first.wait("audit", LONG)
    assert beyond.names == [{"search"}]


async def test_a_relay_that_stopped_or_was_dropped_does_not_keep_others_from_being_called() -> None:
    beyond = Calls()
    bell = Bell(lambda: beyond)
    wake = LocalWake()
    bell.add(wake, ["shop"])
    bell.add(LocalWake(), ["shop"])
    gc.collect()
    bell.remove(wake)
    bell.remove(wake)
    bell.call(["shop"])
    assert beyond.names == [{"shop"}]
    assert not await wake.wait("shop", 0)
    bell.close()
    assert beyond.closed
    alone = Bell()
    assert alone.call(["shop"]) is None
    alone.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_in_a_forked_process_the_parents_relays_are_not_called() -> None:
    beyond = Calls()
    bell = Bell(lambda: beyond)
    wake = LocalWake()
    bell.add(wake, ["shop"])
    pid = os.fork()
    if pid == 0:
        bell.call(["shop"])
        os._exit(0 if beyond.names == [{"shop"}] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    bell.call(["shop"])
    assert beyond.names == []


def test_each_set_of_tables_has_a_channel_of_its_own() -> None:
    names = [channel_name(None, ""), channel_name("a", "b"), channel_name("ab", ""), channel_name(None, "ab")]
    assert names[0] == "relaybox"
    assert len(set(names)) == len(names)
    assert channel_name("a", "b") == channel_name("a", "b")
    assert all(len(name.encode()) < 64 for name in [*names, channel_name("s" * 63, "p" * 40)])
