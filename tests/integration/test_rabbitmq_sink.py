"""Deliveries as messages on a real RabbitMQ: what they are, what it refuses, and when it goes away."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import aio_pika
import aiormq
import msgspec
import pytest
from aio_pika.abc import AbstractChannel

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Unavailable, Unreachable
from relaybox.operate.admin import Admin
from relaybox.sinks.rabbitmq.connection import Link
from relaybox.sinks.sink import Answer
from relaybox.stores.open import open_store
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration.outages import Entry, Place, RelayContract, checked, event_ids, shop_to
from tests.integration.receivers import Receiver, listening
from tests.integration.sinking import altered, check_refused, deliver, send, sink_to
from tests.integration.test_http_exchange import certificate
from tests.servers import rabbitmq
from tests.waiting import PATIENCE, await_for

pytestmark = pytest.mark.full


class Client:
    """A plain client: declares what a test needs, and reads what arrived."""

    def __init__(self, url: str, channel: AbstractChannel) -> None:
        self.url = url
        self.channel = channel
        self.exchange = f"events-{uuid4()}"

    def at(self, routing_key: str = "{event_type}", exchange: str | None = None) -> Any:
        """Open a sink that publishes to this client's exchange."""
        return sink_to(self.url, options={"exchange": exchange or self.exchange, "routing_key": routing_key})

    async def send(self, *deliveries: Delivery) -> list[Answer]:
        async with self.at() as sink:
            return list(await sink.send(deliveries))

    async def declare(self, exchange: str | None = None) -> None:
        await self.channel.declare_exchange(exchange or self.exchange, "topic", auto_delete=True)

    async def bind(self, pattern: str = "#", exchange: str | None = None, **arguments: Any) -> str:
        """Bind a queue to what matches the pattern."""
        queue = await self.channel.declare_queue(f"queue-{uuid4()}", exclusive=True, arguments=arguments)
        await queue.bind(exchange or self.exchange, pattern)
        return queue.name


async def read(channel: Any, name: str) -> list[Any]:
    """Return what lies in a queue, oldest first."""
    messages: list[Any] = []

    async def take(message: Any) -> None:
        messages.append(message)

    queue = await channel.get_queue(name)
    count = queue.declaration_result.message_count
    tag = await queue.consume(take, no_ack=True)
    await await_for(lambda: len(messages) >= count, lambda: f"{len(messages)} of {count} messages")
    await queue.cancel(tag)
    return messages


@pytest.fixture
async def client(rabbitmq_url: str) -> AsyncIterator[Client]:
    async with await aio_pika.connect(rabbitmq_url) as connection:
        client = Client(rabbitmq_url, await connection.channel())
        await client.declare()
        yield client


def large(size: int) -> Delivery:
    return make_delivery(f'"{"x" * size}"')


async def test_a_message_says_what_event_it_is(client: Client) -> None:
    queue = await client.bind()
    sent = make_delivery(headers='{"tenant": "acme", "priority": 7}')
    assert await client.send(sent) == [Delivered()]
    [message] = await read(client.channel, queue)
    assert (message.exchange, message.routing_key) == (client.exchange, "order.paid")
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


async def test_exchange_and_routing_key_are_made_of_the_event(client: Client) -> None:
    await client.declare(f"{client.exchange}-acme")
    queue = await client.bind("Order.#", f"{client.exchange}-acme")
    async with client.at(
        "{aggregate_type}.{aggregate_id}.{event_type}", client.exchange + "-{tenant}"
    ) as sink:
        assert await sink.send([make_delivery(headers='{"tenant": "acme"}')]) == [Delivered()]
    [message] = await read(client.channel, queue)
    assert message.routing_key == "Order.1.order.paid"


async def test_without_an_exchange_the_routing_key_is_the_queue(client: Client) -> None:
    queue = await client.bind()
    assert await send(f"{client.url}?routing_key={queue}", large(300_000)) == [Delivered()]
    [message] = await read(client.channel, queue)
    assert len(message.body) > 300_000


async def test_a_message_for_no_queue_is_not_delivered_until_one_is_bound(client: Client) -> None:
    queue, lost = await client.bind("order.*"), altered(event_type="stock.low")
    async with client.at() as sink:
        answers = await sink.send([lost, make_delivery(), lost, make_delivery()])
        assert [type(answer) for answer in answers] == [Unavailable, Delivered, Unavailable, Delivered]
        check_refused(answers[0], Unavailable, client.exchange, "'stock.low'", "no queue is bound")
        assert len(await read(client.channel, queue)) == 2
        late = await client.bind("stock.*")
        assert await sink.send([lost]) == [Delivered()]
    assert [message.message_id for message in await read(client.channel, late)] == [str(lost.event_id)]


async def test_none_of_many_copies_of_an_event_is_taken_for_another(client: Client) -> None:
    copies = [make_delivery()] * 8
    answers = await client.send(*copies)
    assert [type(answer) for answer in answers] == [Unavailable] * 8


async def test_a_missing_exchange_holds_up_nobody_else(client: Client) -> None:
    queue = await client.bind()
    good = [altered(aggregate_type=client.exchange) for _ in range(300)]
    bad = [altered(aggregate_type="nowhere") for _ in range(5)]
    async with client.at(exchange="{aggregate_type}") as sink:
        for _ in range(2):
            answers = await sink.send([*good[:80], *bad[:2], *good[80:200], *bad[2:], *good[200:]])
            refused = [answer for answer in answers if isinstance(answer, Unavailable)]
            assert len(refused) == 5
            assert {"no exchange 'nowhere'" in answer.reason for answer in refused} == {True}
            assert [answer for answer in answers if answer not in refused] == [Delivered()] * 300
        wanted = {str(one.event_id) for one in good}
        assert {message.message_id for message in await read(client.channel, queue)} == wanted
        await client.declare("nowhere")
        await client.bind(exchange="nowhere")
        assert await sink.send(bad) == [Delivered()] * 5


async def test_nothing_is_sent_on_a_channel_that_the_broker_has_closed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, close = asyncio.Event(), aiormq.Channel._on_close_frame

    async def close_slowly(channel: Any, frame: Any) -> None:
        try:
            await close(channel, frame)
        finally:
            heard.set()
            await asyncio.sleep(0.1)

    monkeypatch.setattr(aiormq.Channel, "_on_close_frame", close_slowly)
    await client.bind()
    async with client.at(exchange="{aggregate_type}") as sink:
        await sink.check()
        link = sink._shared.current
        refused = asyncio.ensure_future(sink.send([altered(aggregate_type="not-there")]))
        await heard.wait()
        assert await sink.send([altered(aggregate_type=client.exchange)] * 5) == [Delivered()] * 5
        assert isinstance((await refused)[0], Unavailable)
        same = sink._shared.current.connection is link.connection
        assert same, "a message on a closed channel ends the connection"


async def test_a_confirmation_that_the_client_cancels_costs_no_attempt(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def give_up(*_: Any) -> None:
        raise asyncio.CancelledError

    await client.bind()
    async with client.at() as sink:
        with monkeypatch.context() as broken:
            broken.setattr(Link, "publish", give_up)
            [answer] = await sink.send([make_delivery()])
        assert isinstance(answer, Unavailable)
        assert await sink.send([make_delivery()]) == [Delivered()]


async def test_where_the_connection_breaks_events_reported_as_delivered_are_there(client: Client) -> None:
    queue = await client.bind()
    batch = [make_delivery(key=str(n % 60)) for n in range(600)]
    async with client.at() as sink:
        sending = asyncio.ensure_future(sink.send(batch))
        while not sending.done():
            await asyncio.wait([sending], timeout=0.02)
            if sink._shared.current is not None:
                sink._shared.current.cut()
        there = {message.message_id for message in await read(client.channel, queue)}
        for one, answer in zip(batch, await sending, strict=True):
            assert answer != Delivered() or str(one.event_id) in there
            assert not isinstance(answer, Reject)
        assert await sink.send([make_delivery()]) == [Delivered()]


async def test_what_is_over_the_limit_is_rejected_and_nothing_else(client: Client) -> None:
    queue = await client.bind()
    small = [make_delivery() for _ in range(30)]
    async with client.at() as sink:
        for _ in range(2):
            answers = await sink.send([*small[:15], large(rabbitmq.MAX_MESSAGE_SIZE + 1), *small[15:]])
            [rejected] = [answer for answer in answers if answer != Delivered()]
            check_refused(rejected, Reject, str(rabbitmq.MAX_MESSAGE_SIZE))
        assert await sink.send([large(1_000_000)]) == [Delivered()]
    assert len({message.message_id for message in await read(client.channel, queue)}) == 31


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (altered(event_type="ä" * 128), "event type .* 256 bytes .* 255"),
        (altered(aggregate_id="x" * 256), "routing key .* 255"),
        (make_delivery(headers=f'{{"{"n" * 129}": "x"}}'), "name of the header .* 129 bytes .* 128"),
        (make_delivery(headers=f'{{"long": "{"x" * 200_000}"}}'), "take 200[0-9]{3} bytes.*frame_max"),
        (make_delivery(headers='{"CC": "x"}'), "'CC'"),
        (altered(aggregate_type='a"b'), "AMQP cannot carry it: .*exchange"),
    ],
)
async def test_what_amqp_cannot_carry_is_rejected(client: Client, refused: Delivery, reason: str) -> None:
    await client.bind()
    async with client.at("{aggregate_id}", "{aggregate_type}") as sink:
        answers = await sink.send([refused, altered(aggregate_type=client.exchange)])
    check_refused(answers[0], Reject)
    assert re.search(reason, answers[0].reason), answers[0].reason
    assert answers[1] == Delivered()


async def test_what_a_full_queue_refuses_is_not_delivered(client: Client) -> None:
    await client.bind(**{"x-max-length": 1, "x-overflow": "reject-publish"})
    answers = [await client.send(make_delivery()) for _ in range(3)]
    assert answers[0] == [Delivered()]
    check_refused(answers[2][0], Unavailable, "nack")


@pytest.mark.parametrize(
    ("url", "kind", "reason"),
    [
        ("amqp://guest:hush-hush@{at}", Unavailable, "refuses user 'guest'.*ACCESS_REFUSED"),
        ("amqp://guest:guest@{at}/nowhere", Unavailable, "virtual host 'nowhere'"),
        ("amqp://reader:reader@{at}/other", Unavailable, "virtual host 'other'.*'reader'"),
        ("amqp://reader:reader@{at}?exchange=amq.topic", Unavailable, "exchange 'amq.topic'.*refused"),
        ("amqp://u:hush-hush@127.0.0.1:1", Unreachable, "cannot connect to 127.0.0.1:1: .*refused"),
        ("amqp://u:hush-hush@no.such.host.invalid", Unreachable, "DNS knows no .* no.such.host.invalid:5672"),
        ("amqps://u:hush-hush@{at}", Unreachable, "TLS with .* failed"),
    ],
)
async def test_what_is_not_let_in_or_finds_nobody_says_so(
    rabbitmq_url: str, url: str, kind: type, reason: str
) -> None:
    [answer] = await send(url.format(at=rabbitmq_url.rpartition("@")[2]), make_delivery())
    assert type(answer) is kind, answer
    assert re.search(reason, answer.reason), answer.reason
    assert "hush-hush" not in answer.reason


async def test_the_password_may_be_kept_elsewhere(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    await client.bind()
    monkeypatch.setenv("BROKER_PASSWORD", "guest")
    url = f"{client.url.replace('guest:guest', 'guest')}?exchange={client.exchange}"
    assert await send(url, make_delivery(), auth="env:BROKER_PASSWORD") == [Delivered()]


async def test_of_several_hosts_one_that_answers_is_enough(client: Client) -> None:
    await client.bind()
    url = client.url.replace("@", "@127.0.0.1:1,")
    assert await send(f"{url}?exchange={client.exchange}", make_delivery()) == [Delivered()]


async def test_a_server_of_another_kind_is_unavailable() -> None:
    async def greet(_: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP ready, at your service\r\n" * 10)
        await reader.read()

    async with listening(greet) as receiver:
        [answer] = await send(f"amqp://127.0.0.1:{receiver.port}", make_delivery(), timeout=1)
    assert isinstance(answer, Unavailable), answer


async def test_a_server_that_says_nothing_is_unavailable_and_can_be_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with sink_to(f"amqp://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3) as sink:
            answers = await sink.send([make_delivery(), make_delivery()])
            assert [type(answer) for answer in answers] == [Unavailable] * 2
            check_refused(answers[0], Unavailable, "no answer from 127.0.0.1")
            sending = asyncio.ensure_future(sink.send([make_delivery()]))
            await asyncio.sleep(0)
            await asyncio.wait_for(sink.close(), PATIENCE)
            assert await sending != [Delivered()]


async def test_a_check_reaches_the_broker_and_the_exchange(client: Client) -> None:
    assert await checked(f"{client.url}?exchange={client.exchange}") == "fine"
    assert await checked(client.url) == "fine"
    assert "no exchange 'nowhere-at-all'" in await checked(f"{client.url}?exchange=nowhere-at-all")
    assert "refused" in await checked("amqp://127.0.0.1:1")


async def test_over_tls_the_broker_is_known_by_its_certificate(client: Client, tmp_path: Path) -> None:
    await client.bind()
    trusted = certificate(tmp_path / "broker.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(trusted)
    port = int(client.url.rpartition(":")[2])

    async def pass_on(_: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, downstream), pipe(upstream, writer))

    async with listening(pass_on, tls=context) as receiver:
        url = f"amqps://guest:guest@127.0.0.1:{receiver.port}?exchange={client.exchange}"
        assert await send(f"{url}&ca={trusted}", make_delivery()) == [Delivered()]
        [unknown] = await send(url, make_delivery())
    check_refused(unknown, Unreachable, "certificate verify failed")


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while some := await reader.read(65_536):
            writer.write(some)
    writer.close()


# --- a broker that goes away ---


class RabbitMqPlace(Place):
    """A queue that outlives the broker."""

    duplicates = 100

    def __init__(self, server: rabbitmq.Broker) -> None:
        super().__init__(server)
        self.queue = f"queue-{uuid4()}"

    @property
    def url(self) -> str:
        return f"{self.server.url}?routing_key={self.queue}"

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[Any]:
        async with await aio_pika.connect(self.server.url) as connection:
            yield await connection.channel()

    async def declare(self) -> None:
        async with self.channel() as channel:
            await channel.declare_queue(self.queue, durable=True)

    async def entries(self) -> list[Entry]:
        async with self.channel() as channel:
            messages = await read(channel, self.queue)
        for message in messages:
            assert message.headers["event-id"] == message.message_id
        return [(message.headers, message.body) for message in messages]


@pytest.fixture(scope="module")
def broker() -> Iterator[rabbitmq.Broker]:
    """Run a server that a test may stop or fill."""
    with available("RabbitMQ", rabbitmq.broker()) as broker:
        yield broker


@pytest.fixture
async def place(broker: rabbitmq.Broker) -> RabbitMqPlace:
    made = RabbitMqPlace(broker)
    await made.declare()
    return made


class TestRabbitMqOutages(RelayContract):
    async def test_a_queue_that_is_deleted_loses_nothing_that_comes_after(
        self, place: RabbitMqPlace, database: str
    ) -> None:
        shop = shop_to(place.url, database)
        shop.emit(100, keys=10)
        async with shop.outbox.relay():
            await await_for(lambda: shop.states() == {"delivered": 100}, "the first are delivered")
            async with place.channel() as channel:
                await channel.queue_delete(place.queue)
            shop.emit(100, keys=10, first=100)
            # The circuit opens before the error is written.
            await await_for(
                lambda: any("no queue is bound" in (error or "") for _, _, error in shop.rows()), "the reason"
            )
            await await_for(lambda: shop.circuit("broker") == "open", "the circuit opens")
            assert shop.states() == {"delivered": 100, "pending": 100}
            await place.declare()
            await await_for(lambda: shop.states() == {"delivered": 200}, "the rest is delivered")
        found = [headers["event-id"] for headers, _ in await place.entries()]
        ids = event_ids(shop)
        for key in range(10):
            of_key = ids[100 + key :: 10]
            assert list(dict.fromkeys(id_ for id_ in found if id_ in of_key)) == of_key
        assert set(found) == set(ids[100:])

    async def test_what_no_queue_is_bound_for_says_why_and_is_never_delivered(
        self, place: RabbitMqPlace, database: str
    ) -> None:
        place.queue = "nobody-listens"
        shop = shop_to(place.url, database)
        shop.emit(3)
        await shop.outbox.adrain()
        assert shop.states() == {"pending": 3}
        store = open_store(database, shop.outbox.tables)
        admin = Admin(SqlLedger(store), shop.outbox.settings.destinations, "tester")
        [reason] = await admin.why(UUID(event_ids(shop)[0]))
        assert "no queue is bound" in reason.text
        assert "'nobody-listens'" in reason.text
        await store.close()

    async def test_a_broker_that_was_away_is_used_again(self, place: RabbitMqPlace) -> None:
        async with sink_to(place.url) as sink:
            assert await sink.send([make_delivery()]) == [Delivered()]
            await asyncio.to_thread(place.server.stop)
            try:
                answers = await sink.send([make_delivery() for _ in range(60)])
                assert [type(answer) for answer in answers] == [Unreachable] * 60
            finally:
                await asyncio.to_thread(place.server.start)
            assert await sink.send([make_delivery() for _ in range(60)]) == [Delivered()] * 60

    async def test_a_broker_that_hangs_is_unavailable_and_used_again(
        self, place: RabbitMqPlace, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with sink_to(place.url, timeout=0.5) as sink:
            await deliver(sink)
            with place.server.paused():
                for _ in range(2):
                    answers = await sink.send([make_delivery() for _ in range(60)])
                    assert [type(answer) for answer in answers] == [Unavailable] * 60
                sending = asyncio.ensure_future(sink.send([make_delivery()]))
                await asyncio.sleep(0)
                await asyncio.wait_for(sink.close(), PATIENCE)
                assert await sending != [Delivered()]
            await deliver(sink)
        assert not [record for record in caplog.records if record.name.startswith("aiormq")]

    async def test_a_broker_short_of_memory_says_so_and_takes_it_later(self, place: RabbitMqPlace) -> None:
        async def low() -> bool:
            return "low on memory" in str((await sink.send([make_delivery()]))[0])

        async with sink_to(place.url, timeout=1) as sink:
            await deliver(sink)
            await asyncio.to_thread(place.server.control, "set_vm_memory_high_watermark", "absolute", "1")
            try:
                await await_for(low, "low on memory")
                check_refused((await sink.send([make_delivery()]))[0], Unavailable, "low on memory")
            finally:
                await asyncio.to_thread(
                    place.server.control, "set_vm_memory_high_watermark", "absolute", "512MB"
                )
            await deliver(sink)
