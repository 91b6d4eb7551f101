"""Deliveries as messages in queues and topics of moto's server, also through a relay."""

from __future__ import annotations

import base64
import json
import re
from collections import defaultdict
from collections.abc import Callable

import msgspec
import pytest

from relaybox import Call, Destination, Route
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Released, Retry, Unavailable
from relaybox.testing.sink_contract import make_delivery, type_of
from tests.chaos.proxy import Proxy
from tests.integration.amazon import Amazon, Received, amazon, sink_at  # noqa: F401
from tests.integration.outages import shop_to
from tests.integration.receivers import answer, answering
from tests.integration.shop import Shop
from tests.integration.sinking import check_refused, send
from tests.waiting import await_for

pytestmark = pytest.mark.full

# ruff: noqa: F811

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EVENTS, KEYS = 200, 20
"""Few, because moto looks at all that is in a queue with every request."""
IN_ORDER = {str(key): list(range(key, EVENTS, KEYS)) for key in range(KEYS)}


async def test_a_message_is_the_event_and_says_what_it_is(amazon: Amazon) -> None:
    queue = amazon.queue()
    headers = {"tenant": "acme", "traceparent": TRACEPARENT, "event-id": "forged", "retry": [1]}
    delivery = make_delivery(headers=json.dumps(headers))
    assert await send(amazon.sink(queue.name), delivery) == [Delivered()]
    [message] = amazon.take(queue)
    assert (message.json["id"], message.json["data"]) == (str(delivery.event_id), {"total": 42})
    assert message.attributes == {
        "event-id": str(delivery.event_id),
        "event-type": "order.paid",
        "aggregate-type": "Order",
        "aggregate-id": "1",
        "content-type": "application/json",
        "traceparent": TRACEPARENT,
        "retry": "[1]",
        "tenant": "acme",
    }


async def test_of_the_emitters_headers_there_are_as_many_as_there_is_room_for(amazon: Amazon) -> None:
    queue = amazon.queue()
    headers = {f"h{number}": str(number) for number in range(9)} | {"a": ""}
    assert await send(amazon.sink(queue.name), make_delivery(headers=json.dumps(headers))) == [Delivered()]
    [message] = amazon.take(queue)
    assert len(message.attributes) == 10
    assert sorted(message.attributes.keys() & headers) == ["h0", "h1", "h2", "h3", "h4"]


async def test_bytes_are_base64_and_say_so(amazon: Amazon) -> None:
    queue = amazon.queue()
    delivery = make_delivery(data=b"\xff\x00")
    assert await send(amazon.sink(queue.name), delivery, format="payload") == [Delivered()]
    [message] = amazon.take(queue)
    assert base64.b64decode(message.body) == b"\xff\x00"
    assert message.attributes["content-type"] == "application/octet-stream"
    assert message.attributes["content-transfer-encoding"] == "base64"


async def test_a_character_that_sqs_refuses_is_escaped_in_a_body_of_json(amazon: Amazon) -> None:
    queue = amazon.queue()
    delivery = make_delivery('{"text": "\ufffe\uffff\U0001f600\x7f"}')
    assert await send(amazon.sink(queue.name), delivery, format="payload") == [Delivered()]
    [message] = amazon.take(queue)
    assert message.body == '{"text": "\\ufffe\\uffff\U0001f600\x7f"}'
    assert message.json == {"text": "\ufffe\uffff\U0001f600\x7f"}


async def test_in_a_fifo_queue_the_group_is_the_key_and_a_second_delivery_has_no_effect(
    amazon: Amazon,
) -> None:
    queue = amazon.queue(".fifo")
    first = make_delivery(key="Order:1")
    again = msgspec.structs.replace(first, attempts=2)
    assert await send(amazon.sink(queue.name), first) == [Delivered()]
    assert await send(amazon.sink(queue.name), again, make_delivery()) == [Delivered()] * 2
    messages = amazon.take(queue)
    assert sorted(str(message.group) for message in messages) == ["1", "Order:1"]
    assert str(first.event_id) in {message.deduplication for message in messages}


@pytest.mark.parametrize("mark", ["relaybox-replay", "relaybox-dead-letter-from"])
async def test_a_copy_that_was_asked_for_is_not_a_duplicate(amazon: Amazon, mark: str) -> None:
    queue = amazon.queue(".fifo")
    first = make_delivery(key="Order:1")
    copy = msgspec.structs.replace(first, id=make_delivery().id, headers=json.dumps({mark: "shop"}))
    assert await send(amazon.sink(queue.name), first) == [Delivered()]
    assert await send(amazon.sink(queue.name), copy) == [Delivered()]
    assert len(amazon.take(queue)) == 2


async def test_a_key_that_cannot_name_a_group_is_replaced_by_a_digest(amazon: Amazon) -> None:
    queue = amazon.queue(".fifo")
    keys = ["Order:ü", "Order: 2", "x" * 200, "x" * 201, "x" * 128]
    assert await send(amazon.sink(queue.name), *(make_delivery(key=key) for key in keys)) == [Delivered()] * 5
    groups = [str(message.group) for message in amazon.take(queue)]
    assert len(set(groups)) == 5
    assert sum(re.fullmatch(r"sha256:[0-9a-f]{64}", group) is not None for group in groups) == 4
    assert "x" * 128 in groups


@pytest.mark.parametrize(
    ("delivery", "reason"),
    [
        (make_delivery(headers='{"my header": "1"}'), "'my header' is not a name of an SQS attribute"),
        (make_delivery(headers='{"AWS.trace": "1"}'), "'AWS.trace' is not a name"),
        (make_delivery(headers='{"a..b": "1"}'), "'a..b' is not a name"),
        (make_delivery(headers='{"%s": "1"}' % ("a" * 257)), "is not a name"),
        (make_delivery(headers='{"note": "\\u0007"}'), r"'note' holds '\\x07'"),
        (make_delivery('"%s"' % ("x" * 1_048_576)), "no more than 1048576"),
        (make_delivery(data=b""), "empty"),
    ],
)
async def test_what_sqs_would_refuse_is_rejected_and_spoils_nothing(
    amazon: Amazon, delivery: Delivery, reason: str
) -> None:
    queue = amazon.queue()
    format = "payload" if delivery.payload_data is not None else "json"
    others = [make_delivery() for _ in range(9)]
    answers = await send(amazon.sink(queue.name), *others[:4], delivery, *others[4:], format=format)
    assert [type_of(one) for one in answers] == [*[Delivered] * 4, Reject, *[Delivered] * 5]
    assert re.search(reason, str(answers[4]))
    assert len(amazon.take(queue)) == 9


async def test_large_messages_are_spread_over_requests(amazon: Amazon) -> None:
    queue = amazon.queue()
    batch = [make_delivery('"%s"' % (str(number) * 200_000)) for number in range(10)]
    assert await send(amazon.sink(queue.name), *batch) == [Delivered()] * 10
    assert sorted(message.json["data"][0] for message in amazon.take(queue)) == list("0123456789")


async def test_a_queue_with_a_lower_limit_says_so_of_the_message_that_is_over_it(amazon: Amazon) -> None:
    queue = amazon.queue(MaximumMessageSize="2048")
    batch = [make_delivery(), make_delivery('"%s"' % ("x" * 4_000)), make_delivery()]
    answers = await send(amazon.sink(queue.name), *batch)
    assert [type_of(one) for one in answers] == [Delivered, Reject, Delivered]
    assert "2048" in str(answers[1])


async def test_events_go_to_the_queue_of_their_fields_and_a_missing_one_is_alone(amazon: Amazon) -> None:
    there, also = amazon.queue(), amazon.queue()
    names = [there.name, also.name, "missing", "no name", there.name]
    batch = [make_delivery(headers=json.dumps({"tenant": name})) for name in names]
    answers = await send(amazon.sink("{tenant}"), *batch, make_delivery())
    assert [type_of(one) for one in answers] == [Delivered, Delivered, Unavailable, Reject, Delivered, Reject]
    assert "'no name' is not a name of an SQS queue" in str(answers[3])
    assert "needs a tenant" in str(answers[5])
    assert (len(amazon.take(there)), len(amazon.take(also))) == (2, 1)


async def test_a_queue_of_another_account_is_asked_for_there(amazon: Amazon) -> None:
    queue = amazon.queue()
    account = queue.url.split("/")[-2]
    assert await send(amazon.sink(f"{account}/{queue.name}"), make_delivery()) == [Delivered()]
    arn = f"arn:aws:sqs:eu-west-1:{account}:{queue.name}"
    assert await send(amazon.sink(arn), make_delivery()) == [Delivered()]
    assert len(amazon.take(queue)) == 2
    # moto answers for every account.
    async with answering(answer("400 Bad Request", b"{}")) as service:
        sink = sink_at(f"http://127.0.0.1:{service.port}", "999999999999/orders")
        assert isinstance((await send(sink, make_delivery()))[0], Retry)
    asked = json.loads(service.requests[0].body)
    assert asked == {"QueueName": "orders", "QueueOwnerAWSAccountId": "999999999999"}


@pytest.mark.parametrize("suffix", ["", ".fifo"])
async def test_a_topic_gets_messages_and_hands_them_on(amazon: Amazon, suffix: str) -> None:
    arn, queue = amazon.topic(suffix)
    batch = [make_delivery(key="Order:1", headers='{"tenant": "acme"}') for _ in range(12)]
    assert await send(amazon.sink(arn), *batch) == [Delivered()] * 12
    messages = amazon.take(queue)
    ids = [message.attributes["event-id"] for message in messages]
    assert ids == [str(delivery.event_id) for delivery in batch]
    assert {message.attributes["tenant"] for message in messages} == {"acme"}
    assert {message.group for message in messages} == ({"Order:1"} if suffix else {None})


async def test_a_topic_that_is_missing_is_named(amazon: Amazon) -> None:
    arn, _ = amazon.topic()
    [missing] = await send(amazon.sink(f"{arn}-later"), make_delivery())
    check_refused(missing, Unavailable, "no SNS topic 'shop-")


async def test_the_rest_of_a_key_waits_for_a_message_that_did_not_arrive(amazon: Amazon) -> None:
    queue = amazon.queue(".fifo")
    run = [make_delivery(key="a") for _ in range(3)]
    run[1] = msgspec.structs.replace(run[1], headers='{"my header": "1"}')
    answers = await send(amazon.sink(queue.name), *run, make_delivery(key="b"))
    assert [type_of(one) for one in answers] == [Delivered, Reject, Released, Delivered]


# --- through a relay ---


def orders(shop: Shop, numbers: range) -> None:
    calls = [Call("Order", n % KEYS, "order.paid", {"n": n}, tenant=f"t{n % 7}") for n in numbers]
    with shop.engine.begin() as connection:
        shop.outbox.emit_many(connection, calls)


def by_key(messages: list[Received]) -> dict[str, list[int]]:
    """Return the numbers of the orders by key, in the order of their arrival; check headers and groups."""
    found: dict[str, list[int]] = defaultdict(list)
    for message in messages:
        body, attributes = message.json, message.attributes
        n = body["data"]["n"]
        assert attributes["event-id"] == body["id"]
        assert (attributes["aggregate-id"], attributes["tenant"]) == (str(n % KEYS), f"t{n % 7}")
        assert message.group in (None, f"Order:{n % KEYS}")
        found[attributes["aggregate-id"]].append(n)
    return found


@pytest.mark.parametrize("kind", ["standard", "fifo", "topic"])
async def test_all_events_arrive_through_a_relay_each_key_in_order(
    amazon: Amazon, migrated_database: Callable[[str], str], kind: str
) -> None:
    if kind == "topic":
        path, queue = amazon.topic(".fifo")
    else:
        queue = amazon.queue("" if kind == "standard" else ".fifo")
        path = queue.name
    shop = shop_to(amazon.sink(path), migrated_database("postgresql-18"), timeout="30s")
    orders(shop, range(EVENTS))
    await shop.outbox.adrain()
    assert shop.states() == {"delivered": EVENTS}
    assert by_key(amazon.take(queue)) == IN_ORDER


async def test_a_service_that_goes_away_in_the_middle_gets_everything_when_it_is_back(
    amazon: Amazon, migrated_database: Callable[[str], str]
) -> None:
    queue = amazon.queue(".fifo")
    with Proxy("127.0.0.1", int(amazon.endpoint.rpartition(":")[2])) as way:
        sink = sink_at(f"http://127.0.0.1:{way.port}", queue.name)
        shop = shop_to(sink, migrated_database("postgresql-18"))
        orders(shop, range(EVENTS // 2))
        async with shop.outbox.relay():
            await await_for(lambda: shop.states().get("delivered", 0) > EVENTS // 4, "a part is delivered")
            way.set(refuse=True)
            way.reset()
            orders(shop, range(EVENTS // 2, EVENTS))
            await await_for(lambda: shop.circuit("broker") != "closed", "the circuit opens")
            assert shop.states().get("pending", 0) >= EVENTS // 2
            assert "failed" not in shop.states()
            way.set()
            await await_for(lambda: shop.states() == {"delivered": EVENTS}, "all is delivered")
    found = by_key(amazon.take(queue))
    assert {key: list(dict.fromkeys(numbers)) for key, numbers in found.items()} == IN_ORDER


async def test_one_bad_event_is_failed_with_its_reason_and_the_rest_goes_on(
    amazon: Amazon, migrated_database: Callable[[str], str]
) -> None:
    queue = amazon.queue()
    destination = Destination("aws", amazon.sink(queue.name))
    shop = Shop(migrated_database("sqlite"), destinations=[destination], routes=[Route("*", to="aws")])
    with shop.engine.begin() as connection:
        for n in range(20):
            headers = {"my header": "1"} if n == 7 else None
            shop.outbox.emit(connection, "Order", n, "order.paid", {"n": n}, headers=headers)
    await shop.outbox.adrain()
    assert shop.states() == {"delivered": 19, "failed": 1}
    [error] = [error for status, _, error in shop.rows() if status == "failed"]
    assert "'my header' is not a name of an SQS attribute" in str(error)
    assert len(amazon.take(queue)) == 19
