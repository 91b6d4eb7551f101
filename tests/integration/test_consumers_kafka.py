"""The consumer of Kafka, and what is special about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import confluent_kafka
import pytest

from relaybox import Event, Retry
from relaybox.consumers.kafka import KafkaConsumer
from relaybox.envelope import JSON
from relaybox.errors import ConfigError
from relaybox.inboxes.sql import Inbox
from tests.conftest import available
from tests.integration.consuming import Bench, ConsumerContract, Line, Restarted, handling, running
from tests.integration.kafka_log import SECONDS, make_topic
from tests.servers import kafka
from tests.waiting import await_for

QUICK = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}


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
        assert await asyncio.to_thread(self._producer.flush, SECONDS) == 0

    async def left(self) -> int:
        return await asyncio.to_thread(self._left)

    def _left(self) -> int:
        client = confluent_kafka.Consumer({"bootstrap.servers": self.servers, "group.id": self.group})
        try:
            topic = client.list_topics(self.place, SECONDS).topics[self.place]
            places = [confluent_kafka.TopicPartition(self.place, n) for n in topic.partitions]
            total = 0
            for found in client.committed(places, SECONDS):
                low, high = client.get_watermark_offsets(found, SECONDS)
                total += high - max(found.offset, low)
            return total
        finally:
            client.close()


@pytest.fixture
def line(kafka_url: str) -> KafkaLine:
    return KafkaLine(kafka_url)


class TestKafkaConsumer(ConsumerContract):
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
        others = []
        for n in (1, 2, 3):
            others.append(str(uuid4()))
            await bench.line.send({"event-id": others[-1], "event-type": "order.paid"}, b"{}", partition=n)
        async with running(consumer):
            await bench.effects(*others)
            await await_for(lambda: len(tried) > 2)
        assert not {stuck, behind} & set(dict(bench.place.effects()))
        await bench.line.leaves(2)

    @pytest.mark.slow
    async def test_a_long_wait_does_not_cost_the_membership(self, bench: Bench) -> None:
        consumer = handling(bench.make(settings={**QUICK, "max.poll.interval.ms": 6000}, prefetch=2))
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
                sent.append(str(uuid4()))
                await bench.line.send(
                    {"event-id": sent[-1], "event-type": "order.paid"}, b"{}", partition=n % 4
                )

        first = handling(bench.make())
        async with running(first):
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
        sent = [str(uuid4()) for _ in range(300)]
        for event_id in sent:
            bench.line._producer.produce(
                bench.line.place,
                b"{}",
                partition=0,
                headers={"event-id": event_id, "event-type": "order.paid"},
            )
        bench.line._producer.flush(30)
        async with running(handling(bench.make(prefetch=5))):
            await bench.effects(*sent)
        assert [found for found, _ in bench.place.effects() if found in set(sent)] == sent


async def test_a_broker_that_is_not_there_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    consumer = KafkaConsumer("127.0.0.1:1", "topic", group="g", inbox=Inbox(), transaction=dict)

    @consumer.on("*")
    def nothing(event: Event) -> None: ...

    with caplog.at_level(logging.WARNING, "relaybox.consumer"):
        async with running(consumer):
            await await_for(lambda: "Kafka" in caplog.text)
    assert 1 <= caplog.text.count("down") + caplog.text.count("refused") <= 6


def test_mistakes_are_told_when_it_is_made() -> None:
    given: dict[str, Any] = {"group": "g", "inbox": Inbox(), "transaction": dict}
    for wrong, message in [
        ({"settings": {"enable.auto.commit": True}}, "enable.auto.commit"),
        ({"settings": {"group.id": "x"}}, "group.id"),
        ({"group": ""}, "group = ''"),
        ({"prefetch": 0}, "prefetch = 0"),
        ({"backoff": {"bass": 1}}, "did you mean 'base'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            KafkaConsumer("127.0.0.1:1", "topic", **(given | wrong))
    with pytest.raises(ConfigError, match="topics"):
        KafkaConsumer("127.0.0.1:1", [], **given)
