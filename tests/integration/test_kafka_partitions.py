"""Which partition of a Kafka topic a message lands in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from relaybox import Call
from relaybox.config import Destination
from relaybox.outcome import Delivered
from relaybox.parts import open_sink
from relaybox.testing.sink_contract import make_delivery
from tests.integration.kafka_log import make_topic, read
from tests.integration.shop import Shop

JAVA = {"21": -973932308, "foobar": -790332482, "abc": 479470107}
"""What the hash function of Kafka's own client makes of these keys."""


def by_length(call: Any) -> str:
    return "21" if len(call.payload["text"]) > 1 else "abc"


@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        ("aggregate", lambda n: list(JAVA)[n % 3]),
        ("tenant", lambda n: list(JAVA)[n // 3 % 3]),
        ("event_type", lambda n: list(JAVA)[n // 9 % 3]),
        (by_length, lambda n: "21" if n > 9 else "abc"),
    ],
)
async def test_a_message_lands_in_the_partition_that_java_would_choose_for_its_key(
    strategy: Any,
    key: Callable[[int], str],
    kafka_url: str,
    fresh_database: Callable[[str], str],
) -> None:
    bootstrap = kafka_url.removeprefix("kafka://")
    topic = make_topic(bootstrap, partitions=7)
    place = Destination("kafka", f"{kafka_url}/{topic}", ordered=True, ordering=strategy, timeout="5s")
    shop = Shop(fresh_database("sqlite"), destinations=[place])
    names = list(JAVA)
    calls = [
        Call(
            "Order",
            names[n % 3],
            names[n // 9 % 3],
            {"text": str(n), "n": n},
            tenant=names[n // 3 % 3],
            destinations=["kafka"],
        )
        for n in range(27)
    ]
    with shop.engine.begin() as connection:
        shop.outbox.emit_many(connection, calls)
    await shop.outbox.adrain()

    found = {json.loads(m.value())["data"]["n"]: m for m in read(bootstrap, topic)}
    assert len(found) == 27
    for n, message in found.items():
        assert message.key() == key(n).encode()
        assert message.partition() == (JAVA[key(n)] & 0x7FFFFFFF) % 7
    shop.engine.dispose()


async def test_without_a_strategy_messages_have_no_key_and_spread(kafka_url: str) -> None:
    bootstrap = kafka_url.removeprefix("kafka://")
    topic = make_topic(bootstrap, partitions=7)
    sink = open_sink(Destination("shop", f"{kafka_url}/{topic}", ordering="none", timeout="5s"), {})
    for _ in range(12):
        assert await sink.send([make_delivery() for _ in range(20)]) == [Delivered()] * 20
    await sink.close()
    messages = read(bootstrap, topic)
    assert {message.key() for message in messages} == {None}
    assert len({message.partition() for message in messages}) > 1
