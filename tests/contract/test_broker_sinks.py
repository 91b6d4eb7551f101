"""The contract on every sink that sends to a broker, with a real one behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID, uuid4

import aio_pika
import aiormq
import pytest
from aiohttp import ClientSession, web
from celery import Celery
from confluent_kafka import KafkaError, KafkaException, Producer
from kombu.exceptions import EncodeError, OperationalError
from nats.aio.msg import Msg
from pamqp.commands import Basic
from redis.asyncio import Connection as RedisConnection
from redis.asyncio import Redis

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.sinks.celery import CelerySink
from relaybox.sinks.kafka import producer as kafka_producer
from relaybox.sinks.kafka.sink import KafkaSink
from relaybox.sinks.nats.connection import Broken, Connection
from relaybox.sinks.nats.sink import NatsSink
from relaybox.sinks.rabbitmq.sink import RabbitMqSink
from relaybox.sinks.redis import Command, RedisSink
from relaybox.sinks.sink import Answer
from relaybox.sinks.sqs.sink import SqsSink
from relaybox.testing.sink_contract import SinkContract, Trouble
from tests.contract.test_sinks import Script, opened, serving, shop
from tests.integration.amazon import Amazon, amazon, sink_at  # noqa: F401
from tests.integration.jetstream import stream
from tests.integration.kafka_log import make_topic
from tests.waiting import PATIENCE

# ruff: noqa: F811

CELERY: dict[Trouble, BaseException] = {
    "retry": RuntimeError("later"),
    "reject": EncodeError("never"),
    "unavailable": OperationalError("down"),
    "crash": SystemExit(3),
}
KAFKA: dict[Trouble, KafkaError] = {
    "retry": KafkaError(KafkaError.UNKNOWN),
    "unavailable": KafkaError(KafkaError.NOT_ENOUGH_REPLICAS),
    "crash": KafkaError(KafkaError._PURGE_INFLIGHT),
}
NATS: dict[Trouble, bytes] = {
    "retry": b'{"error": {"code": 500, "err_code": 1, "description": "later"}}',
    "reject": b'{"error": {"code": 400, "err_code": 10097, "description": "never"}}',
    "unavailable": b'{"error": {"code": 503, "err_code": 2, "description": "down"}}',
}
RABBITMQ: dict[Trouble, Exception] = {
    "retry": RuntimeError("later"),
    "reject": ValueError("never"),
    "unavailable": aiormq.DeliveryError(None, Basic.Nack()),
    "crash": aiormq.AMQPConnectionError("gone"),
}
SQS: dict[Trouble, dict[str, Any]] = {
    "retry": {"Code": "InternalError", "Message": "later", "SenderFault": False},
    "reject": {"Code": "InvalidMessageContents", "Message": "never", "SenderFault": True},
    "unavailable": {"Code": "KMS.AccessDeniedException", "Message": "down", "SenderFault": True},
}
_publish_to_nats = Connection.publish
_publish_to_rabbitmq = aiormq.Channel.basic_publish


class ScriptedCelery(Celery):
    """An application whose broker does as the script says."""

    script: Script

    def send_task(self, name: str, args: Any = None, *rest: Any, **options: Any) -> Any:
        event_id = UUID(args[0]["id"])
        trouble = self.script._troubles.get(event_id)
        # A connection that lay idle is given up for a new one, which is the same arrival.
        if trouble != "unavailable" or event_id not in self.script.received():
            self.script.arrive(event_id)
        if trouble is not None:
            raise CELERY[trouble]
        if event_id in self.script._awaited:
            self.script._arrived_in_threads.wait(PATIENCE)
        return super().send_task(name, args, *rest, **options)


class TestCelery(SinkContract):
    @pytest.fixture
    async def harness(self, redis_url: str) -> AsyncIterator[Script]:
        script = Script()
        app = ScriptedCelery("shop", broker=redis_url)
        app.script = script
        async with opened(CelerySink(shop("celery:shop.tasks.index")), script):
            yield script
        app.close()


class ScriptedProducer(Producer):  # type: ignore[misc]
    """A producer whose broker does as the script says: what it takes, the real broker gets."""

    script: Script

    def __init__(self, configuration: dict[str, Any]) -> None:
        super().__init__(configuration)
        self._reports: list[tuple[Any, KafkaError]] = []
        self._held: list[tuple[Any, dict[str, Any]]] = []

    def produce(self, *arguments: Any, **options: Any) -> None:
        event_id = UUID(options["headers"]["event-id"])
        trouble = self.script.arrive(event_id)
        if trouble == "reject":
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
        if trouble is not None:
            self._reports.append((options["on_delivery"], KAFKA[trouble]))
        elif event_id in self.script._awaited and not self.script._arrived.is_set():
            self._held.append((arguments, options))
        else:
            super().produce(*arguments, **options)

    def poll(self, timeout: float = -1) -> int:
        if self.script._arrived.is_set():
            held, self._held = self._held, []
            for arguments, options in held:
                super().produce(*arguments, **options)
        reports, self._reports = self._reports, []
        for report, error in reports:
            report(error, None)
        return len(reports) + super().poll(timeout)


class TestKafka(SinkContract):
    @pytest.fixture
    async def harness(self, kafka_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Script]:
        script = Script()
        producer = type("Scripted", (ScriptedProducer,), {"script": script})
        monkeypatch.setattr(kafka_producer, "Producer", producer)
        # A broker that is busy may take longer to make a topic than the sink waits for it.
        topic = make_topic(kafka_url.removeprefix("kafka://"))
        async with opened(KafkaSink(shop(f"{kafka_url}/{topic}")), script):
            yield script


class TestNats(SinkContract):
    @pytest.fixture
    async def harness(self, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Script]:
        script = Script()

        async def publish(connection: Connection, subject: str, body: bytes, headers: dict[str, str]) -> Msg:
            event_id = UUID(headers["event-id"])
            trouble = script.arrive(event_id)
            if trouble == "crash":
                raise Broken("gone")
            if trouble is not None:
                return Msg(connection.client, data=NATS[trouble])
            await script.wait_for_all(event_id)
            return await _publish_to_nats(connection, subject, body, headers)

        monkeypatch.setattr(Connection, "publish", publish)
        async with stream(nats_url) as place, opened(NatsSink(shop(place.url)), script):
            yield script


class TestRabbitMq(SinkContract):
    @pytest.fixture
    async def harness(self, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Script]:
        script = Script()

        async def publish(channel: Any, body: bytes, *, properties: Any, **options: Any) -> Any:
            event_id = UUID(properties.message_id)
            if trouble := script.arrive(event_id):
                raise RABBITMQ[trouble]
            await script.wait_for_all(event_id)
            return await _publish_to_rabbitmq(channel, body, properties=properties, **options)

        monkeypatch.setattr(aiormq.Channel, "basic_publish", publish)
        async with await aio_pika.connect(rabbitmq_url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(f"contract-{uuid4()}", exclusive=True)
            destination = shop(rabbitmq_url, options={"routing_key": queue.name})
            async with opened(RabbitMqSink(destination), script):
                yield script
            await asyncio.sleep(0)


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
        # A connection that breaks takes the whole batch with it; this answer is the one that reports it.
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
    return Command(stream, b"".join(RedisConnection().pack_command("XADD", stream, *more)))


class TestRedis(SinkContract):
    @pytest.fixture
    async def harness(self, redis_url: str) -> AsyncIterator[Script]:
        script = Script()
        stream, no_stream = f"contract-{uuid4()}", f"text-{uuid4()}"
        async with Redis.from_url(redis_url) as client:
            await client.set(no_stream, "a text")
            destination = shop(redis_url, options={"stream": stream})
            async with opened(ScriptedRedis(script, destination, no_stream), script):
                yield script
            await client.delete(stream, no_stream)


class Front(Script):
    """Takes requests in the place of the service, and hands it what the script lets through."""

    def __init__(self, endpoint: str, session: ClientSession) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._session = session

    async def take(self, request: web.Request) -> web.Response:
        asked = await request.json()
        failed: list[dict[str, Any]] = []
        if request.headers["x-amz-target"] == "AmazonSQS.SendMessageBatch":
            asked["Entries"], failed = self._sift(asked["Entries"])
            if self._awaited:
                await self._arrived.wait()
            if not asked["Entries"]:
                return web.json_response({"Successful": [], "Failed": failed})
        said = await self._pass_on(request, asked)
        return web.json_response({**said, "Failed": [*said.get("Failed", ()), *failed]})

    def _sift(self, entries: list[Any]) -> tuple[list[Any], list[dict[str, Any]]]:
        kept, failed = [], []
        for entry in entries:
            event_id = UUID(entry["MessageAttributes"]["event-id"]["StringValue"])
            trouble = self.arrive(event_id)
            if trouble in SQS:
                failed.append({"Id": entry["Id"], **SQS[trouble]})
            elif trouble is None:
                kept.append(entry)
            # Else it breaks off: nothing is said of this one.
        return kept, failed

    async def _pass_on(self, request: web.Request, asked: Any) -> Any:
        names = ("x-amz-target", "authorization", "x-amz-date", "content-type")
        headers = {name: request.headers[name] for name in names}
        async with self._session.post(self._endpoint, data=json.dumps(asked), headers=headers) as response:
            response.raise_for_status()
            return json.loads(await response.read())


class TestSqs(SinkContract):
    @pytest.fixture(params=["", ".fifo"], ids=["standard", "fifo"])
    async def harness(self, request: pytest.FixtureRequest, amazon: Amazon) -> AsyncIterator[Script]:
        queue = amazon.queue(request.param)
        async with ClientSession() as session:
            front = Front(amazon.endpoint, session)
            async with (
                serving("/", front.take) as endpoint,
                opened(SqsSink(shop(sink_at(endpoint, queue.name))), front),
            ):
                yield front
