"""The consumers of Kafka, NATS JetStream and RabbitMQ, and what is special about each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from uuid import uuid4

import aio_pika
import confluent_kafka
import pytest
from nats.js.api import ConsumerConfig

from relaybox import Event, Reject, Retry
from relaybox.errors import ConfigError
from relaybox.receive.consumers import rabbitmq as module
from relaybox.receive.consumers.kafka import KafkaConsumer
from relaybox.receive.consumers.loop import Loop
from relaybox.receive.consumers.nats import NatsConsumer
from relaybox.receive.consumers.rabbitmq import RabbitmqConsumer
from relaybox.receive.inbox import Inbox
from relaybox.wire.envelope import JSON
from tests.conftest import available
from tests.integration.consumed import insert
from tests.integration.consuming import SETTINGS, Bench, ConsumerContract, Line, Restarted, handling, running
from tests.integration.jetstream import connect, jetstream
from tests.integration.kafka_log import make_topic
from tests.servers import kafka, rabbitmq
from tests.servers import nats as server
from tests.waiting import PATIENCE, await_for

GIVEN: dict[str, Any] = {"inbox": Inbox(), "transaction": dict}
SOON: dict[str, Any] = {"backoff": {"base": "10ms"}}


def rejecting(consumer: Loop) -> Loop:
    """Add a handler that rejects ``order.lost``."""

    @consumer.on("order.lost")
    async def reject(event: Event) -> None:
        raise Reject("no such order")

    return consumer


class KafkaLine(Line):
    """A topic of its own."""

    kind = "kafka"

    def __init__(self, url: str, partitions: int = 4) -> None:
        self.url = url
        self.servers = url.removeprefix("kafka://")
        self.place = make_topic(self.servers, partitions=partitions)
        self.sink = f"{url}/{self.place}"
        self.group = f"books-{self.place}"
        self._producer = confluent_kafka.Producer({"bootstrap.servers": self.servers, "log_level": 0})

    async def send(
        self, headers: dict[str, str], body: bytes | None, content_type: str = JSON, partition: int = 0
    ) -> None:
        self._producer.produce(
            self.place, body, partition=partition, headers={"content-type": content_type, **headers}
        )
        assert await asyncio.to_thread(self._producer.flush, PATIENCE) == 0

    async def send_paid(self, partition: int = 0) -> str:
        event_id = str(uuid4())
        await self.send({"event-id": event_id, "event-type": "order.paid"}, b"{}", partition=partition)
        return event_id

    async def left(self) -> int:
        return await asyncio.to_thread(self._left)

    def _left(self) -> int:
        client = confluent_kafka.Consumer({"bootstrap.servers": self.servers, "group.id": self.group})
        try:
            topic = client.list_topics(self.place, PATIENCE).topics[self.place]
            places = [confluent_kafka.TopicPartition(self.place, n) for n in topic.partitions]
            total = 0
            for found in client.committed(places, PATIENCE):
                low, high = client.get_watermark_offsets(found, PATIENCE)
                total += high - max(found.offset, low)
            return total
        finally:
            client.close()


class TestKafkaConsumer(ConsumerContract):
    @pytest.fixture
    def line(self, kafka_url: str) -> KafkaLine:
        return KafkaLine(kafka_url)

    @pytest.fixture
    def restarted(self) -> Iterator[Restarted]:
        with available("Kafka", kafka.broker()) as broker:

            @contextmanager
            def silent() -> Iterator[None]:
                broker.pause()
                try:
                    yield
                finally:
                    broker.resume()

            yield Restarted(KafkaLine(broker.url), broker.stop, broker.start, silent)

    async def test_a_partition_that_waits_holds_up_no_other(self, bench: Bench) -> None:
        consumer = handling(bench.make())
        tried: list[int] = []

        @consumer.on("order.stuck")
        async def fail(event: Event) -> None:
            tried.append(event.attempt)
            raise Retry("not yet")

        stuck = await bench.publish("order.stuck")
        behind = await bench.publish()
        others = [await bench.line.send_paid(n) for n in (1, 2, 3)]
        async with running(consumer):
            await bench.effects(*others)
            await await_for(lambda: len(tried) > 2)
        assert not {stuck, behind} & set(dict(bench.place.effects()))
        await bench.line.leaves(2)

    @pytest.mark.full
    async def test_a_long_wait_does_not_cost_the_membership(self, bench: Bench) -> None:
        consumer = handling(bench.make(settings={**SETTINGS, "max.poll.interval.ms": 6000}, prefetch=2))
        tried: list[int] = []

        @consumer.on("order.slow")
        async def slow(event: Event) -> None:
            tried.append(event.attempt)
            if event.attempt == 1:
                await asyncio.sleep(8)
                raise Retry("once more", after=0.1)

        await bench.publish("order.slow")
        sent = [await bench.publish() for _ in range(10)]
        async with running(consumer):
            await bench.effects(*sent)
        assert tried == [1, 2]
        await bench.line.leaves(0)

    async def test_what_is_refused_goes_to_the_dead_letters(self, bench: Bench) -> None:
        dead: list[tuple[bytes | None, str]] = []

        async def bury(message: Any, reason: str) -> None:
            dead.append((message.value(), reason))
            if len(dead) == 1:
                raise OSError("no grave")

        await bench.line.send({}, b"junk")
        await bench.line.send({"event-id": str(uuid4())}, None)
        sent = await bench.publish()
        async with running(handling(bench.make(dead_letter=bury))):
            await bench.effects(sent)
        assert [value for value, _ in dead] == [b"junk", b"junk", None]
        assert "no id" in dead[0][1]
        await bench.line.leaves(0)

    async def test_two_consumers_share_and_hand_over(self, bench: Bench) -> None:
        sent: list[str] = []

        async def send(count: int) -> None:
            for n in range(count):
                sent.append(await bench.line.send_paid(n % 4))

        async with running(handling(bench.make())):
            await send(20)
            async with running(handling(bench.make())):
                await send(40)
                await bench.effects(*sent)
            await send(20)
            await bench.effects(*sent)
        found = [event_id for event_id, _ in bench.place.effects() if event_id in set(sent)]
        assert sorted(found) == sorted(sent)
        await bench.line.leaves(0)

    async def test_more_than_it_prefetches_comes_all_the_same(self, bench: Bench) -> None:
        sent = await asyncio.gather(*(bench.line.send_paid() for _ in range(300)))
        async with running(handling(bench.make(prefetch=5))):
            await bench.effects(*sent)
        assert [found for found, _ in bench.place.effects() if found in set(sent)] == list(sent)


class NatsLine(Line):
    """A stream of its own."""

    kind = "nats"

    def __init__(self, url: str) -> None:
        self.url = url
        self.place = f"s{uuid4().hex}"
        self.sink = f"{url}/{self.place}.{{event_type}}"

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Any]:
        async with await connect(self.url) as client:
            yield jetstream(client)

    async def declare(self) -> NatsLine:
        async with self.stream() as stream:
            await stream.add_stream(name=self.place, subjects=[f"{self.place}.>"])
        # So that what a dead consumer had comes again soon.
        await self.wait_for_acks(2)
        return self

    async def wait_for_acks(self, seconds: float) -> None:
        async with self.stream() as stream:
            await stream.add_consumer(self.place, ConsumerConfig(durable_name="books", ack_wait=seconds))

    async def send(self, headers: dict[str, str], body: bytes, content_type: str = JSON) -> None:
        subject = f"{self.place}.{headers.get('event-type', 'none')}"
        async with self.stream() as stream:
            await stream.publish(subject, body, headers={"content-type": content_type, **headers})

    async def left(self) -> int:
        async with self.stream() as stream:
            info = await stream.consumer_info(self.place, "books")
        return (info.num_pending or 0) + (info.num_ack_pending or 0)


class TestNatsConsumer(ConsumerContract):
    @pytest.fixture
    async def line(self, nats_url: str) -> AsyncIterator[NatsLine]:
        made = await NatsLine(nats_url).declare()
        yield made
        async with made.stream() as stream:
            await stream.delete_stream(made.place)

    @pytest.fixture
    def restarted(self) -> Iterator[Restarted]:
        with available("NATS", server.broker()) as broker:
            line = asyncio.run(NatsLine(server.url_of(broker)).declare())
            yield Restarted(line, broker.stop, broker.start, broker.silent)

    async def test_a_slow_handler_keeps_its_message(self, bench: Bench) -> None:
        # Between two signs of life the machine may be busy for more than two seconds.
        await bench.line.wait_for_acks(4)
        consumer = bench.make()
        called: list[int] = []

        @consumer.on("order.*")
        async def slow(event: Event, connection: Any) -> None:
            called.append(event.attempt)
            await asyncio.sleep(5)
            await connection.execute(insert(event))

        sent = await bench.publish()
        async with running(consumer):
            await bench.effects(sent)
        assert called == [1]
        await bench.line.leaves(0)

    async def test_what_is_rejected_is_terminated(self, bench: Bench) -> None:
        subject = f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{bench.line.place}.books"
        async with await connect(bench.line.url) as client:
            advisories = await client.subscribe(subject)
            await client.flush()
            await bench.publish("order.lost")
            async with running(rejecting(bench.make())):
                advisory = await advisories.next_msg(PATIENCE)
        assert b"terminated" in advisory.data
        await bench.line.leaves(0)

    async def test_a_consumer_is_made_where_there_is_none(self, bench: Bench) -> None:
        async with bench.line.stream() as stream:
            await stream.delete_consumer(bench.line.place, "books")
            first = await bench.publish()
            async with running(handling(bench.make())):
                await bench.effects(first)
                # In the middle, too: the loop finds it gone.
                await stream.delete_consumer(bench.line.place, "books")
                await bench.effects(await bench.publish())
        assert bench.place.count(first) == 1

    async def test_a_missing_stream_is_waited_for(
        self, nats_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        consumer = NatsConsumer(
            nats_url, "nowhere.>", durable="d", inbox=Inbox(), transaction=dict, backoff={"base": "10ms"}
        )
        async with running(consumer):
            await await_for(lambda: caplog.text.count("connecting again") > 1)
        assert "NotFound" in caplog.text


class RabbitmqLine(Line):
    """A queue of its own, with a dead-letter queue."""

    kind = "rabbitmq"

    def __init__(self, url: str) -> None:
        self.url = url
        self.place = f"q{uuid4().hex}"
        self.dead = f"{self.place}.dead"
        # The default exchange leads to the queue of the routing key's name.
        self.sink = f"{url}/?routing_key={self.place}"

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[Any]:
        async with await aio_pika.connect(self.url) as connection:
            yield await connection.channel()

    async def declare(self) -> RabbitmqLine:
        async with self.channel() as channel:
            dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": self.dead}
            await channel.declare_queue(self.dead, durable=True)
            await channel.declare_queue(self.place, durable=True, arguments=dead)
        return self

    async def delete(self) -> None:
        async with self.channel() as channel:
            await channel.queue_delete(self.place)

    async def send(self, headers: dict[str, str], body: bytes, content_type: str = JSON) -> None:
        about = {"content_type": content_type, "delivery_mode": aio_pika.DeliveryMode.PERSISTENT}
        async with self.channel() as channel:
            message = aio_pika.Message(body, headers=dict(headers), **about)
            await channel.default_exchange.publish(message, self.place)

    async def left(self) -> int:
        return await self.count(self.place)

    async def count(self, queue: str) -> int:
        async with self.channel() as channel:
            found = await channel.get_queue(queue, ensure=True)
            return found.declaration_result.message_count or 0


class TestRabbitmqConsumer(ConsumerContract):
    @pytest.fixture
    async def line(self, rabbitmq_url: str) -> AsyncIterator[RabbitmqLine]:
        made = await RabbitmqLine(rabbitmq_url).declare()
        yield made
        await made.delete()

    @pytest.fixture
    def restarted(self) -> Iterator[Restarted]:
        with available("RabbitMQ", rabbitmq.broker()) as broker:
            line = asyncio.run(RabbitmqLine(broker.url).declare())
            yield Restarted(line, broker.stop, broker.start, broker.paused)

    async def test_what_is_rejected_is_dead_lettered(self, bench: Bench) -> None:
        await bench.publish("order.lost")
        await bench.line.send({}, b"junk")
        sent = await bench.publish()
        async with running(rejecting(handling(bench.make(prefetch=1)))):
            await bench.effects(sent)

        async def buried() -> bool:
            return await bench.line.count(bench.line.dead) == 2

        await await_for(buried, "two dead letters")

    async def test_what_was_held_too_long_is_given_back(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "HOLD_SECONDS", 0.2)
        consumer = bench.make()
        attempts: list[int] = []

        @consumer.on("order.*")
        async def fail(event: Event) -> None:
            attempts.append(event.attempt)
            raise Retry("not yet", after=3600)

        await bench.publish()
        async with running(consumer):
            await await_for(lambda: attempts.count(1) == 3)
        assert set(attempts) == {1}
        await bench.line.leaves(1)

    async def test_a_queue_that_is_deleted_is_waited_for(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = await bench.publish()
        async with running(handling(bench.make())):
            await bench.effects(first)
            await bench.line.delete()
            await await_for(lambda: bench.line.place in caplog.text)
            await bench.line.declare()
            second = await bench.publish()
            await bench.effects(second)
        await bench.line.leaves(0)

    async def test_wrong_credentials_are_reported_without_the_password(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        line = bench.line
        line.url = line.url.replace("guest:guest", "guest:hunter2")
        async with running(handling(bench.make())):
            await await_for(lambda: "connecting again" in caplog.text)
        line.url = line.url.replace("hunter2", "guest")
        assert "hunter2" not in caplog.text
        assert "ACCESS_REFUSED" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: NatsConsumer("nats://user:hunter2@127.0.0.1:1", "s.>", durable="d", **GIVEN, **SOON),
        lambda: RabbitmqConsumer("amqp://guest:hunter2@127.0.0.1:1/", "q", **GIVEN, **SOON),
    ],
    ids=["nats", "rabbitmq"],
)
async def test_a_broker_that_is_not_there_is_waited_for(
    make: Callable[[], Loop], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "relaybox.consumer"):
        async with running(make()):
            await await_for(lambda: caplog.text.count("connecting again") > 2)
    assert "hunter2" not in caplog.text


async def test_a_broker_of_kafka_that_is_not_there_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    consumer = KafkaConsumer("127.0.0.1:1", "topic", group="g", **GIVEN)

    @consumer.on("*")
    def nothing(event: Event) -> None: ...

    with caplog.at_level(logging.WARNING, "relaybox.consumer"):
        async with running(consumer):
            await await_for(lambda: "Kafka" in caplog.text)
    assert 1 <= caplog.text.count("down") + caplog.text.count("refused") <= 6


async def test_a_stop_before_the_start_is_a_stop() -> None:
    consumer = NatsConsumer("nats://127.0.0.1:1", "s.>", durable="d", **GIVEN)
    for _ in range(2):
        running = asyncio.create_task(consumer.run())
        consumer.stop()
        await asyncio.wait_for(running, PATIENCE)


@pytest.mark.parametrize(
    ("kind", "place", "options", "message"),
    [
        (KafkaConsumer, ("x:1", "topic"), {"settings": {"enable.auto.commit": True}}, "enable.auto.commit"),
        (KafkaConsumer, ("x:1", "topic"), {"settings": {"group.id": "x"}}, "group.id"),
        (KafkaConsumer, ("x:1", "topic"), {"group": ""}, "group = ''"),
        (KafkaConsumer, ("x:1", "topic"), {"prefetch": 0}, "prefetch = 0"),
        (KafkaConsumer, ("x:1", "topic"), {"backoff": {"bass": 1}}, "did you mean 'base'"),
        (KafkaConsumer, ("x:1", []), {}, "topics"),
        (NatsConsumer, ("nats://x", "s"), {"durable": ""}, "durable = ''"),
        (NatsConsumer, ("env:NO_SUCH_URL", "s"), {}, "set the variable NO_SUCH_URL"),
        (NatsConsumer, ("nats://x", ""), {}, "subject = ''"),
        (RabbitmqConsumer, ("amqp://x", ""), {}, "queue = ''"),
        (RabbitmqConsumer, ("", "q"), {}, "url is empty"),
        (RabbitmqConsumer, ("amqp://x", "q"), {"prefetch": 0}, "prefetch = 0"),
    ],
)
def test_mistakes_are_reported_when_a_consumer_is_made(
    kind: Any, place: Any, options: Any, message: str
) -> None:
    needed = {KafkaConsumer: {"group": "g"}, NatsConsumer: {"durable": "d"}}.get(kind, {})
    with pytest.raises(ConfigError, match=message):
        kind(*place, **(GIVEN | needed | options))
