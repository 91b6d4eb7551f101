"""What the sink of any broker keeps while that is down, breaks off or says nothing: a class of tests."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from relaybox import Destination, Route
from relaybox.event import Delivery
from relaybox.outcome import Delivered, Retry, Unavailable, Unreachable
from relaybox.sink import Answer, Sink
from relaybox.testing.sink_contract import make_delivery
from tests.integration.shop import Shop, until
from tests.integration.sinking import send, sink_to
from tests.servers.restart import Restartable

EVENTS, KEYS = 10_000, 500


class Entry(NamedTuple):
    """A message as a plain client finds it."""

    headers: Mapping[str, str]
    body: str | bytes


class Place(ABC):
    """A server that a test may stop, and the stream of it that its sink leads to by default."""

    scheme: str
    silence: str
    """What is said of a server that does not answer."""
    duplicates = False
    """Whether what was sent twice may be there twice."""

    def __init__(self, server: Restartable) -> None:
        self.server = server

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of a sink."""

    @abstractmethod
    async def declare(self) -> None:
        """Make the stream."""

    @abstractmethod
    async def entries(self) -> list[Entry]:
        """What is in the stream, in order."""


async def stuck(sink: Sink, deliveries: list[Delivery]) -> asyncio.Task[Sequence[Answer]]:
    """A send that is under way and gets no answer."""
    sending = asyncio.ensure_future(sink.send(deliveries))
    done, _ = await asyncio.wait([sending], timeout=0.3)
    assert not done
    return sending


async def checked(url: str, **settings: Any) -> str:
    """What the sink's check says."""
    async with sink_to(url, **settings) as sink:
        try:
            await sink.check()
        except Unavailable as error:
            return error.reason
        return "fine"


def large() -> list[Delivery]:
    """More than the buffers of a connection hold."""
    return [make_delivery(data=b"x" * 500_000) for _ in range(40)]


def shop_to(url: str, database: str) -> Shop:
    destination = Destination(
        *("broker", url),
        ordered=True,
        timeout="5s",
        poll_interval="50ms",
        backoff={"base": "50ms", "cap": "500ms"},
    )
    return Shop(database, destinations=[destination], routes=[Route("order.*", to="broker")])


async def read_back(place: Place, shop: Shop) -> int:
    """All there, per key in order, with their headers; how many are there twice."""
    keys: dict[str, dict[int, None]] = {}
    entries = await place.entries()
    for headers, data in entries:
        body = json.loads(data)
        assert headers["event-id"] == body["id"]
        assert headers["aggregate-id"] == body["aggregate_id"] == str(body["data"]["n"] % KEYS)
        # A dictionary keeps the place of the first.
        keys.setdefault(body["aggregate_id"], {})[body["data"]["n"]] = None
    assert {key: list(events) for key, events in keys.items()} == {
        str(key): list(range(key, EVENTS, KEYS)) for key in range(KEYS)
    }
    assert shop.states() == {"delivered": EVENTS}
    return len(entries) - EVENTS


async def untroubled(database: str, url: str, trouble: str, mend: Callable[[], Awaitable[None]]) -> None:
    """What is wrong with one destination is told, holds up no other, and is over once it is mended."""
    shop = Shop(
        database,
        destinations=[
            Destination("broker", url, ordered=True, poll_interval="50ms"),
            Destination("other", "memory:"),
        ],
        routes=[Route("order.*", to=["broker", "other"])],
    )
    shop.emit(30, keys=10)
    await shop.outbox.adrain()
    assert shop.states("other") == {"delivered": 30}
    assert shop.states("broker") == {"pending": 30}
    told = [error for _, _, error in shop.rows() if error]
    assert told
    assert all(trouble in error and "s3cret" not in error for error in told)
    await mend()
    async with shop.outbox.relay():
        await until(lambda: shop.states() == {"delivered": 60}, "everything is delivered", 30)


class OutageContract:
    """Subclasses have the fixture ``place``, whose server has started."""

    async def test_it_may_be_down_at_the_start_and_go_away_again(self, place: Place) -> None:
        place.server.stop()
        async with sink_to(place.url) as sink:
            [refused] = await sink.send([make_delivery()])
            assert isinstance(refused, Unreachable)
            assert f"cannot connect to 127.0.0.1:{place.server.port}" in refused.reason
            place.server.start()
            await place.declare()
            for _ in range(2):
                assert await sink.send([make_delivery() for _ in range(3)]) == [Delivered()] * 3
                place.server.stop()
                [gone] = await sink.send([make_delivery()])
                assert isinstance(gone, Unavailable)
                place.server.start()
            assert await sink.send([make_delivery()]) == [Delivered()]

    async def test_a_name_that_dns_does_not_know_is_unreachable(self, place: Place) -> None:
        [answer] = await send(f"{place.scheme}://nowhere.invalid", make_delivery())
        assert isinstance(answer, Unreachable)
        assert "nowhere.invalid" in answer.reason

    async def test_a_server_that_speaks_something_else_is_unavailable(
        self, place: Place, postgres18_url: str
    ) -> None:
        port = postgres18_url.rpartition(":")[2].partition("/")[0]
        [answer] = await send(f"{place.scheme}://127.0.0.1:{port}", make_delivery(), timeout="1s")
        assert isinstance(answer, Unavailable)

    async def test_a_silent_server_is_unavailable_in_time_and_takes_events_when_it_is_back(
        self, place: Place
    ) -> None:
        await place.declare()
        async with sink_to(place.url, timeout="500ms") as sink:
            assert await sink.send([make_delivery()]) == [Delivered()]
            waiting = [make_delivery(key="a") for _ in range(3)]
            with place.server.silent():
                begun = time.monotonic()
                first = (await sink.send(waiting))[0]
                assert time.monotonic() - begun < 3
                assert isinstance(first, Unavailable)
                assert place.silence in first.reason
            async with asyncio.timeout(10):
                while isinstance((answers := await sink.send(waiting))[0], Unavailable):
                    pass
            assert answers == [Delivered()] * 3
        ids = [entry.headers["event-id"] for entry in await place.entries()][1:]
        assert list(dict.fromkeys(ids)) == [str(delivery.event_id) for delivery in waiting]
        assert len(ids) == 3 or place.duplicates

    async def test_large_messages_to_a_silent_server_time_out_too_and_it_can_be_closed(
        self, place: Place
    ) -> None:
        await place.declare()
        async with sink_to(place.url, timeout="500ms") as sink:
            assert await sink.send([make_delivery()]) == [Delivered()]
            with place.server.silent():
                begun = time.monotonic()
                assert {type(answer) for answer in await sink.send(large())} == {Unavailable}
                await sink.close()
                assert time.monotonic() - begun < 5

    async def test_a_send_to_a_silent_server_can_be_cancelled_and_the_next_has_its_own_answers(
        self, place: Place
    ) -> None:
        await place.declare()
        async with sink_to(place.url, timeout="30s") as sink:
            assert await sink.send([make_delivery()]) == [Delivered()]
            with place.server.silent():
                sending = await stuck(sink, large())
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(sending, 20)
            assert await sink.send([make_delivery()]) == [Delivered()]

    async def test_a_connection_that_breaks_is_answered_at_once(self, place: Place) -> None:
        await place.declare()
        async with sink_to(place.url, timeout="30s") as sink:
            assert await sink.send([make_delivery()]) == [Delivered()]
            with place.server.silent():
                sending = await stuck(sink, [make_delivery() for _ in range(5)])
                await asyncio.to_thread(place.server.kill)
            answers = await asyncio.wait_for(sending, 20)
            assert {type(answer) for answer in answers} == {Unavailable}
            place.server.start()

    async def test_closing_answers_what_is_under_way(self, place: Place) -> None:
        await place.declare()
        async with sink_to(place.url, timeout="30s") as sink:
            with place.server.silent():
                sending = await stuck(sink, [make_delivery()])
                await asyncio.wait_for(sink.close(), 5)
                [answer] = await asyncio.wait_for(sending, 20)
        assert isinstance(answer, Retry | Unavailable)

    async def test_the_check_says_what_is_missing(self, place: Place) -> None:
        assert await checked(place.url) == "fine"
        with place.server.silent():
            assert "no answer" in await checked(place.url, timeout="300ms")
        place.server.stop()
        assert "cannot connect" in await checked(place.url)

    @pytest.mark.slow
    async def test_ten_thousand_events_of_five_hundred_keys_arrive_in_order(
        self, place: Place, fresh_database: Callable[[str], str]
    ) -> None:
        await place.declare()
        shop = shop_to(place.url, fresh_database("postgresql-18"))
        shop.emit(EVENTS, keys=KEYS)
        await shop.outbox.adrain()
        assert await read_back(place, shop) == 0

    @pytest.mark.slow
    async def test_they_do_so_too_where_the_server_is_restarted_in_the_middle(
        self, place: Place, fresh_database: Callable[[str], str]
    ) -> None:
        await place.declare()
        shop = shop_to(place.url, fresh_database("postgresql-18"))
        shop.emit(EVENTS, keys=KEYS)
        async with shop.outbox.relay():
            await until(lambda: shop.states().get("delivered", 0) > EVENTS // 5, "a part was delivered")
            await asyncio.to_thread(place.server.stop)
            assert shop.states().get("delivered", 0) < EVENTS
            await until(lambda: shop.circuit("broker") == "open", "the circuit is open")
            await asyncio.to_thread(place.server.start)
            await until(lambda: shop.states() == {"delivered": EVENTS}, "everything is delivered", 60)
        twice = await read_back(place, shop)
        assert twice < EVENTS // 5 if place.duplicates else twice == 0
