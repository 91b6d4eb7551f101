"""Deliveries as messages of a real Kafka broker, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from relaybox.config import Destination
from relaybox.event import Delivery
from relaybox.outcome import Delivered, Reject, Released, Retry, Unavailable, Unreachable
from relaybox.parts import open_sink
from relaybox.sink import Answer
from relaybox.sinks import kafka_line, kafka_settings
from relaybox.sinks.kafka import KafkaSink
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration.kafka_log import headers, make_topic, read
from tests.servers import base, kafka


@pytest.fixture(scope="module")
def broker() -> Iterator[kafka.Broker]:
    """A broker that makes no topic by itself."""
    with available("Kafka", kafka.broker(auto_create=False)) as started:
        yield started


@pytest.fixture
def topic(broker: kafka.Broker) -> str:
    """A topic of this test."""
    return make_topic(broker.bootstrap)


async def send(sink: str, *deliveries: Delivery, **options: Any) -> list[Answer]:
    opened = open_sink(Destination("shop", sink, **{"timeout": "5s", **options}), {})
    try:
        return list(await opened.send(deliveries))
    finally:
        await opened.close()


def about(delivery: Delivery, **fields: Any) -> Delivery:
    return msgspec.structs.replace(delivery, **fields)


async def test_a_message_is_the_event_with_its_key_and_headers(broker: kafka.Broker, topic: str) -> None:
    own = {"tenant": "acme", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "relaybox-x": 1, "n": 7}
    delivery = make_delivery('{"total": 42}', headers=json.dumps(own))
    assert await send(f"{broker.url}/{topic}", delivery) == [Delivered()]

    [message] = read(broker.bootstrap, topic)
    body = json.loads(message.value())
    assert (body["id"], body["type"], body["data"]) == (str(delivery.event_id), "order.paid", {"total": 42})
    assert message.key() == b"1"
    assert headers(message) == {
        "content-type": "application/json",
        "event-id": str(delivery.event_id),
        "event-type": "order.paid",
        "aggregate-type": "Order",
        "aggregate-id": "1",
        "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
        "tenant": "acme",
        "n": "7",
    }


async def test_without_a_path_the_topic_is_of_the_aggregate_type(broker: kafka.Broker) -> None:
    make_topic(broker.bootstrap, "invoice-events")
    assert await send(broker.url, about(make_delivery(), aggregate_type="Invoice")) == [Delivered()]
    assert len(read(broker.bootstrap, "invoice-events")) == 1


async def test_each_event_has_the_topic_that_its_fields_make(broker: kafka.Broker) -> None:
    for name in ("eu.Order", "us.Order"):
        make_topic(broker.bootstrap, name)
    batch = [make_delivery(headers=f'{{"tenant": "{tenant}"}}') for tenant in ("eu", "us", "eu")]
    batch.append(make_delivery())
    *sent, lacking = await send(f"{broker.url}/{{tenant}}.{{aggregate_type}}", *batch)
    assert sent == [Delivered()] * 3
    assert isinstance(lacking, Reject)
    assert "tenant" in lacking.reason
    assert len(read(broker.bootstrap, "eu.Order")) == 2
    assert len(read(broker.bootstrap, "us.Order")) == 1


async def test_a_message_over_the_option_is_rejected_by_its_name(broker: kafka.Broker, topic: str) -> None:
    large, small = make_delivery(data=b"x" * 3000), make_delivery()
    answers = await send(f"{broker.url}/{topic}?max_message=2000", large, small)
    assert isinstance(answers[0], Reject)
    assert "max_message = 2000 bytes" in answers[0].reason
    assert answers[1] == Delivered()


async def test_a_message_over_the_topics_limit_is_rejected_and_its_batch_is_not(broker: kafka.Broker) -> None:
    topic = make_topic(broker.bootstrap, max_message_bytes="20000")
    batch = [make_delivery(data=b"x" * 500) for _ in range(100)]
    batch[50] = make_delivery(data=b"x" * 30_000)
    answers = await send(f"{broker.url}/{topic}?linger=50ms", *batch)
    rejected = answers.pop(50)
    assert isinstance(rejected, Reject)
    assert "max.message.bytes" in rejected.reason
    assert answers == [Delivered()] * 99
    assert len(read(broker.bootstrap, topic)) == 99


async def test_what_follows_a_refused_message_of_its_key_is_not_sent(broker: kafka.Broker) -> None:
    topic = make_topic(broker.bootstrap, max_message_bytes="20000")
    run = [make_delivery(data=b"x" * size, key="a") for size in (500, 30_000, 500)]
    answers = await send(f"{broker.url}/{topic}", *run, make_delivery(key="b"))
    assert [type(answer) for answer in answers] == [Delivered, Reject, Released, Delivered]
    sent = {headers(message)["event-id"] for message in read(broker.bootstrap, topic)}
    assert len(sent) == 2
    assert str(run[0].event_id) in sent


async def test_what_a_topic_does_not_take_is_rejected_and_its_batch_is_not(broker: kafka.Broker) -> None:
    topic = make_topic(broker.bootstrap, cleanup_policy="compact")
    batch = [make_delivery(key=key) for key in ("a", "b", None, "c")]
    answers = await send(f"{broker.url}/{topic}?linger=50ms", *batch, ordering=lambda call: "")
    assert isinstance(answers[2], Reject)
    assert topic in answers[2].reason
    assert [answers[0], answers[1], answers[3]] == [Delivered()] * 3
    assert len(read(broker.bootstrap, topic)) == 3


async def test_a_missing_topic_is_named_and_found_once_it_is_there(broker: kafka.Broker, topic: str) -> None:
    sink = open_sink(Destination("shop", f"{broker.url}/{{tenant}}", timeout="4s"), {})
    missing = f"missing-{topic}"
    lost, fine = (make_delivery(headers=f'{{"tenant": "{name}"}}') for name in (missing, topic))
    answers = await sink.send([lost, fine])
    assert type(answers[0]) is Unavailable
    assert missing in answers[0].reason
    assert answers[1] == Delivered()

    make_topic(broker.bootstrap, missing)
    async with asyncio.timeout(15):
        while await sink.send([lost]) != [Delivered()]:
            assert await sink.send([fine]) == [Delivered()]
    await sink.close()


async def test_a_name_that_no_topic_can_have_is_rejected(broker: kafka.Broker) -> None:
    [answer] = await send(f"{broker.url}/{{event_type}}", about(make_delivery(), event_type="order paid"))
    assert isinstance(answer, Reject)
    assert "'order paid'" in answer.reason


async def test_a_key_or_header_that_kafka_cannot_carry_is_rejected(broker: kafka.Broker, topic: str) -> None:
    batch = [make_delivery(key="\ud800"), make_delivery(headers='{"a\\u0000b": "x"}'), make_delivery(key="a")]
    *refused, fine = await send(f"{broker.url}/{topic}", *batch)
    assert [type(answer) for answer in refused] == [Reject, Reject]
    assert "NUL" in refused[1].reason
    assert fine == Delivered()


async def test_keys_and_headers_arrive_whole_whatever_they_hold(broker: kafka.Broker, topic: str) -> None:
    own = json.dumps({"a": "x\0y", "": "", "ü": "ß", "list": [1, None]})
    assert await send(f"{broker.url}/{topic}", make_delivery(key="a\0ß", headers=own)) == [Delivered()]
    [message] = read(broker.bootstrap, topic)
    found = headers(message)
    assert message.key() == "a\0ß".encode()
    assert (found["a"], found[""], found["ü"], found["list"]) == ("x\0y", "", "ß", "[1,null]")


@pytest.mark.parametrize("url", ["kafka://127.0.0.1:{port}", "kafka://localhost:{port},127.0.0.1:{port}"])
async def test_where_no_broker_is_the_circuit_opens_before_the_timeout(url: str) -> None:
    began = time.monotonic()
    [answer] = await send(url.format(port=base._free_port()), make_delivery(), timeout="20s")
    assert isinstance(answer, Unreachable)
    assert "refused" in answer.reason
    assert time.monotonic() - began < 5


async def test_where_no_broker_is_it_is_unreachable_each_time_however_short_the_timeout() -> None:
    sink = KafkaSink(Destination("shop", f"kafka://127.0.0.1:{base._free_port()}", timeout="300ms"))
    answers = [(await sink.send([make_delivery(), make_delivery()])) for _ in range(6)]
    await sink.close()
    assert {type(answer) for pair in answers for answer in pair} == {Unreachable}
    assert all("refused" in answer.reason for pair in answers for answer in pair)


async def test_a_broker_that_goes_away_in_the_middle_is_unreachable_each_time(
    broker: kafka.Broker, topic: str
) -> None:
    sink = KafkaSink(Destination("shop", f"{broker.url}/{topic}", timeout="1500ms"))
    assert await sink.send([make_delivery() for _ in range(100)]) == [Delivered()] * 100
    await asyncio.to_thread(broker.stop)
    try:
        answers = [(await sink.send([make_delivery()]))[0] for _ in range(4)]
    finally:
        await asyncio.to_thread(broker.start)
    assert [type(answer) for answer in answers] == [Unreachable] * 4
    async with asyncio.timeout(30):
        while await sink.send([make_delivery()]) != [Delivered()]:
            pass
    await sink.close()


async def test_a_connection_that_is_lost_in_the_midst_of_reports_counts_as_lost(
    broker: kafka.Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_line, "Producer", Losing)
    sink = KafkaSink(Destination("shop", f"{broker.url}/{topic}", timeout="5s"))
    assert await sink.send([make_delivery() for _ in range(3)]) == [Delivered()] * 3
    [answer] = await sink.send([make_delivery()])
    await sink.close()
    assert type(answer) is Unreachable
    assert "Disconnected" in answer.reason


class Losing(Producer):  # type: ignore[misc]
    """A producer that tells of the end of its connection with its third report, and takes nothing then."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        super().__init__(configuration)
        self._notice, self._reports, self._lost = configuration["error_cb"], 0, False

    def produce(self, *arguments: Any, on_delivery: Callable[..., None], **options: Any) -> None:
        def told(*report: Any) -> None:
            self._reports += 1
            on_delivery(*report)

        if not self._lost:
            super().produce(*arguments, on_delivery=told, **options)

    def poll(self, timeout: float = -1) -> int:
        reported = super().poll(timeout)
        if self._reports == 3 and not self._lost:
            self._lost = True
            self._notice(KafkaError(KafkaError._TRANSPORT, "Disconnected"))
        return reported


async def test_a_name_that_dns_does_not_know_is_unreachable() -> None:
    [answer] = await send("kafka://no-such-host.invalid", make_delivery(), timeout="10s")
    assert isinstance(answer, Unreachable)
    assert "no-such-host.invalid" in answer.reason


async def test_check_reaches_the_broker_and_its_topic(broker: kafka.Broker, topic: str) -> None:
    for path in (f"/{topic}", "/{tenant}", ""):
        sink = KafkaSink(Destination("shop", f"{broker.url}{path}", timeout="5s"))
        await sink.check()
        await sink.close()
    for url, why in ((f"{broker.url}/nowhere", "nowhere"), ("kafka://127.0.0.1:1", "refused")):
        sink = KafkaSink(Destination("shop", url, timeout="4s"))
        with pytest.raises(Unavailable, match=why):
            await sink.check()
        await sink.close()


async def test_a_silent_broker_is_unavailable_in_time_and_then_goes_on(
    broker: kafka.Broker, topic: str
) -> None:
    sink = KafkaSink(Destination("shop", f"{broker.url}/{topic}", timeout="3s"))
    assert await sink.send([make_delivery()]) == [Delivered()]
    broker.pause()
    try:
        began = time.monotonic()
        [answer] = await sink.send([make_delivery()])
        assert isinstance(answer, Unavailable)
        assert 2 <= time.monotonic() - began < 10
        # It is full of what the broker does not take, and is closed all the same.
        sending = asyncio.ensure_future(sink.send([make_delivery()]))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await sink.close()
            assert isinstance((await sending)[0], Retry)
    finally:
        broker.resume()
    assert await sink.send([make_delivery()]) == [Delivered()]
    await sink.close()


async def test_a_producer_that_is_full_is_waited_for(
    broker: kafka.Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_settings, "QUEUE", 10)
    batch = [make_delivery() for _ in range(200)]
    assert await send(f"{broker.url}/{topic}", *batch) == [Delivered()] * 200
    assert len(read(broker.bootstrap, topic)) == 200


class Failing(Producer):  # type: ignore[misc]
    """A producer that is of no use any more from its second message on, and the third of all is."""

    made = 0

    def __init__(self, configuration: dict[str, Any]) -> None:
        super().__init__(configuration)
        Failing.made += 1
        self._number, self._produced = Failing.made, 0
        self._notice = configuration["error_cb"]

    def produce(self, *arguments: Any, **options: Any) -> None:
        self._produced += 1
        if self._number == 1 and self._produced > 1:
            raise KafkaException(KafkaError(KafkaError._FATAL, fatal=True))
        super().produce(*arguments, **options)

    def poll(self, timeout: float = -1) -> int:
        if self._number == 2 and self._produced:
            self._notice(KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, fatal=True))
        return super().poll(timeout)


async def test_after_a_fatal_error_there_is_another_producer(
    broker: kafka.Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_line, "Producer", Failing)
    monkeypatch.setattr(Failing, "made", 0)
    sink = KafkaSink(Destination("shop", f"{broker.url}/{topic}", timeout="5s"))
    answers = [*await sink.send([make_delivery(), make_delivery()]), *await sink.send([make_delivery()])]
    assert [type(answer) for answer in answers] == [Unavailable] * 3
    assert await sink.send([make_delivery()]) == [Delivered()]
    assert Failing.made == 3
    await sink.close()


async def test_no_more_sends_are_under_way_than_the_limit_allows(broker: kafka.Broker, topic: str) -> None:
    sink = KafkaSink(Destination("shop", f"{broker.url}/{topic}", timeout="5s"))
    sink.limit(0)
    sending = asyncio.ensure_future(sink.send([make_delivery()]))
    done, _ = await asyncio.wait([sending], timeout=0.1)
    assert not done
    sink.limit(1)
    assert await sending == [Delivered()]
    await sink.close()


async def test_the_library_writes_nothing_to_the_terminal(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await send("kafka://127.0.0.1:1/x", make_delivery(), timeout="2s")
    assert capfd.readouterr() == ("", "")
    assert "refused" in caplog.text
    assert {record.levelno for record in caplog.records if record.name == "relaybox.kafka"} == {logging.DEBUG}


def test_a_sink_serves_one_event_loop_after_the_other(broker: kafka.Broker, topic: str) -> None:
    sink = KafkaSink(Destination("shop", f"{broker.url}/{topic}", timeout="5s"))
    for _ in range(2):
        assert asyncio.run(sink.send([make_delivery()])) == [Delivered()]
    asyncio.run(sink.close())
    assert len(read(broker.bootstrap, topic)) == 2


def test_a_process_that_was_forked_has_a_producer_of_its_own(broker: kafka.Broker, topic: str) -> None:
    sink = KafkaSink(Destination("shop", f"{broker.url}/{topic}", timeout="5s"))
    assert asyncio.run(sink.send([make_delivery()])) == [Delivered()]

    def child() -> None:
        assert asyncio.run(sink.send([make_delivery()])) == [Delivered()]
        asyncio.run(sink.close())

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert asyncio.run(sink.send([make_delivery()])) == [Delivered()]
    asyncio.run(sink.close())
    assert len(read(broker.bootstrap, topic)) == 3
