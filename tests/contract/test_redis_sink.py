"""The contract on the sink that adds to Redis Streams, with a real server behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from uuid import uuid4

import pytest
from redis.asyncio import Connection, Redis

from relaybox.config import Destination
from relaybox.event import Delivery
from relaybox.outcome import Reject, Retry, Unavailable
from relaybox.sink import Answer
from relaybox.sinks.redis import Command, RedisSink
from relaybox.testing.sink_contract import SinkContract
from tests.contract.test_sinks import Script


class ScriptedRedis(RedisSink):
    """Sends commands that the server refuses where the script says so."""

    def __init__(self, script: Script, destination: Destination, no_stream: str) -> None:
        super().__init__(destination)
        self._script = script
        self._no_stream = no_stream

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[Answer]:
        troubles = {each.event_id: self._script.arrive(each.event_id) for each in deliveries}
        if self._script._awaited & troubles.keys():
            await self._script._arrived.wait()
        answers = await super().deliver(deliveries)
        # A connection that breaks takes the whole batch with it, of which this is the one that is told.
        return [
            Unavailable("gone") if troubles[each.event_id] == "crash" else answer
            for each, answer in zip(deliveries, answers, strict=True)
        ]

    def command(self, delivery: Delivery) -> Command:
        command = super().command(delivery)
        match self._script._troubles.get(delivery.event_id):
            case "retry":
                return _xadd(command.stream)
            case "reject":
                raise Reject("never")
            case "unavailable":
                return _xadd(self._no_stream, "*", "name", "value")
            case "crash":
                raise Retry("gone")
        return command


def _xadd(stream: str, *more: str) -> Command:
    return Command(stream, b"".join(Connection().pack_command("XADD", stream, *more)))


class TestRedis(SinkContract):
    @pytest.fixture
    async def harness(self, redis_url: str) -> AsyncIterator[Script]:
        script = Script()
        stream, no_stream = f"contract-{uuid4()}", f"text-{uuid4()}"
        client = Redis.from_url(redis_url)
        await client.set(no_stream, "a text")
        destination = Destination("shop", redis_url, timeout="10s", options={"stream": stream})
        script.sink = ScriptedRedis(script, destination, no_stream)
        yield script
        script.release()
        await script.sink.close()
        await client.delete(stream, no_stream)
        await client.aclose()
