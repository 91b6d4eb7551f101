"""What the sink of any broker keeps while that is down, breaks off or says nothing: classes of tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox import Destination, Route
from relaybox.core import circuit
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Retry, Unavailable, Unreachable
from relaybox.sinks.sink import Answer, Sink
from relaybox.testing.sink_contract import make_delivery
from tests.integration.shop import Shop
from tests.integration.sinking import PATIENT, check_refused, deliver, send, sink_to
from tests.waiting import PATIENCE, await_for, cancel

MANY = 10_000


Entry = tuple[Mapping[str, Any], str | bytes]
"""The headers and the body of a message as a plain client finds it."""


class Place:
    """A server that a test may stop, and the stream of it that its sink leads to by default."""

    url: str
    """The URL of a sink."""
    scheme: str
    silence: str
    """What is said of a server that does not answer."""
    duplicates = 0
    """How many of ``MANY`` messages may be there twice after a restart."""

    def __init__(self, server: Any) -> None:
        self.server = server

    async def declare(self) -> None:
        """Make the stream, where it is not there yet."""

    async def entries(self) -> list[Entry]:
        """Return what is in the stream, in order."""
        raise NotImplementedError


async def stuck(sink: Sink, deliveries: list[Delivery]) -> asyncio.Task[Sequence[Answer]]:
    """Begin a send that gets no answer."""
    sending = asyncio.ensure_future(sink.send(deliveries))
    done, _ = await asyncio.wait([sending], timeout=0.3)
    assert not done
    return sending


async def checked(url: str, **settings: Any) -> str:
    """Return what the sink's check says."""
    async with sink_to(url, **settings) as sink:
        try:
            await sink.check()
        except Unavailable as error:
            return error.reason
        return "fine"


def large() -> list[Delivery]:
    """More than the buffers of a connection hold."""
    return [make_delivery(data=b"x" * 500_000) for _ in range(40)]


def shop_to(url: str, database: str, **options: Any) -> Shop:
    """Return a shop with the destination ``broker``, which retries soon."""
    soon: dict[str, Any] = {"poll_interval": "50ms", "backoff": {"base": "50ms", "cap": "500ms"}}
    destination = Destination("broker", url, **{"ordered": True, "timeout": "5s", **soon, **options})
    return Shop(database, destinations=[destination], routes=[Route("*", to="broker")])


def event_ids(shop: Shop) -> list[str]:
    """Return the ids of all events in the order of their positions."""
    event = shop.outbox.tables.event.c
    with shop.engine.connect() as connection:
        return [str(id_) for id_ in connection.scalars(sa.select(event.event_id).order_by(event.position))]


async def read_back(place: Place, shop: Shop, events: int, keys: int) -> int:
    """Check that all is there, per key in order, with its headers; return how many are there twice."""
    found: dict[str, dict[int, None]] = {}
    entries, ids = await place.entries(), event_ids(shop)
    for headers, data in entries:
        body = json.loads(data)
        n = body["data"]["n"]
        assert headers["event-id"] == body["id"] == ids[n]
        assert (headers["event-type"], headers["aggregate-type"]) == ("order.paid", "Order")
        assert headers["aggregate-id"] == body["aggregate_id"] == str(n % keys)
        # A dictionary keeps the place of the first.
        found.setdefault(body["aggregate_id"], {})[n] = None
    assert {key: list(numbers) for key, numbers in found.items()} == {
        str(key): list(range(key, events, keys)) for key in range(keys)
    }
    assert shop.states() == {"delivered": events}
    return len(entries) - events


async def untroubled(database: str, url: str, trouble: str, repair: Callable[[], Awaitable[None]]) -> None:
    """Check that trouble of one destination is reported, delays no other, and ends once it is fixed."""
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
    reasons = [error for _, _, error in shop.rows() if error]
    assert reasons
    assert all(trouble in error and "s3cret" not in error for error in reasons)
    assert {attempts for _, attempts, _ in shop.rows()} <= {0, 1}
    await repair()
    async with shop.outbox.relay():
        await await_for(lambda: shop.states() == {"delivered": 60}, "everything is delivered")


class RelayContract:
    """A relay delivers in order. Subclasses have the fixture ``place``, whose server has started."""

    @pytest.fixture
    def database(self, migrated_database: Callable[[str], str]) -> str:
        return migrated_database("postgresql-18")

    @pytest.mark.parametrize(
        ("events", "keys"), [(1_000, 50), pytest.param(MANY, 500, marks=pytest.mark.full)]
    )
    async def test_events_arrive_once_and_each_key_in_order(
        self, place: Place, database: str, events: int, keys: int
    ) -> None:
        await place.declare()
        shop = shop_to(place.url, database)
        shop.emit(events, keys=keys)
        await shop.outbox.adrain()
        assert await read_back(place, shop, events, keys) == 0

    @pytest.mark.full
    async def test_each_key_arrives_in_order_where_the_server_is_restarted_in_the_middle(
        self, place: Place, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The longer a server takes to start, the longer the circuit would wait for the next probe.
        monkeypatch.setattr(circuit, "LONGEST_PAUSE", 1.0)
        await place.declare()
        shop, half = shop_to(place.url, database), MANY // 2
        shop.emit(half, keys=500)
        async with shop.outbox.relay():
            await await_for(lambda: shop.states().get("delivered", 0) > MANY // 10, "a part is delivered")
            await asyncio.to_thread(place.server.stop)
            shop.emit(half, keys=500, first=half)
            await await_for(lambda: shop.circuit("broker") == "open", "the circuit is open")
            assert shop.states()["pending"] >= half
            await asyncio.to_thread(place.server.start)
            await await_for(lambda: shop.states() == {"delivered": MANY}, "everything is delivered")
        assert await read_back(place, shop, MANY, 500) <= place.duplicates


class OutageContract(RelayContract):
    """What a sink answers when its server is down, breaks off or says nothing."""

    async def test_it_may_be_down_at_the_start_and_go_away_again(self, place: Place) -> None:
        place.server.stop()
        async with sink_to(place.url) as sink:
            [refused] = await sink.send([make_delivery()])
            check_refused(refused, Unreachable, f"cannot connect to 127.0.0.1:{place.server.port}")
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
        check_refused(answer, Unreachable, "nowhere.invalid")

    async def test_a_server_that_speaks_something_else_is_unavailable(
        self, place: Place, postgres18_url: str
    ) -> None:
        port = postgres18_url.rpartition(":")[2].partition("/")[0]
        [answer] = await send(f"{place.scheme}://127.0.0.1:{port}", make_delivery(), timeout="1s")
        assert isinstance(answer, Unavailable)

    async def test_a_silent_server_is_unavailable_and_takes_events_once_back(self, place: Place) -> None:
        await place.declare()
        async with sink_to(place.url, timeout="500ms") as sink:
            await deliver(sink)
            waiting = [make_delivery(key="a") for _ in range(3)]
            with place.server.silent():
                [first, *_] = await asyncio.wait_for(sink.send(waiting), PATIENCE)
                check_refused(first, Unavailable, place.silence)
            await deliver(sink, *waiting)
        wanted = [str(delivery.event_id) for delivery in waiting]
        found = [headers["event-id"] for headers, _ in await place.entries()]
        ids = [event_id for event_id in found if event_id in wanted]
        assert list(dict.fromkeys(ids)) == wanted
        assert len(ids) == 3 or place.duplicates

    async def test_large_messages_to_a_silent_server_time_out_and_it_can_close(self, place: Place) -> None:
        await place.declare()
        async with sink_to(place.url, timeout="500ms") as sink:
            await deliver(sink)
            with place.server.silent():
                answers = await asyncio.wait_for(sink.send(large()), PATIENCE)
                assert {type(answer) for answer in answers} == {Unavailable}
                await asyncio.wait_for(sink.close(), PATIENCE)

    async def test_a_send_to_a_silent_server_can_be_cancelled_and_the_next_has_its_own_answers(
        self, place: Place
    ) -> None:
        await place.declare()
        async with sink_to(place.url, **PATIENT) as sink:
            assert await sink.send([make_delivery()]) == [Delivered()]
            with place.server.silent():
                sending = await stuck(sink, large())
                await cancel(sending)
            assert await sink.send([make_delivery()]) == [Delivered()]

    async def test_a_connection_that_breaks_is_answered_before_the_timeout(self, place: Place) -> None:
        await place.declare()
        async with sink_to(place.url, **PATIENT) as sink:
            assert await sink.send([make_delivery()]) == [Delivered()]
            with place.server.silent():
                sending = await stuck(sink, [make_delivery() for _ in range(5)])
                await asyncio.to_thread(place.server.kill)
            answers = await asyncio.wait_for(sending, PATIENCE)
            assert {type(answer) for answer in answers} == {Unavailable}
            place.server.start()

    async def test_closing_answers_what_is_under_way(self, place: Place) -> None:
        await place.declare()
        async with sink_to(place.url, **PATIENT) as sink:
            with place.server.silent():
                sending = await stuck(sink, [make_delivery()])
                await asyncio.wait_for(sink.close(), PATIENCE)
                [answer] = await asyncio.wait_for(sending, PATIENCE)
        assert isinstance(answer, Retry | Unavailable)

    async def test_the_check_says_what_is_missing(self, place: Place) -> None:
        assert await checked(place.url) == "fine"
        with place.server.silent():
            assert "no answer" in await checked(place.url, timeout="300ms")
        place.server.stop()
        assert "cannot connect" in await checked(place.url)
