"""The consumer of RabbitMQ, and what is special about it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import aio_pika
import pytest

from relaybox import Event, Reject, Retry
from relaybox.consumers import rabbitmq as module
from relaybox.consumers.loop import Loop
from relaybox.consumers.rabbitmq import RabbitmqConsumer
from relaybox.envelope import JSON
from relaybox.errors import ConfigError
from relaybox.inboxes.sql import Inbox
from tests.conftest import available
from tests.integration.consumed import Ground
from tests.integration.consuming import ConsumerContract, Line, Restarted, handling, publish, running, until
from tests.integration.mortal_consumer import consumer as make_consumer
from tests.servers import rabbitmq


class RabbitmqLine(Line):
    """A queue of its own, with a dead-letter queue."""

    kind = "rabbitmq"

    def __init__(self, url: str) -> None:
        self.url = url
        self.place = f"q{uuid4().hex}"
        self.dead = f"{self.place}.dead"
        # The default exchange leads to the queue of the routing key's name.
        self.sink = f"{url}/?routing_key={self.place}"

    async def declare(self) -> RabbitmqLine:
        connection = await aio_pika.connect(self.url)
        async with connection:
            channel = await connection.channel()
            dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": self.dead}
            await channel.declare_queue(self.dead, durable=True)
            await channel.declare_queue(self.place, durable=True, arguments=dead)
        return self

    async def delete(self) -> None:
        connection = await aio_pika.connect(self.url)
        async with connection:
            channel = await connection.channel()
            await channel.queue_delete(self.place)

    async def send(self, headers: dict[str, str], body: bytes, content_type: str = JSON) -> None:
        connection = await aio_pika.connect(self.url)
        async with connection:
            channel = await connection.channel()
            persistent = aio_pika.DeliveryMode.PERSISTENT
            message = aio_pika.Message(
                body, headers=dict(headers), content_type=content_type, delivery_mode=persistent
            )
            await channel.default_exchange.publish(message, self.place)

    def consumer(self, **options: Any) -> Loop:
        return make_consumer(self.kind, self.url, self.place, **({"consumer": "books"} | options))

    async def left(self) -> int:
        return await self.count(self.place)

    async def count(self, queue: str) -> int:
        """What is in a queue. What was given back may be on its way for a moment."""
        connection = await aio_pika.connect(self.url)
        async with connection:
            channel = await connection.channel()
            await asyncio.sleep(0.2)
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

            @contextmanager
            def silent() -> Iterator[None]:
                broker.send(signal.SIGSTOP)
                try:
                    yield
                finally:
                    broker.send(signal.SIGCONT)

            yield Restarted(line, broker.stop, broker.start, silent)

    async def test_what_is_rejected_is_dead_lettered(
        self, line: RabbitmqLine, place: Ground, make: Callable[..., Loop]
    ) -> None:
        consumer = handling(make(prefetch=1))

        @consumer.on("order.lost")
        async def reject(event: Event) -> None:
            raise Reject("no such order")

        await publish(line, "order.lost")
        await line.send({}, b"junk")
        sent = str(await publish(line))
        async with running(consumer):
            await until(lambda: sent in dict(place.effects()))
        assert await line.count(line.dead) == 2

    async def test_what_was_held_too_long_is_given_back(
        self, line: RabbitmqLine, make: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "HOLD_SECONDS", 0.2)
        consumer = make()
        attempts: list[int] = []

        @consumer.on("order.*")
        async def fail(event: Event) -> None:
            attempts.append(event.attempt)
            raise Retry("not yet", after=3600)

        await publish(line)
        async with running(consumer):
            await until(lambda: attempts.count(1) == 3)
        assert set(attempts) == {1}
        assert await line.left() == 1

    async def test_a_queue_that_is_deleted_is_waited_for(
        self, line: RabbitmqLine, place: Ground, make: Callable[..., Loop], caplog: pytest.LogCaptureFixture
    ) -> None:
        first = str(await publish(line))
        async with running(handling(make())):
            await until(lambda: first in dict(place.effects()))
            await line.delete()
            await until(lambda: line.place in caplog.text)
            await line.declare()
            second = str(await publish(line))
            await until(lambda: second in dict(place.effects()))
        assert await line.left() == 0

    async def test_wrong_credentials_are_told_without_the_password(
        self, line: RabbitmqLine, make: Callable[..., Loop], caplog: pytest.LogCaptureFixture
    ) -> None:
        line.url = line.url.replace("guest:guest", "guest:hunter2")
        async with running(handling(make())):
            await until(lambda: "connecting again" in caplog.text)
        line.url = line.url.replace("hunter2", "guest")
        assert "hunter2" not in caplog.text
        assert "ACCESS_REFUSED" in caplog.text


async def test_a_broker_that_is_not_there_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    consumer = RabbitmqConsumer(
        "amqp://guest:hunter2@127.0.0.1:1/", "q", inbox=Inbox(), transaction=dict, backoff={"base": "10ms"}
    )
    with caplog.at_level(logging.WARNING, "relaybox.consumer"):
        async with running(consumer):
            await until(lambda: caplog.text.count("connecting again") > 2)
    assert "hunter2" not in caplog.text


def test_mistakes_are_told_when_it_is_made() -> None:
    given: dict[str, Any] = {"inbox": Inbox(), "transaction": dict}
    with pytest.raises(ConfigError, match="queue = ''"):
        RabbitmqConsumer("amqp://x", "", **given)
    with pytest.raises(ConfigError, match="url is empty"):
        RabbitmqConsumer("", "q", **given)
    with pytest.raises(ConfigError, match="prefetch = 0"):
        RabbitmqConsumer("amqp://x", "q", prefetch=0, **given)
