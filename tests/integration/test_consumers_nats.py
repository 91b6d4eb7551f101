"""The consumer of NATS JetStream, and what is special about it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import pytest
from nats.js.api import ConsumerConfig

from relaybox import Event, Reject
from relaybox.consumers.nats import NatsConsumer
from relaybox.envelope import JSON
from relaybox.errors import ConfigError
from relaybox.inboxes.sql import Inbox
from tests.conftest import available
from tests.integration.consumed import insert
from tests.integration.consuming import Bench, ConsumerContract, Line, Restarted, handling, running
from tests.integration.jetstream import connect, jetstream
from tests.servers import nats as server
from tests.waiting import PATIENCE, await_for


class NatsLine(Line):
    """A stream of its own."""

    kind = "nats"

    def __init__(self, url: str) -> None:
        self.url = url
        self.place = f"s{uuid4().hex}"
        self.sink = f"{url}/{self.place}.{{event_type}}"

    async def declare(self, **config: Any) -> NatsLine:
        client = await connect(self.url)
        stream = jetstream(client)
        await stream.add_stream(name=self.place, subjects=[f"{self.place}.>"])
        # So that what a dead consumer had comes again soon.
        given = {"ack_wait": 2, **config}
        await stream.add_consumer(self.place, ConsumerConfig(durable_name="books", **given))
        await client.close()
        return self

    async def send(self, headers: dict[str, str], body: bytes, content_type: str = JSON) -> None:
        client = await connect(self.url)
        subject = f"{self.place}.{headers.get('event-type', 'none')}"
        await jetstream(client).publish(subject, body, headers={"content-type": content_type, **headers})
        await client.close()

    async def left(self) -> int:
        client = await connect(self.url)
        info = await jetstream(client).consumer_info(self.place, "books")
        await client.close()
        return (info.num_pending or 0) + (info.num_ack_pending or 0)


@pytest.fixture
async def line(nats_url: str) -> AsyncIterator[NatsLine]:
    made = await NatsLine(nats_url).declare()
    yield made
    client = await connect(nats_url)
    await jetstream(client).delete_stream(made.place)
    await client.close()


class TestNatsConsumer(ConsumerContract):
    @pytest.fixture
    def restarted(self) -> Iterator[Restarted]:
        with available("NATS", server.broker()) as broker:
            line = asyncio.run(NatsLine(server.url_of(broker)).declare())
            yield Restarted(line, broker.stop, broker.start, broker.silent)

    async def test_a_slow_handler_keeps_its_message(self, bench: Bench) -> None:
        consumer = bench.make()
        called: list[int] = []

        @consumer.on("order.*")
        async def slow(event: Event, connection: Any) -> None:
            called.append(event.attempt)
            await asyncio.sleep(3)
            await connection.execute(insert(event))

        sent = await bench.publish()
        async with running(consumer):
            await bench.effects(sent)
        assert called == [1]
        await bench.line.leaves(0)

    async def test_what_is_rejected_is_terminated(self, bench: Bench) -> None:
        consumer = handling(bench.make())

        @consumer.on("order.lost")
        async def reject(event: Event) -> None:
            raise Reject("no such order")

        client = await connect(bench.line.url)
        advisories = await client.subscribe(
            f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{bench.line.place}.books"
        )
        await bench.publish("order.lost")
        async with running(consumer):
            advisory = await advisories.next_msg(PATIENCE)
        assert b"terminated" in advisory.data
        await client.close()
        await bench.line.leaves(0)

    async def test_a_consumer_is_made_where_there_is_none(self, bench: Bench) -> None:
        client = await connect(bench.line.url)
        stream = jetstream(client)
        await stream.delete_consumer(bench.line.place, "books")
        first = await bench.publish()
        async with running(handling(bench.make())):
            await bench.effects(first)
            # In the middle, too: the loop finds it gone.
            await stream.delete_consumer(bench.line.place, "books")
            second = await bench.publish()
            await bench.effects(second)
        await client.close()
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
            await await_for(lambda: caplog.text.count("connecting again") > 2)
    assert "hunter2" not in caplog.text


async def test_a_stop_before_the_start_is_a_stop() -> None:
    consumer = NatsConsumer("nats://127.0.0.1:1", "s.>", durable="d", inbox=Inbox(), transaction=dict)
    for _ in range(2):
        running = asyncio.create_task(consumer.run())
        consumer.stop()
        await asyncio.wait_for(running, PATIENCE)
    assert running.done()


def test_mistakes_are_told_when_it_is_made() -> None:
    given: dict[str, Any] = {"inbox": Inbox(), "transaction": dict}
    with pytest.raises(ConfigError, match="durable = ''"):
        NatsConsumer("nats://x", "s", durable="", **given)
    with pytest.raises(ConfigError, match="set the variable NO_SUCH_URL"):
        NatsConsumer("env:NO_SUCH_URL", "s", durable="d", **given)
    with pytest.raises(ConfigError, match="subject = ''"):
        NatsConsumer("nats://x", "", durable="d", **given)
