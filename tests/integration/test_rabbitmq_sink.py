"""Deliveries as messages on a real RabbitMQ: what they are, what it refuses, and what it does not take."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import aiormq
import msgspec
import pytest
from aio_pika.abc import AbstractChannel

from relaybox.config import Destination
from relaybox.event import Delivery
from relaybox.outcome import Delivered, Reject, Unavailable, Unreachable
from relaybox.parts import open_sink
from relaybox.sink import Answer
from relaybox.sinks.rabbitmq import RabbitMqSink
from relaybox.sinks.rabbitmq_connection import Link
from relaybox.testing.sink_contract import make_delivery
from tests.integration.test_http_exchange import certificate
from tests.servers import rabbitmq

SECRET = "hush-hush"


class Desk:
    """A plain client: declares what a test needs, and reads what arrived."""

    def __init__(self, url: str, channel: AbstractChannel) -> None:
        self.url = url
        self.channel = channel
        self.exchange = f"events-{uuid4()}"

    def at(self, routing_key: str = "{event_type}", **options: Any) -> Destination:
        """A destination that publishes to this desk's exchange."""
        given = {"exchange": self.exchange, "routing_key": routing_key, **options.pop("options", {})}
        return Destination("shop", self.url, options=given, **options)

    async def declare(self, exchange: str | None = None) -> None:
        await self.channel.declare_exchange(exchange or self.exchange, "topic", auto_delete=True)

    async def bind(self, pattern: str = "#", exchange: str | None = None, **arguments: Any) -> str:
        """A queue for what matches the pattern."""
        queue = await self.channel.declare_queue(f"queue-{uuid4()}", exclusive=True, arguments=arguments)
        await queue.bind(exchange or self.exchange, pattern)
        return queue.name

    async def read(self, queue: str) -> list[Any]:
        """What lies in a queue, oldest first."""
        source = await self.channel.get_queue(queue)
        messages = []
        while message := await source.get(no_ack=True, fail=False):
            messages.append(message)
        return messages


@pytest.fixture
async def desk(rabbitmq_url: str) -> AsyncIterator[Desk]:
    async with await aio_pika.connect(rabbitmq_url) as connection:
        desk = Desk(rabbitmq_url, await connection.channel())
        await desk.declare()
        yield desk


async def send(destination: Destination, *deliveries: Delivery) -> list[Answer]:
    sink = open_sink(destination, {})
    try:
        async with asyncio.timeout(20):
            return list(await sink.send(deliveries))
    finally:
        await sink.close()


def delivery(event_type: str = "order.paid", **about: Any) -> Delivery:
    return msgspec.structs.replace(make_delivery(), event_type=event_type, **about)


def large(size: int) -> Delivery:
    return make_delivery(f'"{"x" * size}"')


async def test_a_message_says_what_event_it_is(desk: Desk) -> None:
    queue = await desk.bind()
    sent = make_delivery(headers='{"tenant": "acme", "priority": 7}')
    assert await send(desk.at(), sent) == [Delivered()]

    [message] = await desk.read(queue)
    assert (message.exchange, message.routing_key) == (desk.exchange, "order.paid")
    assert (message.message_id, message.type) == (str(sent.event_id), "order.paid")
    assert message.timestamp == sent.created_at.replace(microsecond=0)
    assert message.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert message.content_type == "application/json"
    assert message.headers == {
        "event-id": str(sent.event_id),
        "event-type": "order.paid",
        "aggregate-type": "Order",
        "aggregate-id": "1",
        "tenant": "acme",
        "priority": "7",
    }
    assert msgspec.json.decode(message.body)["data"] == {"total": 42}


async def test_exchange_and_routing_key_are_made_of_the_event(desk: Desk) -> None:
    await desk.declare(f"{desk.exchange}-acme")
    queue = await desk.bind("Order.#", f"{desk.exchange}-acme")
    options = {"exchange": desk.exchange + "-{tenant}"}
    destination = desk.at("{aggregate_type}.{aggregate_id}.{event_type}", options=options)
    assert await send(destination, make_delivery(headers='{"tenant": "acme"}')) == [Delivered()]
    [message] = await desk.read(queue)
    assert message.routing_key == "Order.1.order.paid"


async def test_without_an_exchange_the_routing_key_is_the_queue(desk: Desk) -> None:
    queue = await desk.bind()
    assert await send(Destination("shop", f"{desk.url}?routing_key={queue}"), large(300_000)) == [Delivered()]
    [message] = await desk.read(queue)
    assert len(message.body) > 300_000


async def test_a_message_for_no_queue_is_not_delivered_until_one_is_bound(desk: Desk) -> None:
    queue = await desk.bind("order.*")
    lost = delivery("stock.low")
    sink = open_sink(desk.at(), {})
    answers = await sink.send([lost, delivery(), lost, delivery()])

    assert [type(answer) for answer in answers] == [Unavailable, Delivered, Unavailable, Delivered]
    assert isinstance(answers[0], Unavailable)
    assert desk.exchange in answers[0].reason
    assert "'stock.low'" in answers[0].reason
    assert "no queue is bound" in answers[0].reason
    assert len(await desk.read(queue)) == 2
    late = await desk.bind("stock.*")
    assert await sink.send([lost]) == [Delivered()]
    assert [message.message_id for message in await desk.read(late)] == [str(lost.event_id)]
    await sink.close()


async def test_none_of_many_copies_of_an_event_is_taken_for_another(desk: Desk) -> None:
    copies = [make_delivery()] * 8
    answers = await send(desk.at(), *copies)
    assert [type(answer) for answer in answers] == [Unavailable] * 8


async def test_a_missing_exchange_holds_up_nobody_else(desk: Desk) -> None:
    queue = await desk.bind()
    good = [delivery(aggregate_type=desk.exchange) for _ in range(300)]
    bad = [delivery(aggregate_type="nowhere") for _ in range(5)]
    sink = open_sink(desk.at(options={"exchange": "{aggregate_type}"}), {})
    for _ in range(2):
        answers = await sink.send([*good[:80], *bad[:2], *good[80:200], *bad[2:], *good[200:]])
        refused = [answer for answer in answers if isinstance(answer, Unavailable)]
        assert len(refused) == 5
        assert {"no exchange 'nowhere'" in answer.reason for answer in refused} == {True}
        assert [answer for answer in answers if answer not in refused] == [Delivered()] * 300
    wanted = {str(one.event_id) for one in good}
    assert {message.message_id for message in await desk.read(queue)} == wanted
    await desk.declare("nowhere")
    await desk.bind(exchange="nowhere")
    assert await sink.send(bad) == [Delivered()] * 5
    await sink.close()


async def test_nothing_is_sent_on_a_channel_that_the_broker_has_closed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, close = asyncio.Event(), aiormq.Channel._on_close_frame

    async def close_slowly(channel: Any, frame: Any) -> None:
        try:
            await close(channel, frame)
        finally:
            heard.set()
            await asyncio.sleep(0.1)

    monkeypatch.setattr(aiormq.Channel, "_on_close_frame", close_slowly)
    await desk.bind()
    sink = RabbitMqSink(desk.at(options={"exchange": "{aggregate_type}"}))
    await sink.check()
    assert sink._link is not None
    connection = sink._link.connection
    refused = asyncio.ensure_future(sink.send([delivery(aggregate_type="not-there")]))
    await heard.wait()
    assert await sink.send([delivery(aggregate_type=desk.exchange)] * 5) == [Delivered()] * 5
    assert isinstance((await refused)[0], Unavailable)
    assert sink._link.connection is connection, "a message on a closed channel ends the connection"
    await sink.close()


async def test_a_confirmation_that_the_client_cancels_costs_no_attempt(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def give_up(*_: Any) -> None:
        raise asyncio.CancelledError

    await desk.bind()
    sink = RabbitMqSink(desk.at())
    with monkeypatch.context() as broken:
        broken.setattr(Link, "publish", give_up)
        [answer] = await sink.send([make_delivery()])
    assert isinstance(answer, Unavailable)
    assert await sink.send([make_delivery()]) == [Delivered()]
    await sink.close()


async def test_where_the_connection_breaks_what_is_told_delivered_is_there(desk: Desk) -> None:
    queue = await desk.bind()
    sink = RabbitMqSink(desk.at())
    batch = [make_delivery(key=str(n % 60)) for n in range(600)]
    sending = asyncio.ensure_future(sink.send(batch))
    while not sending.done():
        await asyncio.wait([sending], timeout=0.02)
        if sink._link is not None:
            sink._link.cut()

    there = {message.message_id for message in await desk.read(queue)}
    for one, answer in zip(batch, await sending, strict=True):
        assert answer != Delivered() or str(one.event_id) in there
        assert not isinstance(answer, Reject)
    assert await sink.send([make_delivery()]) == [Delivered()]
    await sink.close()


async def test_what_is_over_the_limit_is_rejected_and_nothing_else(desk: Desk) -> None:
    queue = await desk.bind()
    small = [make_delivery() for _ in range(30)]
    sink = open_sink(desk.at(), {})
    for _ in range(2):
        answers = await sink.send([*small[:15], large(rabbitmq.MAX_MESSAGE_SIZE + 1), *small[15:]])
        [rejected] = [answer for answer in answers if answer != Delivered()]
        assert isinstance(rejected, Reject), rejected
        assert str(rabbitmq.MAX_MESSAGE_SIZE) in rejected.reason
    assert await sink.send([large(1_000_000)]) == [Delivered()]
    assert len({message.message_id for message in await desk.read(queue)}) == 31
    await sink.close()


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (delivery("ä" * 128), "event type .* 256 bytes .* 255"),
        (delivery(aggregate_id="x" * 256), "routing key .* 255"),
        (make_delivery(headers=f'{{"{"n" * 129}": "x"}}'), "name of the header .* 129 bytes .* 128"),
        (
            make_delivery(headers=f'{{"long": "{"x" * 200_000}"}}'),
            "headers take 200[0-9]{3} bytes.*frame_max",
        ),
        (make_delivery(headers='{"CC": "x"}'), "'CC'"),
        (delivery(aggregate_type='a"b'), "AMQP cannot carry it: .*exchange"),
    ],
)
async def test_what_amqp_cannot_carry_is_rejected(desk: Desk, refused: Delivery, reason: str) -> None:
    await desk.bind()
    options = {"exchange": "{aggregate_type}"}
    sink = open_sink(desk.at("{aggregate_id}", options=options), {})
    answers = await sink.send([refused, delivery(aggregate_type=desk.exchange)])
    assert isinstance(answers[0], Reject), answers
    assert re.search(reason, answers[0].reason), answers[0].reason
    assert answers[1] == Delivered()
    await sink.close()


async def test_what_a_full_queue_refuses_is_not_delivered(desk: Desk) -> None:
    await desk.bind(**{"x-max-length": 1, "x-overflow": "reject-publish"})
    answers = [await send(desk.at(), make_delivery()) for _ in range(3)]
    assert answers[0] == [Delivered()]
    assert isinstance(answers[2][0], Unavailable)
    assert "nack" in answers[2][0].reason


def place(url: str, login: str, rest: str = "") -> str:
    return url.replace("guest:guest", login) + rest


@pytest.mark.parametrize(
    ("login", "rest", "kind", "reason"),
    [
        (f"guest:{SECRET}", "", Unavailable, "refuses user 'guest'.*ACCESS_REFUSED"),
        ("guest:guest", "/nowhere", Unavailable, "virtual host 'nowhere'"),
        ("reader:reader", "/other", Unavailable, "virtual host 'other'.*'reader'"),
        ("reader:reader", "?exchange=amq.topic", Unavailable, "access to exchange 'amq.topic'.*refused"),
    ],
)
async def test_who_may_not_is_told_so(
    rabbitmq_url: str, login: str, rest: str, kind: type[Answer], reason: str
) -> None:
    destination = Destination("shop", place(rabbitmq_url, login, rest))
    [answer] = await send(destination, make_delivery())
    assert type(answer) is kind, answer
    assert isinstance(answer, Unavailable)
    assert re.search(reason, answer.reason), answer.reason
    assert SECRET not in answer.reason


async def test_the_password_may_be_kept_elsewhere(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.bind()
    url = place(desk.url, "guest")
    monkeypatch.setenv("BROKER_PASSWORD", "guest")
    destination = Destination("shop", f"{url}?exchange={desk.exchange}", auth="env:BROKER_PASSWORD")
    assert await send(destination, make_delivery()) == [Delivered()]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("amqp://u:hush-hush@127.0.0.1:1", "cannot connect to 127.0.0.1:1: .*refused"),
        ("amqp://u:hush-hush@no.such.host.invalid", "DNS knows no address of no.such.host.invalid:5672"),
        ("amqps://u:hush-hush@{place}", "TLS with .* failed"),
    ],
)
async def test_where_nobody_is_nothing_is_reached(rabbitmq_url: str, url: str, reason: str) -> None:
    at = rabbitmq_url.rpartition("@")[2]
    [answer] = await send(Destination("shop", url.format(place=at), timeout=5), make_delivery())
    assert isinstance(answer, Unreachable), answer
    assert re.search(reason, answer.reason), answer.reason
    assert SECRET not in answer.reason


async def test_of_several_hosts_one_that_answers_is_enough(desk: Desk) -> None:
    await desk.bind()
    url = desk.url.replace("@", "@127.0.0.1:1,")
    destination = Destination("shop", f"{url}?exchange={desk.exchange}")
    assert await send(destination, make_delivery()) == [Delivered()]


async def test_a_server_of_another_kind_is_unavailable() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP ready, at your service\r\n" * 10)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    url = f"amqp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    [answer] = await send(Destination("shop", url, timeout=1), make_delivery())
    assert isinstance(answer, Unavailable), answer
    server.close()


async def test_a_server_that_says_nothing_is_unavailable_and_can_be_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://127.0.0.1:{silent.getsockname()[1]}"
        sink = open_sink(Destination("shop", url, timeout=0.3), {})
        answers = await sink.send([make_delivery(), make_delivery()])
        assert [type(answer) for answer in answers] == [Unavailable] * 2
        assert isinstance(answers[0], Unavailable)
        assert "no answer from 127.0.0.1" in answers[0].reason
        sending = asyncio.ensure_future(sink.send([make_delivery()]))
        await asyncio.sleep(0)
        began = time.monotonic()
        await sink.close()
        assert time.monotonic() - began < 2
        assert await sending != [Delivered()]


async def test_a_check_reaches_the_broker_and_the_exchange(desk: Desk) -> None:
    for destination, reason in [
        (desk.at(), None),
        (Destination("shop", desk.url), None),
        (desk.at(options={"exchange": "nowhere-at-all"}), "no exchange 'nowhere-at-all'"),
        (Destination("shop", "amqp://127.0.0.1:1"), "refused"),
    ]:
        sink = RabbitMqSink(destination)
        if reason is None:
            await sink.check()
        else:
            with pytest.raises(Unavailable, match=reason):
                await sink.check()
        await sink.close()


async def test_over_tls_the_broker_is_known_by_its_certificate(desk: Desk, tmp_path: Path) -> None:
    await desk.bind()
    trusted = certificate(tmp_path / "broker.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(trusted)
    port = int(desk.url.rpartition(":")[2])

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, downstream), pipe(upstream, writer))

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
    url = f"amqps://guest:guest@127.0.0.1:{server.sockets[0].getsockname()[1]}?exchange={desk.exchange}"
    assert await send(Destination("shop", f"{url}&ca={trusted}"), make_delivery()) == [Delivered()]
    [unknown] = await send(Destination("shop", url), make_delivery())
    assert isinstance(unknown, Unreachable), unknown
    assert "certificate verify failed" in unknown.reason
    server.close()


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while some := await reader.read(65_536):
            writer.write(some)
    writer.close()
