"""Handlers and endpoints that misbehave: their deliveries end by policy, and no other lane notices."""

from __future__ import annotations

import asyncio
import gzip
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from relaybox import Destination, Event, Reject, Retry, Route, Unavailable
from tests.integration.receivers import answer, doing
from tests.integration.shop import Databases, Shop
from tests.waiting import await_for

QUICK: dict[str, Any] = {
    "max_attempts": 2,
    "timeout": "200ms",
    "lease": "1s",
    "poll_interval": "20ms",
    "backoff": {"base": "10ms", "cap": "20ms"},
}
HELD_UP = 5.0
"""Seconds that a healthy lane may take for its event, on a busy machine."""


class Odd(BaseException):
    """What no handler should raise."""


class Mute(Exception):
    """What cannot even say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


def hang_in_thread() -> None:
    threading.Event().wait(30)


async def hang() -> None:
    await asyncio.Event().wait()


def recurse() -> None:
    recurse()


def throw(error: Any) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


LATE = "handler took longer than 0.2s"
ACTS: dict[str, tuple[Callable[[], Any], str, str | None]] = {
    "raises": (throw(ValueError("oops")), "failed", "ValueError: oops"),
    "is mute": (throw(Mute()), "failed", "Mute"),
    "hangs": (hang, "failed", LATE),
    "returns nonsense": (object, "delivered", None),
    "returns an exception": (lambda: Reject("no"), "delivered", None),
    "calls sys.exit": (lambda: sys.exit(3), "failed", "SystemExit: 3"),
    "raises KeyboardInterrupt": (throw(KeyboardInterrupt()), "failed", "KeyboardInterrupt"),
    "raises GeneratorExit": (throw(GeneratorExit()), "failed", "GeneratorExit"),
    "raises StopIteration": (throw(StopIteration()), "failed", None),
    "raises CancelledError": (throw(asyncio.CancelledError()), "failed", "CancelledError"),
    "raises a BaseException": (throw(Odd("odd")), "failed", "Odd: odd"),
    "raises a group": (throw(BaseExceptionGroup("several", [Odd()])), "failed", None),
    "recurses": (recurse, "failed", None),
    "retries after nonsense": (throw(Retry("busy", after="soon")), "failed", "busy"),  # type: ignore[arg-type]
    "retries for no reason": (throw(Retry(123)), "failed", "failed in its last attempt"),  # type: ignore[arg-type]
    "rejects for no reason": (throw(Reject(b"no")), "failed", "rejected"),  # type: ignore[arg-type]
    "says what no database takes": (throw(Reject("a\0b\ud800")), "failed", "a�b?"),
    "says too much": (throw(Reject("x" * 10_000_000)), "failed", "x" * 2000),
    "is never available": (throw(Unavailable("no", after=float("nan"))), "pending", "no"),
}


def in_loop(act: Callable[[], Any]) -> Callable[[Event], Any]:
    async def handler(event: Event) -> Any:
        result = act()
        return await result if isinstance(result, Awaitable) else result

    return handler


def in_thread(act: Callable[[], Any]) -> Callable[[Event], Any]:
    act = hang_in_thread if act is hang else act

    def handler(event: Event) -> Any:
        return act()

    return handler


class Healthy:
    """A lane that works, and the longest that its events took while the others misbehave."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._arrived = 0
        self.longest = 0.0
        shop.outbox.handler("healthy", name="healthy", **QUICK)(self.take)

    async def take(self, event: Event) -> None:
        self._arrived += 1

    async def goes_on(self) -> None:
        started, before = time.monotonic(), self._arrived
        self._shop.emit(1, event_type="healthy")
        await await_for(lambda: self._arrived > before, "the healthy lane's event")
        self.longest = max(self.longest, time.monotonic() - started)


def results(shop: Shop) -> dict[str, tuple[str, str | None]]:
    event = shop.outbox.tables.event
    with shop.engine.connect() as connection:
        rows = connection.execute(
            event.select().with_only_columns(event.c.destination, event.c.status, event.c.error_message)
        )
        return {name: (status, error) for name, status, error in rows if name != "healthy"}


@pytest.mark.parametrize("where", [in_loop, in_thread])
async def test_whatever_a_handler_does_is_an_answer_about_its_event(
    where: Callable[[Callable[[], Any]], Callable[[Event], Any]], migrated_database: Databases
) -> None:
    shop = Shop(migrated_database("sqlite"))
    healthy = Healthy(shop)
    for name, (act, _, _) in ACTS.items():
        shop.outbox.handler("odd", name=name, **QUICK)(where(act))
    shop.emit(1, event_type="odd")
    expected = {name: status for name, (_, status, _) in ACTS.items()}
    async with shop.outbox.relay():
        async with asyncio.timeout(20):
            while {name: status for name, (status, _) in results(shop).items()} != expected:
                await healthy.goes_on()
        await healthy.goes_on()
    found = results(shop)
    for name, (_, _, error) in ACTS.items():
        assert error is None or found[name][1] == error, name
    assert healthy.longest < HELD_UP


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\xff\x16\x03\x01 not HTTP at all \r\n\r\n" * 50)
    await writer.drain()


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def half_a_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-")
    await writer.drain()


async def half_a_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\nhalf")
    await writer.drain()


async def endless_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x-more: " + b"x" * 1000 + b"\r\n")
        await writer.drain()


def endless(status: str, *headers: str, chunk: bytes = b"x" * 65_536) -> Any:
    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode())
        while True:
            writer.write(chunk)
            await writer.drain()

    return act


# Each is 64 MB, and gzip goes on with the next where one ends.
BOMB = answer("500 Oops", gzip.compress(bytes(2**26), 1) * 4, "Content-Encoding: gzip")


async def bomb(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(BOMB)
    await writer.drain()


ENDPOINTS: dict[str, tuple[Any, str, str]] = {
    "garbage": (garbage, "failed", "does not answer in HTTP"),
    "silence": (silence, "pending", "no answer from"),
    "half a head": (half_a_head, "failed", "closed the connection"),
    "half a body": (half_a_body, "failed", "500 Oops"),
    "endless head": (endless_head, "failed", ""),
    "endless 200": (endless("200 OK"), "delivered", ""),
    "endless 500": (endless("500 Oops"), "failed", "500 Oops"),
    "bomb": (bomb, "failed", "500 Oops"),
}


async def test_whatever_an_endpoint_does_is_an_answer_about_the_delivery(
    migrated_database: Databases,
) -> None:
    async with AsyncExitStack() as receivers:
        places = []
        for name, (act, _, _) in ENDPOINTS.items():
            receiver = await receivers.enter_async_context(doing(act))
            places.append(Destination(name, receiver.url, allow=["127.0.0.0/8"], **QUICK))
        shop = Shop(
            migrated_database("sqlite"), destinations=places, routes=[Route("odd", to=list(ENDPOINTS))]
        )
        healthy = Healthy(shop)
        shop.emit(1, event_type="odd")
        expected = {name: status for name, (_, status, _) in ENDPOINTS.items()}
        async with shop.outbox.relay():
            async with asyncio.timeout(20):
                while {name: status for name, (status, _) in results(shop).items()} != expected or not all(
                    error for status, error in results(shop).values() if status != "delivered"
                ):
                    await healthy.goes_on()
    found = results(shop)
    for name, (_, _, error) in ENDPOINTS.items():
        assert error in (found[name][1] or ""), name
    assert healthy.longest < HELD_UP


@pytest.mark.parametrize("state", ["full", "probing", "suspect"])
async def test_a_lane_that_waits_for_what_hangs_stops_within_the_relays_patience(
    state: str, migrated_database: Databases
) -> None:
    shop = Shop(migrated_database("sqlite"))
    started: list[Event] = []

    @shop.outbox.handler("*", name="hangs", batch_size=1, timeout="30s", poll_interval="20ms")
    async def handler(event: Event) -> None:
        started.append(event)
        await hang()

    shop.emit(10)
    if state != "full":
        put_into(shop, state)
    relay = shop.outbox.relay(patience=0.2)
    running = asyncio.create_task(relay.run())
    await await_for(lambda: len(started) == (4 if state == "full" else 1), "all sent that may be")
    relay.stop()
    await asyncio.wait_for(running, 10)
    # Of the dead relays' rows it took one and gave it back.
    assert (shop.states(), shop.leases()) == ({"pending": 10}, 9 if state == "suspect" else 0)


def put_into(shop: Shop, state: str) -> None:
    """A circuit whose time is over, or rows with which relays died twice."""
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    with shop.engine.begin() as connection:
        if state == "probing":
            place = shop.outbox.tables.destination
            values = {"name": "hangs", "circuit": "open", "circuit_until": long_ago}
            connection.execute(place.insert().values(values))
        else:
            event = shop.outbox.tables.event
            lease = {"leased_until": long_ago, "lease_token": uuid4(), "lease_owner": "dead"}
            connection.execute(event.update().values(lease | {"attempts": 1, "crashes": 1}))
