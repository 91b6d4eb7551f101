"""A server of Redis that is down, breaks connections or says nothing, and what becomes of events."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from redis.asyncio import Redis

from relaybox import Destination, Route
from relaybox.event import Delivery
from relaybox.outcome import Delivered, Retry, Unavailable, Unreachable
from relaybox.sink import Answer, Sink
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration.redis_streams import place_on, send, sink_to
from tests.integration.shop import Shop, until
from tests.servers import redis as server
from tests.servers.restart import Restartable

EVENTS, KEYS = 10_000, 500


@pytest.fixture
def own() -> Iterator[Restartable]:
    """A server that a test may stop."""
    with available("Redis", server.broker()) as started:
        yield started


async def stuck(sink: Sink, deliveries: list[Delivery]) -> asyncio.Task[Sequence[Answer]]:
    """A send that is under way and gets no answer."""
    sending = asyncio.ensure_future(sink.send(deliveries))
    done, _ = await asyncio.wait([sending], timeout=0.3)
    assert not done
    return sending


async def test_it_may_be_down_at_the_start_and_go_away_again(own: Restartable) -> None:
    own.stop()
    async with sink_to(server.url_of(own)) as sink:
        [refused] = await sink.send([make_delivery()])
        assert isinstance(refused, Unreachable)
        assert f"cannot connect to 127.0.0.1:{own.port}" in refused.reason
        own.start()
        for _ in range(2):
            assert await sink.send([make_delivery() for _ in range(3)]) == [Delivered()] * 3
            own.stop()
            [gone] = await sink.send([make_delivery()])
            assert isinstance(gone, Unavailable)
            own.start()
        assert await sink.send([make_delivery()]) == [Delivered()]


async def test_a_connection_that_the_server_closed_while_it_lay_idle_is_no_failure(own: Restartable) -> None:
    async with sink_to(server.url_of(own)) as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        async with Redis.from_url(server.url_of(own)) as client:
            await client.client_kill_filter(_type="normal", skipme=True)
        assert await sink.send([make_delivery()]) == [Delivered()]


async def test_a_name_that_dns_does_not_know_is_unreachable() -> None:
    [answer] = await send("redis://nowhere.invalid/0", make_delivery())
    assert isinstance(answer, Unreachable)
    assert "nowhere.invalid" in answer.reason


async def test_a_server_that_speaks_something_else_is_unavailable(nats_url: str) -> None:
    [answer] = await send(nats_url.replace("nats:", "redis:"), make_delivery(), timeout="2s")
    assert isinstance(answer, Unavailable)


async def test_a_silent_server_is_unavailable_in_time_and_takes_events_when_it_is_back(
    own: Restartable,
) -> None:
    async with place_on(server.url_of(own)) as place, sink_to(place.url, timeout="500ms") as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        waiting = [make_delivery(key="a") for _ in range(3)]
        with own.silent():
            begun = time.monotonic()
            first = (await sink.send(waiting))[0]
            assert time.monotonic() - begun < 3
            assert isinstance(first, Unavailable)
            assert "no answer" in first.reason
        assert await sink.send(waiting) == [Delivered()] * 3
        ids = [entry["event-id"] for entry in await place.entries()]
    # What was sent to the silent server is there as well: the duplicate has the same event id.
    assert list(dict.fromkeys(ids))[1:] == [str(delivery.event_id) for delivery in waiting]


async def test_large_batches_to_a_silent_server_time_out_too_and_it_can_be_closed(own: Restartable) -> None:
    async with sink_to(server.url_of(own), timeout="500ms") as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        with own.silent():
            begun = time.monotonic()
            answers = await sink.send([make_delivery(data=b"x" * 500_000) for _ in range(40)])
            assert {type(answer) for answer in answers} == {Unavailable}
            await sink.close()
            assert time.monotonic() - begun < 5


async def test_a_send_to_a_silent_server_can_be_cancelled_and_the_next_has_its_own_answers(
    own: Restartable,
) -> None:
    async with sink_to(server.url_of(own), timeout="30s") as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        with own.silent():
            sending = await stuck(sink, [make_delivery(data=b"x" * 500_000) for _ in range(40)])
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(sending, 5)
        assert await sink.send([make_delivery()]) == [Delivered()]


async def test_a_connection_that_breaks_is_answered_at_once(own: Restartable) -> None:
    async with sink_to(server.url_of(own), timeout="30s") as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        with own.silent():
            sending = await stuck(sink, [make_delivery() for _ in range(5)])
            await asyncio.to_thread(own.kill)
        answers = await asyncio.wait_for(sending, 5)
        assert {type(answer) for answer in answers} == {Unavailable}
        own.start()


@asynccontextmanager
async def answering(*replies: bytes) -> AsyncIterator[str]:
    """The URL of a server that answers so to the commands that add, and then breaks off."""
    left = list(replies)

    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):
                for name in re.findall(rb"\*\d+\r\n\$\d+\r\n(\w+)\r\n", chunk):
                    if name == b"XADD" and not left:
                        writer.close()
                        break
                    writer.write(left.pop(0) if name == b"XADD" else b"*0\r\n")
        writer.close()
        ended.set()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as listening:
        yield f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}/0"
        await asyncio.wait_for(ended.wait(), 5)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"-LOADING Redis is loading the dataset in memory", Unavailable),
        (b"-MASTERDOWN Link with MASTER is down", Unavailable),
        (b"-CLUSTERDOWN The cluster is down", Unavailable),
        (b"-MOVED 3999 127.0.0.1:6381", Unavailable),
        (b"-MISCONF Redis is configured to save RDB snapshots", Unavailable),
        (b"-NOAUTH Authentication required.", Unavailable),
        (b"-ERR unknown command 'XADD'", Unavailable),
        (b"-ERR something else", Retry),
    ],
)
async def test_what_a_server_says_of_itself_is_no_events_fault(reply: bytes, kind: type) -> None:
    async with answering(reply + b"\r\n") as url:
        [answer] = await send(url, make_delivery())
    assert type(answer) is kind
    assert answer.reason


async def test_what_was_answered_before_the_connection_broke_counts() -> None:
    async with answering(b"$3\r\n1-1\r\n", b"-WRONGTYPE no\r\n", b"$3\r\n1-3\r\n") as url:
        answers = await send(url, *(make_delivery() for _ in range(5)))
    assert [type(answer) for answer in answers] == [
        Delivered,
        Unavailable,
        Delivered,
        Unavailable,
        Unavailable,
    ]


async def test_closing_answers_what_is_under_way(own: Restartable) -> None:
    async with sink_to(server.url_of(own), timeout="30s") as sink:
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
    assert await checked(url) == "fine"
    assert "refuses the credentials" in await checked(server.url_of(own, "shop:wr0ng"))
    with own.silent():
        assert "no answer" in await checked(url, timeout="300ms")
    own.stop()
    assert "cannot connect" in await checked(url)


async def test_a_wrong_password_is_told_and_holds_up_no_other_destination(
    own: Restartable, fresh_database: Callable[[str], str]
) -> None:
    url = server.url_of(own, "shop:s3cret")
    shop = Shop(
        fresh_database("postgresql-18"),
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
    assert all("refuses the credentials" in error and "s3cret" not in error for error in told)
    async with Redis.from_url(server.url_of(own)) as client:
        await client.acl_setuser(
            "shop", enabled=True, passwords=["+s3cret"], commands=["+@all"], keys=["*"], channels=["*"]
        )
    async with shop.outbox.relay():
        await until(lambda: shop.states() == {"delivered": 60}, "everything is delivered", 30)


def shop_to(url: str, database: str) -> Shop:
    destination = Destination(
        *("broker", url),
        ordered=True,
        timeout="5s",
        poll_interval="50ms",
        backoff={"base": "50ms", "cap": "500ms"},
    )
    return Shop(database, destinations=[destination], routes=[Route("order.*", to="broker")])


async def read_back(url: str, shop: Shop) -> int:
    """All there, per key in order, with their headers; how many are there twice."""
    keys: dict[str, dict[int, None]] = {}
    async with Redis.from_url(url, decode_responses=True) as client:
        entries = [fields for _, fields in await client.xrange("order-events")]
    for fields in entries:
        body = json.loads(fields["data"])
        assert fields["event-id"] == body["id"]
        assert fields["aggregate-id"] == body["aggregate_id"] == str(body["data"]["n"] % KEYS)
        # A dictionary keeps the place of the first.
        keys.setdefault(body["aggregate_id"], {})[body["data"]["n"]] = None
    assert {key: list(events) for key, events in keys.items()} == {
        str(key): list(range(key, EVENTS, KEYS)) for key in range(KEYS)
    }
    assert shop.states() == {"delivered": EVENTS}
    return len(entries) - EVENTS


@pytest.mark.slow
async def test_ten_thousand_events_of_five_hundred_keys_arrive_in_order(
    own: Restartable, fresh_database: Callable[[str], str]
) -> None:
    url = server.url_of(own)
    shop = shop_to(url, fresh_database("postgresql-18"))
    shop.emit(EVENTS, keys=KEYS)
    await shop.outbox.adrain()
    assert await read_back(url, shop) == 0


@pytest.mark.slow
async def test_they_do_so_too_where_the_server_is_restarted_in_the_middle(
    own: Restartable, fresh_database: Callable[[str], str]
) -> None:
    url = server.url_of(own)
    shop = shop_to(url, fresh_database("postgresql-18"))
    shop.emit(EVENTS, keys=KEYS)
    async with shop.outbox.relay():
        await until(lambda: shop.states().get("delivered", 0) > EVENTS // 5, "a part was delivered")
        await asyncio.to_thread(own.stop)
        assert shop.states().get("delivered", 0) < EVENTS
        await until(lambda: shop.circuit("broker") == "open", "the circuit is open")
        await asyncio.to_thread(own.start)
        await until(lambda: shop.states() == {"delivered": EVENTS}, "everything is delivered", 60)
    assert await read_back(url, shop) < EVENTS // 5
