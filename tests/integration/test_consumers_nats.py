"""The consumer of NATS JetStream, and what is special about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from uuid import uuid4

import nats
import pytest
from nats.js.api import ConsumerConfig

from relaybox import Event, Reject
from relaybox.consumers.loop import Loop
from relaybox.consumers.nats import NatsConsumer
from relaybox.envelope import JSON
from relaybox.errors import ConfigError
from relaybox.inboxes.sql import Inbox
from tests.conftest import available
from tests.integration.consumed import Ground, insert
from tests.integration.consuming import ConsumerContract, Line, Restarted, handling, publish, running, until
from tests.integration.mortal_consumer import consumer as make_consumer
from tests.servers import nats as server


class NatsLine(Line):
    """A stream of its own."""

    kind = "nats"

    def __init__(self, url: str) -> None:
        self.url = url
        self.place = f"s{uuid4().hex}"
        self.sink = f"{url}/{self.place}.{{event_type}}"

    async def declare(self, **config: Any) -> NatsLine:
        client = await nats.connect(self.url)
        stream = client.jetstream()
        await stream.add_stream(name=self.place, subjects=[f"{self.place}.>"])
        # So that what a dead consumer had comes again soon.
        given = {"ack_wait": 2, **config}
        await stream.add_consumer(self.place, ConsumerConfig(durable_name="books", **given))
        await client.close()
        return self

    async def send(self, headers: dict[str, str], body: bytes, content_type: str = JSON) -> None:
        client = await nats.connect(self.url)
        subject = f"{self.place}.{headers.get('event-type', 'none')}"
        await client.jetstream().publish(subject, body, headers={"content-type": content_type, **headers})
        await client.close()

    def consumer(self, **options: Any) -> Loop:
        return make_consumer(self.kind, self.url, self.place, **({"consumer": "books"} | options))

    async def left(self) -> int:
        client = await nats.connect(self.url)
        info = await client.jetstream().consumer_info(self.place, "books")
        await client.close()
        return (info.num_pending or 0) + (info.num_ack_pending or 0)


@pytest.fixture
async def line(nats_url: str) -> AsyncIterator[NatsLine]:
    made = await NatsLine(nats_url).declare()
    yield made
    client = await nats.connect(nats_url)
    await client.jetstream().delete_stream(made.place)
    await client.close()


class TestNatsConsumer(ConsumerContract):
    @pytest.fixture
    def restarted(self) -> Iterator[Restarted]:
        with available("NATS", server.broker()) as broker:
            line = asyncio.run(NatsLine(server.url_of(broker)).declare())
            yield Restarted(line, broker.stop, broker.start, broker.silent)

    async def test_a_slow_handler_keeps_its_message(
        self, line: NatsLine, place: Ground, make: Callable[..., Loop]
    ) -> None:
        consumer = make()
        called: list[int] = []

        @consumer.on("order.*")
        async def slow(event: Event, connection: Any) -> None:
            called.append(event.attempt)
            await asyncio.sleep(3)
            await connection.execute(insert(event))

        sent = str(await publish(line))
        async with running(consumer):
            await until(lambda: sent in dict(place.effects()))
        assert called == [1]
        assert await line.left() == 0

    async def test_what_is_rejected_is_terminated(
        self, line: NatsLine, place: Ground, make: Callable[..., Loop]
    ) -> None:
        consumer = handling(make())

        @consumer.on("order.lost")
        async def reject(event: Event) -> None:
            raise Reject("no such order")

        client = await nats.connect(line.url)
        advisories = await client.subscribe(f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{line.place}.books")
        await publish(line, "order.lost")
        async with running(consumer):
            advisory = await advisories.next_msg(20)
        assert b"terminated" in advisory.data
        await client.close()
        assert await line.left() == 0

    async def test_a_consumer_is_made_where_there_is_none(
        self, line: NatsLine, place: Ground, make: Callable[..., Loop]
    ) -> None:
        client = await nats.connect(line.url)
        stream = client.jetstream()
        await stream.delete_consumer(line.place, "books")
        first = str(await publish(line))
        async with running(handling(make())):
            await until(lambda: first in dict(place.effects()))
            # In the middle, too: the loop finds it gone.
            await stream.delete_consumer(line.place, "books")
            second = str(await publish(line))
            await until(lambda: second in dict(place.effects()))
        await client.close()
        assert [found for found, _ in place.effects()].count(first) == 1

    async def test_a_missing_stream_is_waited_for(
        self, line: NatsLine, make: Callable[..., Loop], caplog: pytest.LogCaptureFixture
    ) -> None:
        consumer = NatsConsumer(
            line.url, "nowhere.>", durable="d", inbox=Inbox(), transaction=dict, backoff={"base": "10ms"}
        )
        async with running(consumer):
            await until(lambda: caplog.text.count("connecting again") > 1)
        assert "NotFound" in caplog.text


async def test_a_broker_that_is_not_there_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    consumer = NatsConsumer(
        "nats://user:hunter2@127.0.0.1:1",
        "s.>",
        durable="d",
        inbox=Inbox(),
        transaction=dict,
        backoff={"base": "10ms"},
    )
    with caplog.at_level(logging.WARNING, "relaybox.consumer"):
        async with running(consumer):
            await until(lambda: caplog.text.count("connecting again") > 2)
    assert "hunter2" not in caplog.text


async def test_a_stop_before_the_start_is_a_stop() -> None:
    consumer = NatsConsumer("nats://127.0.0.1:1", "s.>", durable="d", inbox=Inbox(), transaction=dict)
    for _ in range(2):
        running = asyncio.create_task(consumer.run())
        consumer.stop()
        await asyncio.wait_for(running, 20)
    assert running.done()


def test_mistakes_are_told_when_it_is_made() -> None:
    given: dict[str, Any] = {"inbox": Inbox(), "transaction": dict}
    with pytest.raises(ConfigError, match="durable = ''"):
        NatsConsumer("nats://x", "s", durable="", **given)
    with pytest.raises(ConfigError, match="set the variable NO_SUCH_URL"):
        NatsConsumer("env:NO_SUCH_URL", "s", durable="d", **given)
    with pytest.raises(ConfigError, match="subject = ''"):
        NatsConsumer("nats://x", "", durable="d", **given)
