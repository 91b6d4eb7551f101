"""A real RabbitMQ that is restarted, stopped, short of memory, or loses a queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import aio_pika
import pytest

from relaybox.admin import Admin
from relaybox.outcome import Delivered, Unavailable, Unreachable
from relaybox.parts import open_store
from relaybox.stores.ledger import SqlLedger
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration.outages import Entry, Place, RelayContract, event_ids, shop_to
from tests.integration.sinking import check_refused, deliver, sink_to
from tests.servers import rabbitmq
from tests.waiting import PATIENCE, await_for


class RabbitMqPlace(Place):
    """A queue that outlives the broker."""

    duplicates = 100

    def __init__(self, server: rabbitmq.Broker) -> None:
        super().__init__(server)
        self.queue = f"queue-{uuid4()}"

    @property
    def url(self) -> str:
        return f"{self.server.url}?routing_key={self.queue}"

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[Any]:
        async with await aio_pika.connect(self.server.url) as connection:
            yield await connection.channel()

    async def declare(self) -> None:
        async with self.channel() as channel:
            await channel.declare_queue(self.queue, durable=True)

    async def entries(self) -> list[Entry]:
        messages: list[Any] = []

        async def take(message: Any) -> None:
            messages.append(message)

        async with self.channel() as channel:
            declared = await channel.declare_queue(self.queue, passive=True)
            count = declared.declaration_result.message_count
            await declared.consume(take, no_ack=True)
            await await_for(lambda: len(messages) >= count, lambda: f"{len(messages)} of {count} messages")
        for message in messages:
            assert message.headers["event-id"] == message.message_id
        return [Entry(message.headers, message.body) for message in messages]


@pytest.fixture(scope="module")
def broker() -> Iterator[rabbitmq.Broker]:
    """A server to be treated badly."""
    with available("RabbitMQ", rabbitmq.broker()) as broker:
        yield broker


@pytest.fixture
async def place(broker: rabbitmq.Broker) -> RabbitMqPlace:
    made = RabbitMqPlace(broker)
    await made.declare()
    return made


class TestRabbitMqOutages(RelayContract):
    async def test_a_queue_that_is_deleted_loses_nothing_that_comes_after(
        self, place: RabbitMqPlace, database: str
    ) -> None:
        shop = shop_to(place.url, database)
        shop.emit(100, keys=10)
        async with shop.outbox.relay():
            await await_for(lambda: shop.states() == {"delivered": 100}, "the first are delivered")
            async with place.channel() as channel:
                await channel.queue_delete(place.queue)
            shop.emit(100, keys=10, first=100)
            # The circuit opens before the error is written.
            await await_for(
                lambda: any("no queue is bound" in (error or "") for _, _, error in shop.rows()), "the reason"
            )
            await await_for(lambda: shop.circuit("broker") == "open", "the circuit opens")
            assert shop.states() == {"delivered": 100, "pending": 100}
            await place.declare()
            await await_for(lambda: shop.states() == {"delivered": 200}, "the rest is delivered")
        found = [entry.headers["event-id"] for entry in await place.entries()]
        ids = event_ids(shop)
        for key in range(10):
            of_key = ids[100 + key :: 10]
            assert list(dict.fromkeys(id_ for id_ in found if id_ in of_key)) == of_key
        assert set(found) == set(ids[100:])

    async def test_what_no_queue_is_bound_for_says_why_and_is_never_delivered(
        self, place: RabbitMqPlace, database: str
    ) -> None:
        place.queue = "nobody-listens"
        shop = shop_to(place.url, database)
        shop.emit(3)
        await shop.outbox.adrain()
        assert shop.states() == {"pending": 3}
        store = open_store(database, shop.outbox.tables)
        admin = Admin(SqlLedger(store), shop.outbox.settings.destinations, "tester")
        [reason] = await admin.why(UUID(event_ids(shop)[0]))
        assert "no queue is bound" in reason.text
        assert "'nobody-listens'" in reason.text
        await store.close()

    async def test_a_broker_that_was_away_is_used_again(self, place: RabbitMqPlace) -> None:
        async with sink_to(place.url) as sink:
            assert await sink.send([make_delivery()]) == [Delivered()]
            await asyncio.to_thread(place.server.stop)
            try:
                answers = await sink.send([make_delivery() for _ in range(60)])
                assert [type(answer) for answer in answers] == [Unreachable] * 60
            finally:
                await asyncio.to_thread(place.server.start)
            assert await sink.send([make_delivery() for _ in range(60)]) == [Delivered()] * 60

    async def test_a_broker_that_hangs_is_unavailable_and_used_again(
        self, place: RabbitMqPlace, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with sink_to(place.url, timeout=0.5) as sink:
            await deliver(sink)
            with place.server.paused():
                for _ in range(2):
                    answers = await sink.send([make_delivery() for _ in range(60)])
                    assert [type(answer) for answer in answers] == [Unavailable] * 60
                sending = asyncio.ensure_future(sink.send([make_delivery()]))
                await asyncio.sleep(0)
                await asyncio.wait_for(sink.close(), PATIENCE)
                assert await sending != [Delivered()]
            await deliver(sink)
        assert not [record for record in caplog.records if record.name.startswith("aiormq")]

    async def test_a_broker_short_of_memory_says_so_and_takes_it_later(self, place: RabbitMqPlace) -> None:
        async def low() -> bool:
            return "low on memory" in str((await sink.send([make_delivery()]))[0])

        async with sink_to(place.url, timeout=1) as sink:
            await deliver(sink)
            await asyncio.to_thread(place.server.control, "set_vm_memory_high_watermark", "absolute", "1")
            try:
                await await_for(low, "low on memory")
                check_refused((await sink.send([make_delivery()]))[0], Unavailable, "low on memory")
            finally:
                await asyncio.to_thread(
                    place.server.control, "set_vm_memory_high_watermark", "absolute", "512MB"
                )
            await deliver(sink)
