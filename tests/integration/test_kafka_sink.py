"""Deliveries as messages of a real Kafka broker: what it refuses, which peers it trusts, and outages."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from relaybox import Call
from relaybox.core.outcome import Delivered, Reject, Released, Retry, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.sinks.kafka import producer as kafka_producer
from relaybox.sinks.kafka import sink as kafka_sink
from relaybox.sinks.kafka.sink import KafkaSink
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration.kafka_log import headers, make_topic, make_user, read
from tests.integration.outages import (
    MANY,
    Entry,
    Place,
    RelayContract,
    checked,
    read_back,
    shop_to,
    untroubled,
)
from tests.integration.sinking import PATIENT, altered, check_refused, deliver, send, sink_to
from tests.servers import kafka
from tests.waiting import PATIENCE, await_for

pytestmark = pytest.mark.full

JAVA = {"21": -973932308, "foobar": -790332482, "abc": 479470107}
"""What the hash function of Kafka's own client makes of these keys."""


@pytest.fixture(scope="module")
def broker() -> Iterator[kafka.Broker]:
    """Run a broker that does not create topics by itself."""
    with available("Kafka", kafka.broker(auto_create=False)) as started:
        yield started


class KafkaPlace(Place):
    """A topic of one test, which may have duplicates of what was under way in a crash."""

    duplicates = MANY

    def __init__(self, server: kafka.Broker, **config: Any) -> None:
        super().__init__(server)
        self.topic = make_topic(server.bootstrap, **config)

    @property
    def url(self) -> str:
        return f"{self.server.url}/{self.topic}"

    def read(self) -> list[Message]:
        return read(self.server.bootstrap, self.topic)

    async def entries(self) -> list[Entry]:
        messages = self.read()
        for message in messages:
            assert message.key().decode() == headers(message)["aggregate-id"]
        return [(headers(message), message.value()) for message in messages]


@pytest.fixture
def log(broker: kafka.Broker) -> KafkaPlace:
    return KafkaPlace(broker)


async def test_a_message_is_the_event_with_its_key_and_headers(log: KafkaPlace) -> None:
    own = {"tenant": "acme", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "relaybox-x": 1, "n": 7}
    delivery = make_delivery('{"total": 42}', headers=json.dumps(own))
    assert await send(log.url, delivery) == [Delivered()]
    [message] = log.read()
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
    assert await send(broker.url, altered(aggregate_type="Invoice")) == [Delivered()]
    assert len(read(broker.bootstrap, "invoice-events")) == 1


async def test_each_event_has_the_topic_that_its_fields_make(broker: kafka.Broker) -> None:
    for name in ("eu.Order", "us.Order"):
        make_topic(broker.bootstrap, name)
    batch = [make_delivery(headers=f'{{"tenant": "{tenant}"}}') for tenant in ("eu", "us", "eu")]
    batch.append(make_delivery())
    *sent, lacking = await send(f"{broker.url}/{{tenant}}.{{aggregate_type}}", *batch)
    assert sent == [Delivered()] * 3
    check_refused(lacking, Reject, "tenant")
    assert len(read(broker.bootstrap, "eu.Order")) == 2
    assert len(read(broker.bootstrap, "us.Order")) == 1


async def test_a_message_over_the_option_is_rejected_by_its_name(log: KafkaPlace) -> None:
    large, small = make_delivery(data=b"x" * 3000), make_delivery()
    answers = await send(f"{log.url}?max_message=2000", large, small)
    check_refused(answers[0], Reject, "max_message = 2000 bytes")
    assert answers[1] == Delivered()


async def test_a_message_over_the_topics_limit_is_rejected_and_its_batch_is_not(broker: kafka.Broker) -> None:
    log = KafkaPlace(broker, max_message_bytes="20000")
    batch = [make_delivery(data=b"x" * 500) for _ in range(100)]
    batch[50] = make_delivery(data=b"x" * 30_000)
    answers = await send(f"{log.url}?linger=50ms", *batch)
    check_refused(answers.pop(50), Reject, "max.message.bytes")
    assert answers == [Delivered()] * 99
    assert len(log.read()) == 99


async def test_what_follows_a_refused_message_of_its_key_is_not_sent(broker: kafka.Broker) -> None:
    log = KafkaPlace(broker, max_message_bytes="20000")
    run = [make_delivery(data=b"x" * size, key="a") for size in (500, 30_000, 500)]
    answers = await send(log.url, *run, make_delivery(key="b"))
    assert [type(answer) for answer in answers] == [Delivered, Reject, Released, Delivered]
    sent = {headers(message)["event-id"] for message in log.read()}
    assert len(sent) == 2
    assert str(run[0].event_id) in sent


async def test_what_a_topic_does_not_take_is_rejected_and_its_batch_is_not(broker: kafka.Broker) -> None:
    log = KafkaPlace(broker, cleanup_policy="compact")
    batch = [make_delivery(key=key) for key in ("a", "b", None, "c")]
    answers = await send(f"{log.url}?linger=50ms", *batch, ordering=lambda call: "")
    check_refused(answers[2], Reject, log.topic)
    assert [answers[0], answers[1], answers[3]] == [Delivered()] * 3
    assert len(log.read()) == 3


async def test_a_missing_topic_is_named_and_found_once_it_is_there(log: KafkaPlace) -> None:
    missing = f"missing-{log.topic}"
    lost, fine = (make_delivery(headers=f'{{"tenant": "{name}"}}') for name in (missing, log.topic))
    async with sink_to(f"{log.server.url}/{{tenant}}") as sink:
        answers = await sink.send([lost, fine])
        assert type(answers[0]) is Unavailable
        assert missing in answers[0].reason
        assert answers[1] == Delivered()
        make_topic(log.server.bootstrap, missing)

        async def found() -> bool:
            assert await sink.send([fine]) == [Delivered()]
            return await sink.send([lost]) == [Delivered()]

        await await_for(found, "the topic is found")


async def test_a_name_that_no_topic_can_have_is_rejected(broker: kafka.Broker) -> None:
    [answer] = await send(f"{broker.url}/{{event_type}}", altered(event_type="order paid"))
    check_refused(answer, Reject, "'order paid'")


async def test_a_key_or_header_that_kafka_cannot_carry_is_rejected(log: KafkaPlace) -> None:
    batch = [make_delivery(key="\ud800"), make_delivery(headers='{"a\\u0000b": "x"}'), make_delivery(key="a")]
    *refused, fine = await send(log.url, *batch)
    assert [type(answer) for answer in refused] == [Reject, Reject]
    assert "NUL" in refused[1].reason
    assert fine == Delivered()


async def test_keys_and_headers_arrive_whole_whatever_they_hold(log: KafkaPlace) -> None:
    own = json.dumps({"a": "x\0y", "": "", "ü": "ß", "list": [1, None]})
    assert await send(log.url, make_delivery(key="a\0ß", headers=own)) == [Delivered()]
    [message] = log.read()
    found = headers(message)
    assert message.key() == "a\0ß".encode()
    assert (found["a"], found[""], found["ü"], found["list"]) == ("x\0y", "", "ß", "[1,null]")


@pytest.mark.parametrize("nowhere", ["kafka://127.0.0.1:1", "kafka://localhost:1,127.0.0.1:1"])
async def test_where_no_broker_is_the_circuit_opens_before_the_timeout(nowhere: str) -> None:
    [answer] = await send(nowhere, make_delivery(), **PATIENT)
    check_refused(answer, Unreachable, "refused")


async def test_where_no_broker_is_it_is_unreachable_each_time_however_short_the_timeout() -> None:
    async with sink_to("kafka://127.0.0.1:1", timeout="300ms") as sink:
        for _ in range(6):
            for answer in await sink.send([make_delivery(), make_delivery()]):
                check_refused(answer, Unreachable, "refused")


async def test_a_broker_that_goes_away_in_the_middle_is_unreachable_each_time(log: KafkaPlace) -> None:
    async with sink_to(log.url, timeout="1500ms") as sink:
        await deliver(sink, *(make_delivery() for _ in range(100)))
        await asyncio.to_thread(log.server.stop)
        try:
            answers = [(await sink.send([make_delivery()]))[0] for _ in range(4)]
        finally:
            await asyncio.to_thread(log.server.start)
        assert [type(answer) for answer in answers] == [Unreachable] * 4
        await deliver(sink)


async def test_a_connection_that_is_lost_in_the_midst_of_reports_counts_as_lost(
    log: KafkaPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_producer, "Producer", Losing)
    async with sink_to(log.url) as sink:
        assert await sink.send([make_delivery() for _ in range(3)]) == [Delivered()] * 3
        [answer] = await sink.send([make_delivery()])
    check_refused(answer, Unreachable, "Disconnected")


class Losing(Producer):  # type: ignore[misc]
    """A producer that tells of the end of its connection with its third report, and takes nothing then."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        super().__init__(configuration)
        self._notice, self._reports, self._lost = configuration["error_cb"], 0, False

    def produce(self, *arguments: Any, on_delivery: Callable[..., None], **options: Any) -> None:
        def on_report(*report: Any) -> None:
            self._reports += 1
            on_delivery(*report)

        if not self._lost:
            super().produce(*arguments, on_delivery=on_report, **options)

    def poll(self, timeout: float = -1) -> int:
        reported = super().poll(timeout)
        if self._reports == 3 and not self._lost:
            self._lost = True
            self._notice(KafkaError(KafkaError._TRANSPORT, "Disconnected"))
        return reported


async def test_a_name_that_dns_does_not_know_is_unreachable() -> None:
    [answer] = await send("kafka://no-such-host.invalid", make_delivery())
    check_refused(answer, Unreachable, "no-such-host.invalid")


async def test_check_reaches_the_broker_and_its_topic(log: KafkaPlace) -> None:
    for path in (f"/{log.topic}", "/{tenant}", ""):
        assert await checked(f"{log.server.url}{path}") == "fine"
    assert "nowhere" in await checked(f"{log.server.url}/nowhere")
    assert "refused" in await checked("kafka://127.0.0.1:1")


async def test_a_silent_broker_is_unavailable_after_the_timeout_and_then_goes_on(log: KafkaPlace) -> None:
    async with sink_to(log.url, timeout="1s") as sink:
        await deliver(sink)
        log.server.pause()
        try:
            began = time.monotonic()
            [answer] = await asyncio.wait_for(sink.send([make_delivery()]), PATIENCE)
            assert isinstance(answer, Unavailable)
            assert time.monotonic() - began > 0.6
            # It is full of what the broker does not take, and is closed all the same.
            sending = asyncio.ensure_future(sink.send([make_delivery()]))
            await asyncio.sleep(0)
            async with asyncio.timeout(PATIENCE):
                await sink.close()
                assert isinstance((await sending)[0], Retry)
        finally:
            log.server.resume()
        await deliver(sink)


async def test_a_producer_that_is_full_is_waited_for(
    log: KafkaPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_sink, "QUEUE", 10)
    batch = [make_delivery() for _ in range(200)]
    assert await send(log.url, *batch) == [Delivered()] * 200
    assert len(log.read()) == 200


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
    log: KafkaPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_producer, "Producer", Failing)
    monkeypatch.setattr(Failing, "made", 0)
    async with sink_to(log.url) as sink:
        answers = [*await sink.send([make_delivery(), make_delivery()]), *await sink.send([make_delivery()])]
        assert [type(answer) for answer in answers] == [Unavailable] * 3
        assert await sink.send([make_delivery()]) == [Delivered()]
    assert Failing.made == 3


async def test_no_more_sends_are_under_way_than_the_limit_allows(log: KafkaPlace) -> None:
    async with sink_to(log.url) as sink:
        sink.limit(0)
        sending = asyncio.ensure_future(sink.send([make_delivery()]))
        done, _ = await asyncio.wait([sending], timeout=0.1)
        assert not done
        sink.limit(1)
        assert await sending == [Delivered()]


async def test_the_library_writes_nothing_to_the_terminal(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await send("kafka://127.0.0.1:1/x", make_delivery())
    assert capfd.readouterr() == ("", "")
    assert "refused" in caplog.text
    assert {record.levelno for record in caplog.records if record.name == "relaybox.kafka"} == {logging.DEBUG}


def test_a_sink_serves_one_event_loop_after_the_other_and_a_forked_process(log: KafkaPlace) -> None:
    sink = KafkaSink(Destination("shop", log.url, timeout="30s"))
    assert asyncio.run(sink.send([make_delivery()])) == [Delivered()]

    def child() -> None:
        assert asyncio.run(sink.send([make_delivery()])) == [Delivered()]
        asyncio.run(sink.close())

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert asyncio.run(sink.send([make_delivery()])) == [Delivered()]
    asyncio.run(sink.close())
    assert len(log.read()) == 3


# --- which clients a broker trusts and lets in ---


async def test_a_port_that_speaks_no_tls_is_unreachable(log: KafkaPlace) -> None:
    [answer] = await send(f"{log.url}?security=ssl", make_delivery())
    assert isinstance(answer, Unreachable)


async def test_a_broker_is_trusted_by_whom_its_certificate_is_signed(log: KafkaPlace, tmp_path: Path) -> None:
    url, delivery = f"{log.server.tls_url}/{log.topic}", make_delivery()
    assert await send(f"{url}?ca={log.server.certificate}", delivery) == [Delivered()]
    kafka.certify(tmp_path / "other.pem", tmp_path / "keystore.pem")
    [answer] = await send(f"{url}?ca={tmp_path / 'other.pem'}", delivery)
    check_refused(answer, Unreachable, "certificate")


async def test_a_user_with_the_right_password_is_let_in(log: KafkaPlace) -> None:
    sink = log.server.sasl_url.replace("?", f"/{log.topic}?")
    assert await send(sink, make_delivery()) == [Delivered()]
    by_auth = sink.replace(f":{kafka.PASSWORD}@", "@")
    assert await send(by_auth, make_delivery(), auth=kafka.PASSWORD) == [Delivered()]


async def test_a_broker_may_ask_for_a_certificate(log: KafkaPlace) -> None:
    url, trusted = f"{log.server.mutual_url}/{log.topic}", {"ca": str(log.server.certificate)}
    own = {"certificate": str(log.server.certificate), "key": str(log.server.keystore)}
    assert await send(url, make_delivery(), options={**trusted, **own}) == [Delivered()]
    [answer] = await send(url, make_delivery(), options=trusted)
    assert isinstance(answer, Unreachable)


async def test_a_user_may_be_asked_by_scram(log: KafkaPlace) -> None:
    make_user(log.server.bootstrap, "books", "s3cret")
    options = {"security": "sasl_plaintext", "mechanism": "SCRAM-SHA-256"}
    url = f"kafka://books@127.0.0.1:{log.server.sasl_port}/{log.topic}"
    assert await send(url, make_delivery(), auth="s3cret", options=options) == [Delivered()]
    [answer] = await send(url, make_delivery(), auth="hunter2", options=options)
    assert type(answer) is Unavailable
    assert "uthentication" in answer.reason
    assert "hunter2" not in answer.reason


async def test_a_wrong_password_is_said_and_not_shown(
    log: KafkaPlace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = log.server.sasl_url.replace("?", f"/{log.topic}?").replace(kafka.PASSWORD, "hunter2")
    async with sink_to(url) as sink:
        [answer] = await sink.send([make_delivery()])
        assert type(answer) is Unavailable
        assert "uthentication" in answer.reason
        with pytest.raises(Unavailable, match="uthentication"):
            await sink.check()
    assert "hunter2" not in f"{answer.reason}{sink!r}{caplog.text}"


# --- which partition a message lands in ---


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
    strategy: Any, key: Callable[[int], str], broker: kafka.Broker, migrated_database: Callable[[str], str]
) -> None:
    log, names = KafkaPlace(broker, partitions=7), list(JAVA)
    shop = shop_to(log.url, migrated_database("sqlite"), ordering=strategy, timeout="30s")
    calls = [
        Call("Order", names[n % 3], names[n // 9 % 3], {"text": str(n), "n": n}, tenant=names[n // 3 % 3])
        for n in range(27)
    ]
    with shop.engine.begin() as connection:
        shop.outbox.emit_many(connection, calls)
    await shop.outbox.adrain()
    found = {json.loads(m.value())["data"]["n"]: m for m in log.read()}
    assert len(found) == 27
    for n, message in found.items():
        assert message.key() == key(n).encode()
        assert message.partition() == (JAVA[key(n)] & 0x7FFFFFFF) % 7


async def test_without_a_strategy_messages_have_no_key_and_spread(broker: kafka.Broker) -> None:
    log = KafkaPlace(broker, partitions=7)
    async with sink_to(log.url, ordering="none") as sink:
        for _ in range(12):
            assert await sink.send([make_delivery() for _ in range(20)]) == [Delivered()] * 20
    messages = log.read()
    assert {message.key() for message in messages} == {None}
    assert len({message.partition() for message in messages}) > 1


# --- behind a relay ---


class TestKafkaRelay(RelayContract):
    @pytest.fixture
    def place(self, broker: kafka.Broker) -> KafkaPlace:
        return KafkaPlace(broker, partitions=5)

    @pytest.mark.full
    async def test_a_restart_within_the_timeout_is_not_a_failure(
        self, place: KafkaPlace, database: str
    ) -> None:
        shop = shop_to(place.url, database, **PATIENT)
        shop.emit(MANY, keys=500)
        async with shop.outbox.relay():
            await await_for(lambda: shop.states().get("delivered", 0) > MANY // 10, "some are delivered")
            await asyncio.to_thread(place.server.stop)
            await asyncio.to_thread(place.server.start)
            await await_for(lambda: shop.states() == {"delivered": MANY}, "all are delivered")
        assert {attempts for _, attempts, _ in shop.rows()} == {1}
        assert await read_back(place, shop, MANY, 500) == 0

    async def test_a_missing_topic_is_reported_and_holds_up_no_other_destination(
        self, log: KafkaPlace, database: str
    ) -> None:
        topic = f"later-{log.topic}"

        async def repair() -> None:
            make_topic(log.server.bootstrap, topic)

        await untroubled(database, f"{log.server.url}/{topic}", f"'{topic}'", repair)
