"""A relay that empties an outbox into queues and topics, also while the service is away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

from relaybox import Call, Destination, Route
from tests.chaos.proxy import Proxy
from tests.integration.amazon import Amazon, Received, sink_at
from tests.integration.shop import Shop, until

EVENTS, KEYS = 200, 20
"""Few, because moto looks at all that is in a queue with every request."""


@pytest.fixture(scope="module")
def amazon(moto_url: str) -> Iterator[Amazon]:
    with Amazon(moto_url) as amazon:
        yield amazon


def orders(shop: Shop, count: int = EVENTS) -> None:
    calls = [Call("Order", n % KEYS, "order.paid", {"n": n}, tenant=f"t{n % 7}") for n in range(count)]
    with shop.engine.begin() as connection:
        shop.outbox.emit_many(connection, calls)


def by_key(messages: list[Received]) -> dict[str, list[int]]:
    """The numbers of the orders by key, in the order of their arrival; headers and groups are right."""
    found: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        body = message.json
        n = body["data"]["n"]
        assert message.attributes["event-id"] == body["id"]
        assert message.attributes["aggregate-id"] == str(n % KEYS)
        assert message.attributes["tenant"] == f"t{n % 7}"
        assert message.group in (None, f"Order:{n % KEYS}")
        found[message.attributes["aggregate-id"]].append(n)
    return found


def first_ones(numbers: list[int]) -> list[int]:
    return list(dict.fromkeys(numbers))


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("standard", EVENTS),
        ("fifo", EVENTS),
        ("topic", EVENTS),
        pytest.param("standard", 3 * EVENTS, marks=pytest.mark.slow),
    ],
)
async def test_all_events_arrive_through_a_relay_each_key_in_order(
    amazon: Amazon, fresh_database: Callable[[str], str], kind: str, count: int
) -> None:
    suffix = "" if kind == "standard" else ".fifo"
    if kind == "topic":
        path, queue = amazon.topic(suffix)
    else:
        queue = amazon.queue(suffix)
        path = queue.name
    destination = Destination("aws", amazon.sink(path), ordered=True)
    shop = Shop(fresh_database("postgresql-18"), destinations=[destination], routes=[Route("*", to="aws")])
    orders(shop, count)
    await shop.outbox.adrain()
    assert shop.states() == {"delivered": count}

    found = by_key(amazon.take(queue))
    assert found == {str(key): list(range(key, count, KEYS)) for key in range(KEYS)}
    shop.engine.dispose()


async def test_a_service_that_goes_away_in_the_middle_gets_everything_when_it_is_back(
    amazon: Amazon, fresh_database: Callable[[str], str]
) -> None:
    queue = amazon.queue(".fifo")
    with Proxy("127.0.0.1", int(amazon.endpoint.rpartition(":")[2])) as way:
        destination = Destination(
            "aws",
            sink_at(f"http://127.0.0.1:{way.port}", queue.name),
            ordered=True,
            backoff={"base": "50ms", "cap": "200ms"},
            poll_interval="50ms",
            timeout="5s",
        )
        shop = Shop(
            fresh_database("postgresql-18"), destinations=[destination], routes=[Route("*", to="aws")]
        )
        orders(shop)
        async with shop.outbox.relay():
            await until(lambda: shop.states().get("delivered", 0) > EVENTS // 4, "a part is delivered")
            way.set(refuse=True)
            way.reset()
            await until(lambda: shop.circuit("aws") != "closed", "the circuit opens")
            assert shop.states().get("pending", 0) > 0
            assert "failed" not in shop.states()
            way.set()
            await until(lambda: shop.states() == {"delivered": EVENTS}, "all is delivered", 60)
    found = by_key(amazon.take(queue))
    assert {key: first_ones(numbers) for key, numbers in found.items()} == {
        str(key): list(range(key, EVENTS, KEYS)) for key in range(KEYS)
    }
    shop.engine.dispose()


async def test_one_bad_event_is_failed_with_its_reason_and_the_rest_goes_on(
    amazon: Amazon, fresh_database: Callable[[str], str]
) -> None:
    queue = amazon.queue()
    destination = Destination("aws", amazon.sink(queue.name))
    shop = Shop(fresh_database("sqlite"), destinations=[destination], routes=[Route("*", to="aws")])
    with shop.engine.begin() as connection:
        for n in range(20):
            headers = {"my header": "1"} if n == 7 else None
            shop.outbox.emit(connection, "Order", n, "order.paid", {"n": n}, headers=headers)
    await shop.outbox.adrain()
    assert shop.states() == {"delivered": 19, "failed": 1}
    [error] = [error for status, _, error in shop.rows() if status == "failed"]
    assert "'my header' is no name of an attribute" in str(error)
    assert len(amazon.take(queue)) == 19
    shop.engine.dispose()
