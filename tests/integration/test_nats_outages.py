"""A server of NATS that is down, breaks connections or says nothing, and what becomes of events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import nats
import pytest

from relaybox import Destination, Route
from relaybox.event import Delivery
from relaybox.outcome import Delivered, Retry, Unavailable, Unreachable
from relaybox.sink import Answer, Sink
from relaybox.sinks import nats_connection
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration.jetstream import send, sink_to, stream
from tests.integration.shop import Shop, until
from tests.servers import nats as server
from tests.servers.restart import Restartable

EVENTS, KEYS = 10_000, 500


@pytest.fixture
def own() -> Iterator[Restartable]:
    """A server that a test may stop."""
    with available("NATS", server.broker()) as started:
        yield started


async def stuck(sink: Sink, deliveries: list[Delivery]) -> asyncio.Task[Sequence[Answer]]:
    """A send that is under way and gets no answer."""
    sending = asyncio.ensure_future(sink.send(deliveries))
    done, _ = await asyncio.wait([sending], timeout=0.3)
    assert not done
    return sending


async def test_it_may_be_down_at_the_start_and_go_away_again(own: Restartable) -> None:
    own.stop()
    async with sink_to(f"{server.url_of(own)}/orders") as sink:
        [refused] = await sink.send([make_delivery()])
        assert isinstance(refused, Unreachable)
        assert f"cannot connect to 127.0.0.1:{own.port}" in refused.reason
        own.start()
        async with await nats.connect(server.url_of(own)) as client:
            await client.jetstream().add_stream(name="orders", subjects=["orders"])
        for _ in range(2):
            assert await sink.send([make_delivery() for _ in range(3)]) == [Delivered()] * 3
            own.stop()
            [gone] = await sink.send([make_delivery()])
            assert isinstance(gone, Unavailable)
            own.start()
        assert await sink.send([make_delivery()]) == [Delivered()]


async def test_of_several_hosts_one_that_is_there_is_enough(own: Restartable) -> None:
    async with await nats.connect(server.url_of(own)) as client:
        await client.jetstream().add_stream(name="orders", subjects=["orders"])
    for _ in range(4):
        [answer] = await send(f"nats://127.0.0.1:1,127.0.0.1:{own.port}/orders", make_delivery())
        assert answer == Delivered()


async def test_a_name_that_dns_does_not_know_is_unreachable() -> None:
    [answer] = await send("nats://nowhere.invalid/orders", make_delivery())
    assert isinstance(answer, Unreachable)
    assert "DNS" in answer.reason


async def test_a_server_that_speaks_something_else_is_unavailable(redis_url: str) -> None:
    [answer] = await send(
        f"{redis_url.replace('redis:', 'nats:').removesuffix('/0')}/orders", make_delivery(), timeout="1s"
    )
    assert isinstance(answer, Unavailable)


async def test_a_silent_server_is_unavailable_in_time_and_gets_each_event_once_when_it_is_back(
    own: Restartable,
) -> None:
    async with stream(server.url_of(own)) as place, sink_to(place.url, timeout="500ms") as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        waiting = [make_delivery(key="a") for _ in range(3)]
        with own.silent():
            begun = time.monotonic()
            first = (await sink.send(waiting))[0]
            assert time.monotonic() - begun < 3
            assert isinstance(first, Unavailable)
            assert "no acknowledgement" in first.reason
        answers = await sink.send(waiting)
        while isinstance(answers[0], Unavailable):
            answers = await sink.send(waiting)
        assert answers == [Delivered()] * 3
        ids = [message.headers["event-id"] for message in await place.messages()]
    assert ids[1:] == [str(delivery.event_id) for delivery in waiting]


async def test_large_messages_to_a_silent_server_time_out_too_and_it_can_be_closed(own: Restartable) -> None:
    async with stream(server.url_of(own)) as place, sink_to(place.url, timeout="500ms") as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        with own.silent():
            begun = time.monotonic()
            answers = await sink.send([make_delivery(data=b"x" * 500_000) for _ in range(40)])
            assert {type(answer) for answer in answers} == {Unavailable}
            await sink.close()
            assert time.monotonic() - begun < 5


async def test_a_send_to_a_silent_server_can_be_cancelled(own: Restartable) -> None:
    async with stream(server.url_of(own)) as place, sink_to(place.url, timeout="30s") as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        with own.silent():
            sending = await stuck(sink, [make_delivery(data=b"x" * 500_000) for _ in range(40)])
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(sending, 5)


async def test_a_connection_that_breaks_is_answered_at_once(
    own: Restartable,
) -> None:
    async with stream(server.url_of(own)) as place, sink_to(place.url, timeout="30s") as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        with own.silent():
            sending = await stuck(sink, [make_delivery() for _ in range(5)])
            await asyncio.to_thread(own.kill)
        answers = await asyncio.wait_for(sending, 5)
        assert {type(answer) for answer in answers} == {Unavailable}
        assert "the connection broke" in answers[0].reason
        own.start()


@pytest.mark.parametrize("size", [1, 500_000])
async def test_a_connection_on_which_nothing_is_heard_is_given_up_for_a_new_one(
    own: Restartable, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(nats_connection, "PING_SECONDS", 0.1)
    async with stream(server.url_of(own)) as place, sink_to(place.url, timeout="2s") as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        first = sink._connection
        with own.silent():
            answers = await sink.send([make_delivery(data=b"x" * size) for _ in range(20)])
            assert {type(answer) for answer in answers} == {Unavailable}
        assert await sink.send([make_delivery()]) == [Delivered()]
        assert sink._connection is not first


async def test_closing_answers_what_is_under_way(own: Restartable) -> None:
    async with stream(server.url_of(own)) as place, sink_to(place.url, timeout="30s") as sink:
        with own.silent():
            sending = await stuck(sink, [make_delivery()])
            await asyncio.wait_for(sink.close(), 5)
            [answer] = await asyncio.wait_for(sending, 5)
    assert isinstance(answer, Retry | Unavailable)


async def test_the_check_says_what_is_missing(own: Restartable) -> None:
    async def checked(url: str, **settings: Any) -> str:
        async with sink_to(url, **settings) as sink:
            try:
                await sink.check()
            except Unavailable as error:
                return error.reason
            return "fine"

    url = server.url_of(own)
    async with stream(url) as place:
        assert await checked(url) == "fine"
        assert await checked(url, options={"stream": place.name}) == "fine"
        assert await checked(f"{url}/{place.name}.paid") == "fine"
        assert "no stream 'orders'" in await checked(url, options={"stream": "orders"})
        assert "no stream for 'orders'" in await checked(f"{url}/orders")
    with own.silent():
        assert "no answer" in await checked(url, timeout="300ms")
    own.stop()
    assert "cannot connect" in await checked(url)


async def test_a_missing_stream_is_told_and_holds_up_no_other_destination(
    own: Restartable, fresh_database: Callable[[str], str]
) -> None:
    shop = Shop(
        fresh_database("postgresql-18"),
        destinations=[
            Destination("broker", server.url_of(own), ordered=True, poll_interval="50ms"),
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
    assert all("no stream" in error and "'Order.order.paid'" in error for error in told)
    await orders(server.url_of(own))
    async with shop.outbox.relay():
        await until(lambda: shop.states() == {"delivered": 60}, "everything is delivered", 30)


def shop_to(url: str, database: str) -> Shop:
    destination = Destination(
        *("broker", f"{url}/{{aggregate_type}}.{{event_type}}"),
        ordered=True,
        timeout="5s",
        poll_interval="50ms",
        backoff={"base": "50ms", "cap": "500ms"},
    )
    return Shop(database, destinations=[destination], routes=[Route("order.*", to="broker")])


async def read_back(url: str, shop: Shop) -> None:
    """All there, once, per key in order, with their headers."""
    keys: dict[str, list[int]] = {}
    async with await nats.connect(url) as client:
        reader = await client.jetstream().subscribe("Order.>", ordered_consumer=True)
        for _ in range(EVENTS):
            message = await reader.next_msg(timeout=10)
            body = json.loads(message.data)
            assert message.headers["Nats-Msg-Id"] == message.headers["event-id"] == body["id"]
            assert message.headers["aggregate-id"] == body["aggregate_id"] == str(body["data"]["n"] % KEYS)
            assert message.subject == "Order.order.paid"
            keys.setdefault(body["aggregate_id"], []).append(body["data"]["n"])
        assert (await client.jetstream().stream_info("orders")).state.messages == EVENTS
    assert keys == {str(key): list(range(key, EVENTS, KEYS)) for key in range(KEYS)}
    assert shop.states() == {"delivered": EVENTS}


async def orders(url: str) -> None:
    async with await nats.connect(url) as client:
        await client.jetstream().add_stream(name="orders", subjects=["Order.>"])


@pytest.mark.slow
async def test_ten_thousand_events_of_five_hundred_keys_arrive_in_order(
    own: Restartable, fresh_database: Callable[[str], str]
) -> None:
    url = server.url_of(own)
    await orders(url)
    shop = shop_to(url, fresh_database("postgresql-18"))
    shop.emit(EVENTS, keys=KEYS)
    await shop.outbox.adrain()
    await read_back(url, shop)


@pytest.mark.slow
async def test_they_do_so_too_where_the_server_is_restarted_in_the_middle(
    own: Restartable, fresh_database: Callable[[str], str]
) -> None:
    url = server.url_of(own)
    await orders(url)
    shop = shop_to(url, fresh_database("postgresql-18"))
    shop.emit(EVENTS, keys=KEYS)
    async with shop.outbox.relay():
        await until(lambda: shop.states().get("delivered", 0) > EVENTS // 5, "a part was delivered")
        await asyncio.to_thread(own.stop)
        assert shop.states().get("delivered", 0) < EVENTS
        await until(lambda: shop.circuit("broker") == "open", "the circuit is open")
        await asyncio.to_thread(own.start)
        await until(lambda: shop.states() == {"delivered": EVENTS}, "everything is delivered", 60)
    await read_back(url, shop)
