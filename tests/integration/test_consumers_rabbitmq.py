"""The consumer of RabbitMQ, and what is special about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import aio_pika
import pytest

from relaybox import Event, Reject, Retry
from relaybox.consumers import rabbitmq as module
from relaybox.consumers.rabbitmq import RabbitmqConsumer
from relaybox.envelope import JSON
from relaybox.errors import ConfigError
from relaybox.inboxes.sql import Inbox
from tests.conftest import available
from tests.integration.consuming import Bench, ConsumerContract, Line, Restarted, handling, running
from tests.servers import rabbitmq
from tests.waiting import await_for


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
        # What was given back may be on its way.
        await asyncio.sleep(0.2)
        return await self.count(self.place)

    async def count(self, queue: str) -> int:
        async with self.channel() as channel:
            found = await channel.get_queue(queue, ensure=True)
            return found.declaration_result.message_count or 0


@pytest.fixture
async def line(rabbitmq_url: str) -> AsyncIterator[RabbitmqLine]:
    made = await RabbitmqLine(rabbitmq_url).declare()
    yield made
    await made.delete()


class TestRabbitmqConsumer(ConsumerContract):
    @pytest.fixture
    def restarted(self) -> Iterator[Restarted]:
        with available("RabbitMQ", rabbitmq.broker()) as broker:
            line = asyncio.run(RabbitmqLine(broker.url).declare())
            yield Restarted(line, broker.stop, broker.start, broker.paused)

    async def test_what_is_rejected_is_dead_lettered(self, bench: Bench) -> None:
        consumer = handling(bench.make(prefetch=1))

        @consumer.on("order.lost")
        async def reject(event: Event) -> None:
            raise Reject("no such order")

        await bench.publish("order.lost")
        await bench.line.send({}, b"junk")
        sent = await bench.publish()
        async with running(consumer):
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

    async def test_wrong_credentials_are_told_without_the_password(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        line = bench.line
        line.url = line.url.replace("guest:guest", "guest:hunter2")
        async with running(handling(bench.make())):
            await await_for(lambda: "connecting again" in caplog.text)
        line.url = line.url.replace("hunter2", "guest")
        assert "hunter2" not in caplog.text
        assert "ACCESS_REFUSED" in caplog.text


async def test_a_broker_that_is_not_there_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    consumer = RabbitmqConsumer(
        "amqp://guest:hunter2@127.0.0.1:1/", "q", inbox=Inbox(), transaction=dict, backoff={"base": "10ms"}
    )
    with caplog.at_level(logging.WARNING, "relaybox.consumer"):
        async with running(consumer):
            await await_for(lambda: caplog.text.count("connecting again") > 2)
    assert "hunter2" not in caplog.text


def test_mistakes_are_told_when_it_is_made() -> None:
    given: dict[str, Any] = {"inbox": Inbox(), "transaction": dict}
    with pytest.raises(ConfigError, match="queue = ''"):
        RabbitmqConsumer("amqp://x", "", **given)
    with pytest.raises(ConfigError, match="url is empty"):
        RabbitmqConsumer("", "q", **given)
    with pytest.raises(ConfigError, match="prefetch = 0"):
        RabbitmqConsumer("amqp://x", "q", prefetch=0, **given)
