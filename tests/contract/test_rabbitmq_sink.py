"""The contract on the sink that publishes to RabbitMQ, with a real broker behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import aio_pika
import aiormq
import pytest
from pamqp.commands import Basic

from relaybox.config import Destination
from relaybox.sinks.rabbitmq import RabbitMqSink
from relaybox.testing.sink_contract import SinkContract, Trouble
from tests.contract.test_sinks import Script

RAISED: dict[Trouble, Exception] = {
    "retry": RuntimeError("later"),
    "reject": ValueError("never"),
    "unavailable": aiormq.DeliveryError(None, Basic.Nack()),
    "crash": aiormq.AMQPConnectionError("gone"),
}
_publish = aiormq.Channel.basic_publish


class TestRabbitMq(SinkContract):
    @pytest.fixture
    async def harness(self, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Script]:
        script = Script()

        async def publish(channel: Any, body: bytes, *, properties: Any, **options: Any) -> Any:
            event_id = UUID(properties.message_id)
            if trouble := script.arrive(event_id):
                raise RAISED[trouble]
            if event_id in script._awaited:
                await script._arrived.wait()
            return await _publish(channel, body, properties=properties, **options)

        monkeypatch.setattr(aiormq.Channel, "basic_publish", publish)
        async with await aio_pika.connect(rabbitmq_url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(f"contract-{uuid4()}", exclusive=True)
            options = {"routing_key": queue.name}
            script.sink = RabbitMqSink(Destination("shop", rabbitmq_url, timeout="10s", options=options))
            yield script
            script.release()
            await script.sink.close()
            await asyncio.sleep(0)
