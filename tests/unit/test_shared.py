"""A connection is shared: opened once for all who need it, again after it broke, and closed with its sink."""

from __future__ import annotations

import asyncio

import pytest

from relaybox.sinks.broker import Shared


class Connection:
    usable = True
    closed = 0

    async def close(self) -> None:
        self.closed += 1


class Broker:
    """Opens connections, once ``go_on`` is set; raises ``fails`` if there is one."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.after: list[Connection | None] = []
        self.fails: Exception | None = None

    async def open(self, old: Connection | None) -> Connection:
        self.after.append(old)
        await self.go_on.wait()
        if self.fails is not None:
            raise self.fails
        return Connection()


async def test_all_who_wait_get_the_same_connection() -> None:
    broker = Broker()
    shared = Shared(broker.open)
    first, second = await asyncio.gather(shared.get(), shared.get())
    assert first is second is await shared.get()
    assert broker.after == [None]


async def test_a_broken_one_is_given_to_what_opens_the_next() -> None:
    broker = Broker()
    shared = Shared(broker.open)
    first = await shared.get()
    first.usable = False
    assert await shared.get() is not first
    assert broker.after == [None, first]


async def test_after_a_failure_the_next_who_needs_it_tries_again() -> None:
    broker = Broker()
    shared = Shared(broker.open)
    broker.fails = OSError("refused")
    for failed in await asyncio.gather(shared.get(), shared.get(), return_exceptions=True):
        assert failed is broker.fails
    broker.fails = None
    assert (await shared.get()).usable
    assert broker.after == [None, None]


async def test_a_caller_that_is_cancelled_takes_the_connection_from_nobody() -> None:
    broker = Broker()
    broker.go_on.clear()
    shared = Shared(broker.open)
    gives_up, waits = asyncio.ensure_future(shared.get()), asyncio.ensure_future(shared.get())
    await asyncio.sleep(0)
    gives_up.cancel()
    broker.go_on.set()
    assert (await waits).usable


async def test_closing_ends_what_is_being_opened() -> None:
    broker = Broker()
    broker.go_on.clear()
    shared = Shared(broker.open)
    waits = asyncio.ensure_future(shared.get())
    await asyncio.sleep(0)
    await shared.close()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert shared.current is None


async def test_closing_closes_the_connection_once() -> None:
    shared = Shared(Broker().open)
    connection = await shared.get()
    await shared.close()
    await shared.close()
    assert connection.closed == 1
