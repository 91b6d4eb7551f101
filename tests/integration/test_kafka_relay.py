"""A relay that delivers to Kafka: all events, per key in order, also while the broker goes away."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from confluent_kafka import Message

from relaybox import Destination, Route
from tests.conftest import available
from tests.integration.kafka_log import headers, make_topic, read
from tests.integration.shop import Shop, until
from tests.servers import kafka

EVENTS, KEYS = 10_000, 500


@pytest.fixture(scope="module")
def broker() -> Iterator[kafka.Broker]:
    """A broker that makes no topic by itself."""
    with available("Kafka", kafka.broker(auto_create=False)) as started:
        yield started


@asynccontextmanager
async def shop_of(database: str, *places: Destination) -> AsyncIterator[Shop]:
    shop = Shop(database, destinations=places, routes=[Route("*", to=[place.name for place in places])])
    yield shop
    shop.engine.dispose()


def check(messages: list[Message], *, duplicates: bool) -> None:
    """All are there; the first message of each event follows those of the events before it in its key."""
    seen: dict[str, list[int]] = defaultdict(list)
    ids: dict[str, int] = {}
    for message in messages:
        event, sent = json.loads(message.value()), headers(message)
        number, key = event["data"]["n"], message.key().decode()
        assert (sent["event-id"], sent["event-type"]) == (event["id"], "order.paid")
        assert key == sent["aggregate-id"] == str(number % KEYS)
        assert ids.setdefault(event["id"], number) == number
        if number not in seen[key]:
            seen[key].append(number)
    assert len(ids) == EVENTS
    assert len(messages) == EVENTS or duplicates
    for key, numbers in seen.items():
        assert numbers == list(range(int(key), EVENTS, KEYS))


async def test_ten_thousand_events_of_five_hundred_keys_arrive_once_and_in_order(
    broker: kafka.Broker, fresh_database: Callable[[str], str]
) -> None:
    topic = make_topic(broker.bootstrap, partitions=5)
    place = Destination("kafka", f"{broker.url}/{topic}", ordered=True)
    async with shop_of(fresh_database("postgresql-18"), place) as shop:
        shop.emit(EVENTS, keys=KEYS)
        await shop.outbox.adrain()
        assert shop.states() == {"delivered": EVENTS}
    check(read(broker.bootstrap, topic), duplicates=False)


@pytest.mark.slow
async def test_they_do_so_when_the_broker_is_restarted_in_the_middle(
    broker: kafka.Broker, fresh_database: Callable[[str], str]
) -> None:
    topic = make_topic(broker.bootstrap, partitions=5)
    place = Destination("kafka", f"{broker.url}/{topic}", ordered=True, timeout="3s", poll_interval="100ms")
    async with shop_of(fresh_database("postgresql-18"), place) as shop:
        shop.emit(EVENTS, keys=KEYS)
        async with shop.outbox.relay():
            await until(lambda: shop.states().get("delivered", 0) > EVENTS // 10, "some are delivered")
            await asyncio.to_thread(broker.stop)
            # Longer than the timeout, so that what is in the producer fails.
            await until(lambda: shop.circuit("kafka") == "open", "the circuit opens")
            assert shop.states()["pending"] > 0
            await asyncio.to_thread(broker.start)
            await until(lambda: shop.states() == {"delivered": EVENTS}, "all are delivered", 60)
    check(read(broker.bootstrap, topic), duplicates=True)


@pytest.mark.slow
async def test_a_restart_within_the_timeout_is_no_failure(
    broker: kafka.Broker, fresh_database: Callable[[str], str]
) -> None:
    topic = make_topic(broker.bootstrap, partitions=5)
    place = Destination("kafka", f"{broker.url}/{topic}", ordered=True)
    async with shop_of(fresh_database("postgresql-18"), place) as shop:
        shop.emit(EVENTS, keys=KEYS)
        async with shop.outbox.relay():
            await until(lambda: shop.states().get("delivered", 0) > EVENTS // 10, "some are delivered")
            await asyncio.to_thread(broker.stop)
            await asyncio.to_thread(broker.start)
            await until(lambda: shop.states() == {"delivered": EVENTS}, "all are delivered", 60)
        assert {attempts for _, attempts, _ in shop.rows()} == {1}
    check(read(broker.bootstrap, topic), duplicates=False)


async def test_a_missing_topic_is_the_reason_and_other_lanes_go_on(
    broker: kafka.Broker, fresh_database: Callable[[str], str]
) -> None:
    topic, options = make_topic(broker.bootstrap), {"timeout": "3s", "poll_interval": "100ms"}
    places = [Destination(name, f"{broker.url}/{name}", **options) for name in ("nowhere", topic)]
    async with shop_of(fresh_database("postgresql-18"), *places) as shop:
        shop.emit(20)
        async with shop.outbox.relay():
            await until(lambda: shop.states(topic) == {"delivered": 20}, "the other lane delivers")
            await until(lambda: any(error for _, _, error in shop.rows()), "there is a reason")
        reasons = {error for _, _, error in shop.rows() if error}
        assert shop.states("nowhere") == {"pending": 20}
        assert all("'nowhere'" in reason for reason in reasons)
        assert {attempts for _, attempts, _ in shop.rows()} <= {0, 1}
