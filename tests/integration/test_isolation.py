"""Handlers and endpoints that misbehave: their deliveries end by policy, and no other lane notices."""

from __future__ import annotations

import asyncio
import gzip
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox import Destination, Event, Reject, Retry, Route, Unavailable
from relaybox.sinks import handler as handlers
from tests.integration.receivers import answer, doing
from tests.integration.shop import Databases, Shop
from tests.waiting import PATIENCE, await_for

QUICK: dict[str, Any] = {
    "max_attempts": 2,
    "timeout": "30s",
    "lease": "30s",
    "poll_interval": "20ms",
    "backoff": {"base": "10ms", "cap": "20ms"},
}


def hang_in_thread() -> None:
    threading.Event().wait(30)


async def hang() -> None:
    await asyncio.Event().wait()


def throw(error: Any) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


LATE = "handler took longer than 0.2s"
STILL_RUNNING = "the handler is still running after 2 s; its thread cannot be stopped"
ACTS: dict[str, tuple[Callable[[], Any], str, str | None]] = {
    "raises": (throw(ValueError("oops")), "failed", "ValueError: oops"),
    "hangs": (hang, "failed", LATE),
    "returns nonsense": (object, "delivered", None),
    "returns an exception": (lambda: Reject("no"), "delivered", None),
    "calls sys.exit": (lambda: sys.exit(3), "failed", "SystemExit: 3"),
    "raises KeyboardInterrupt": (throw(KeyboardInterrupt()), "failed", "KeyboardInterrupt"),
    "raises CancelledError": (throw(asyncio.CancelledError()), "failed", "CancelledError"),
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


def results(shop: Shop) -> dict[str, tuple[str, str | None]]:
    event = shop.outbox.tables.event
    query = sa.select(event.c.destination, event.c.status, event.c.error_message)
    with shop.engine.connect() as connection:
        return {row[0]: (row[1], row[2]) for row in connection.execute(query) if row[0] != "healthy"}


async def come_to(shop: Shop, expected: dict[str, str]) -> dict[str, tuple[str, str | None]]:
    """Return the results when each has its state, and a reason if it was not delivered.

    Meanwhile a healthy lane goes on.
    """
    arrived: list[Event] = []

    @shop.outbox.handler("healthy", name="healthy", **QUICK)
    async def take(event: Event) -> None:
        arrived.append(event)

    def reached() -> bool:
        found = results(shop)
        done = all(error or status == "delivered" for status, error in found.values())
        return done and {name: status for name, (status, _) in found.items()} == expected

    shop.emit(1, event_type="odd")
    async with shop.outbox.relay(), asyncio.timeout(PATIENCE):
        over = False
        while not over:
            over = reached()
            before = len(arrived)
            shop.emit(1, event_type="healthy")
            await await_for(lambda: len(arrived) > before, "the healthy lane's event")  # noqa: B023
    return results(shop)


async def test_a_secret_in_a_handlers_error_is_not_stored(migrated_database: Databases) -> None:
    secret = "a-secret-of-the-runner"
    runner = Destination("runner", "http://127.0.0.1:1/", secret=secret, allow=["127.0.0.0/8"], **QUICK)
    shop = Shop(migrated_database("sqlite"), destinations=[runner])
    shop.outbox.handler("odd", name="odd", **QUICK)(in_loop(throw(Reject(f"refused {secret}"))))
    found = await come_to(shop, {"odd": "failed"})
    assert found["odd"][1] == "refused ***"


@pytest.mark.parametrize("where", [in_loop, in_thread])
async def test_whatever_a_handler_does_is_an_answer_about_its_event(
    where: Callable[[Callable[[], Any]], Callable[[Event], Any]],
    migrated_database: Databases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handlers, "LEAST", 0.2)
    shop = Shop(migrated_database("sqlite"))
    for name, (act, _, _) in ACTS.items():
        settings = QUICK | ({"timeout": "200ms"} if act is hang else {})
        shop.outbox.handler("odd", name=name, **settings)(where(act))
    found = await come_to(shop, {name: status for name, (_, status, _) in ACTS.items()})
    for name, (act, _, error) in ACTS.items():
        if act is hang and where is in_thread:
            error = STILL_RUNNING
        assert error is None or found[name][1] == error, name


def says(start: bytes, more: bytes = b"") -> Any:
    """Says something, and then more and more."""

    async def act(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await writer.drain()
        while more:
            writer.write(more)
            await writer.drain()

    return act


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


# Each is 64 MB, and gzip goes on with the next where one ends.
BOMB = answer("500 Oops", gzip.compress(bytes(2**26), 1) * 4, "Content-Encoding: gzip")
MORE = b"x" * 65_536
ENDPOINTS: dict[str, tuple[Any, str, str]] = {
    "garbage": (
        says(b"\x00\xff\x16\x03\x01 not HTTP at all \r\n\r\n" * 50),
        "failed",
        "does not answer in HTTP",
    ),
    "silence": (silence, "pending", "no answer from"),
    "half a head": (says(b"HTTP/1.1 200 OK\r\nContent-"), "failed", "closed the connection"),
    "half a body": (says(b"HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\nhalf"), "failed", "500 Oops"),
    "endless head": (
        says(b"HTTP/1.1 200 OK\r\n", b"x-more: " + b"x" * 1000 + b"\r\n"),
        "pending",
        "without end",
    ),
    "endless 200": (says(b"HTTP/1.1 200 OK\r\n\r\n", MORE), "delivered", ""),
    "endless 500": (says(b"HTTP/1.1 500 Oops\r\n\r\n", MORE), "failed", "500 Oops"),
    "bomb": (says(BOMB), "failed", "500 Oops"),
}


async def test_whatever_an_endpoint_does_is_an_answer_about_the_delivery(
    migrated_database: Databases,
) -> None:
    async with AsyncExitStack() as receivers:
        places = []
        for name, (act, _, _) in ENDPOINTS.items():
            receiver = await receivers.enter_async_context(doing(act))
            settings = QUICK | {"timeout": "200ms" if act is silence else "5s", "allow": ["127.0.0.0/8"]}
            places.append(Destination(name, receiver.url, **settings))
        url = migrated_database("sqlite")
        shop = Shop(url, destinations=places, routes=[Route("odd", to=list(ENDPOINTS))])
        found = await come_to(shop, {name: status for name, (_, status, _) in ENDPOINTS.items()})
    for name, (_, _, error) in ENDPOINTS.items():
        assert error in (found[name][1] or ""), name


@pytest.mark.parametrize("state", ["full", "probing", "suspect"])
@pytest.mark.full
async def test_a_lane_that_waits_for_what_hangs_stops_within_the_relays_patience(
    state: str, migrated_database: Databases
) -> None:
    shop = Shop(migrated_database("sqlite"))
    started: list[Event] = []

    @shop.outbox.handler("*", name="hangs", batch_size=1, concurrency=2, timeout="60s", poll_interval="20ms")
    async def handler(event: Event) -> None:
        started.append(event)
        await hang()

    shop.emit(10)
    if state != "full":
        put_into(shop, state)
    relay = shop.outbox.relay(patience=0.2)
    running = asyncio.create_task(relay.run())
    await await_for(lambda: len(started) == (2 if state == "full" else 1), "all sent that may be")
    relay.stop()
    await asyncio.wait_for(running, PATIENCE)
    # Of the dead relays' rows it took one and gave it back.
    assert (shop.states(), shop.leases()) == ({"pending": 10}, 9 if state == "suspect" else 0)


def put_into(shop: Shop, state: str) -> None:
    """Put an open circuit whose time is over, or rows with which relays died twice, into the shop."""
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
