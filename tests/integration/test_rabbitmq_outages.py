"""A real RabbitMQ behind a real relay, that is restarted, stopped, short of memory, or loses a queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import aio_pika
import pytest
import sqlalchemy as sa

from relaybox import Destination, Route
from relaybox.admin import Admin
from relaybox.outcome import Delivered, Unavailable, Unreachable
from relaybox.parts import open_store
from relaybox.sinks.rabbitmq import RabbitMqSink
from relaybox.stores.ledger import SqlLedger
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration.shop import Shop, until
from tests.servers import rabbitmq

SIZES = pytest.mark.parametrize(
    ("events", "keys"), [(1_000, 50), pytest.param(10_000, 500, marks=pytest.mark.slow)]
)


@pytest.fixture(scope="module")
def broker() -> Iterator[rabbitmq.Broker]:
    """A server to be treated badly."""
    with available("RabbitMQ", rabbitmq.broker()) as broker:
        yield broker


@pytest.fixture
async def queue(broker: rabbitmq.Broker) -> str:
    """A queue that outlives the broker."""
    name = f"queue-{uuid4()}"
    await declare(broker.url, name)
    return name


async def declare(url: str, queue: str) -> None:
    async with opened(url) as channel:
        await channel.declare_queue(queue, durable=True)


async def delete(url: str, queue: str) -> None:
    async with opened(url) as channel:
        await channel.queue_delete(queue)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Any]:
    async with await aio_pika.connect(url) as connection:
        yield await connection.channel()


async def read(url: str, queue: str) -> list[Any]:
    """What lies in a queue, oldest first."""
    messages: list[Any] = []
    async with opened(url) as channel:
        declared = await channel.declare_queue(queue, passive=True)
        count = declared.declaration_result.message_count
        enough = asyncio.Event()

        async def take(message: Any) -> None:
            messages.append(message)
            if len(messages) >= count:
                enough.set()

        if count:
            await declared.consume(take, no_ack=True)
            await asyncio.wait_for(enough.wait(), 30)
    return messages


def open_shop(database: str, url: str, queue: str, **options: Any) -> Shop:
    options = {"backoff": {"base": "50ms", "cap": "200ms"}, "poll_interval": "50ms", **options}
    destination = Destination("events", f"{url}?routing_key={queue}", ordered=True, **options)
    return Shop(database, destinations=[destination], routes=[Route("*", to="events")])


def emitted(shop: Shop) -> dict[str, list[UUID]]:
    """By key, the ids of its events in the order of their positions."""
    event = shop.outbox.tables.event.c
    found: dict[str, list[UUID]] = {}
    with shop.engine.connect() as connection:
        query = sa.select(event.aggregate_id, event.event_id).order_by(event.position)
        for key, id_ in connection.execute(query):
            found.setdefault(key, []).append(id_)
    return found


def arrived(messages: list[Any]) -> dict[str, list[UUID]]:
    """By key, the ids of the events in the order in which they first came."""
    found: dict[str, dict[UUID, None]] = {}
    for message in messages:
        assert message.headers["event-id"] == message.message_id
        assert message.headers["aggregate-type"] == "Order"
        found.setdefault(message.headers["aggregate-id"], {})[UUID(message.message_id)] = None
    return {key: list(ids) for key, ids in found.items()}


@SIZES
async def test_events_arrive_once_and_in_order(
    broker: rabbitmq.Broker, queue: str, fresh_database: Callable[[str], str], events: int, keys: int
) -> None:
    shop = open_shop(fresh_database("postgresql-18"), broker.url, queue)
    shop.emit(events, keys=keys)
    await shop.outbox.adrain()

    messages = await read(broker.url, queue)
    assert len(messages) == events
    assert arrived(messages) == emitted(shop)
    assert shop.states() == {"delivered": events}
    shop.engine.dispose()


@pytest.mark.slow
async def test_events_arrive_in_order_though_the_broker_is_restarted(
    broker: rabbitmq.Broker, queue: str, fresh_database: Callable[[str], str]
) -> None:
    events, keys = 10_000, 500
    shop = open_shop(fresh_database("postgresql-18"), broker.url, queue)
    shop.emit(events, keys=keys)
    async with shop.outbox.relay():
        await until(lambda: shop.states().get("delivered", 0) > events // 5, "a part is delivered")
        await asyncio.to_thread(broker.stop)
        assert shop.states()["pending"] > 0
        await asyncio.to_thread(broker.start)
        await until(lambda: shop.states() == {"delivered": events}, "all is delivered", 60)

    messages = await read(broker.url, queue)
    assert arrived(messages) == emitted(shop)
    assert len(messages) - events <= 100
    shop.engine.dispose()


async def test_a_queue_that_is_deleted_loses_nothing_that_comes_after(
    broker: rabbitmq.Broker, queue: str, fresh_database: Callable[[str], str]
) -> None:
    shop = open_shop(fresh_database("postgresql-18"), broker.url, queue)
    shop.emit(100, keys=10)
    async with shop.outbox.relay():
        await until(lambda: shop.states() == {"delivered": 100}, "the first are delivered")
        await delete(broker.url, queue)
        shop.emit(100, keys=10, first=100)
        await until(lambda: shop.circuit("events") == "open", "the circuit opens")
        assert shop.states() == {"delivered": 100, "pending": 100}
        assert any("no queue is bound" in (error or "") for _, _, error in shop.rows())
        await declare(broker.url, queue)
        await until(lambda: shop.states() == {"delivered": 200}, "the rest is delivered", 30)

    after = {key: ids[10:] for key, ids in emitted(shop).items()}
    assert arrived(await read(broker.url, queue)) == after
    shop.engine.dispose()


async def test_what_no_queue_is_bound_for_says_why_and_is_never_delivered(
    broker: rabbitmq.Broker, fresh_database: Callable[[str], str]
) -> None:
    database = fresh_database("postgresql-18")
    shop = open_shop(database, broker.url, "nobody-listens")
    shop.emit(3)
    await shop.outbox.adrain()
    assert shop.states() == {"pending": 3}
    [ids] = emitted(shop).values()
    store = open_store(database, shop.outbox.tables)
    admin = Admin(SqlLedger(store), shop.outbox.settings.destinations, "tester")
    [reason] = await admin.why(ids[0])
    assert "no queue is bound" in reason.text
    assert "'nobody-listens'" in reason.text
    await store.close()
    shop.engine.dispose()


async def test_a_broker_that_was_away_is_used_again(broker: rabbitmq.Broker, queue: str) -> None:
    sink = RabbitMqSink(Destination("events", f"{broker.url}?routing_key={queue}"))
    assert await sink.send([make_delivery()]) == [Delivered()]
    await asyncio.to_thread(broker.stop)
    try:
        answers = await sink.send([make_delivery() for _ in range(60)])
        assert [type(answer) for answer in answers] == [Unreachable] * 60
    finally:
        await asyncio.to_thread(broker.start)
    assert await sink.send([make_delivery() for _ in range(60)]) == [Delivered()] * 60
    await sink.close()


async def test_a_broker_that_hangs_is_unavailable_and_used_again(
    broker: rabbitmq.Broker, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = RabbitMqSink(Destination("events", f"{broker.url}?routing_key={queue}", timeout=0.5))
    assert await sink.send([make_delivery()]) == [Delivered()]
    with broker.paused():
        for _ in range(2):
            answers = await sink.send([make_delivery() for _ in range(60)])
            assert [type(answer) for answer in answers] == [Unavailable] * 60
        sending = asyncio.ensure_future(sink.send([make_delivery()]))
        await asyncio.sleep(0)
        began = time.monotonic()
        await sink.close()
        assert time.monotonic() - began < 3
        assert await sending != [Delivered()]
    async with asyncio.timeout(20):
        while await sink.send([make_delivery()]) != [Delivered()]:
            pass
    await sink.close()
    assert not [record for record in caplog.records if record.name.startswith("aiormq")]


async def test_a_broker_short_of_memory_says_so_and_takes_it_later(
    broker: rabbitmq.Broker, queue: str
) -> None:
    sink = RabbitMqSink(Destination("events", f"{broker.url}?routing_key={queue}", timeout=1))
    assert await sink.send([make_delivery()]) == [Delivered()]
    await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "absolute", "1")
    try:
        answers = [(await sink.send([make_delivery()]))[0] for _ in range(2)]
    finally:
        await asyncio.to_thread(broker.control, "set_vm_memory_high_watermark", "absolute", "512MB")
    assert [type(answer) for answer in answers] == [Unavailable] * 2
    assert isinstance(answers[1], Unavailable)
    assert "low on memory" in answers[1].reason
    assert await sink.send([make_delivery()]) == [Delivered()]
    await sink.close()
