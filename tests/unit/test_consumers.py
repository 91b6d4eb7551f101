"""What consumers do where a client, a handler or a message behaves as it should not."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import aio_pika
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from relaybox import Event
from relaybox.errors import ConfigError
from relaybox.receive.consumer import Crashed, Done, Later
from relaybox.receive.consumers import calls, kafka, loop, rabbitmq
from relaybox.receive.consumers.kafka import KafkaConsumer
from relaybox.receive.consumers.loop import Loop
from relaybox.receive.consumers.rabbitmq import RabbitmqConsumer
from tests.integration.consuming import running
from tests.waiting import PATIENCE, await_for, cancel


class EveryTime:
    """An inbox that has seen nothing, and remembers nothing."""

    consumer: str | None = "books"

    def once(self, *_: Any, **__: Any) -> Any:
        return opened()

    def aonce(self, *_: Any, **__: Any) -> Any:
        return aopened()


@contextmanager
def opened() -> Iterator[bool]:
    yield True


@asynccontextmanager
async def aopened() -> AsyncIterator[bool]:
    yield True


GIVEN: dict[str, Any] = {
    "inbox": EveryTime(),
    "transaction": opened,
    "backoff": {"base": "10ms", "cap": "20ms"},
}


class FakeMessage:
    """One of Kafka, of an event ``order.paid``."""

    def __init__(self, timestamp: tuple[int, int] = (0, 0)) -> None:
        self._timestamp = timestamp
        self._id = str(uuid4()).encode()

    def headers(self) -> list[tuple[str, bytes]]:
        return [("event-id", self._id), ("event-type", b"order.paid")]

    def timestamp(self) -> tuple[int, int]:
        return self._timestamp

    def value(self) -> bytes:
        return b"{}"

    def offset(self) -> int:
        return 7


class FakeDelivery:
    """One of RabbitMQ, and what it was answered with."""

    message_id = None
    body = b"{}"
    content_type = None
    timestamp = None

    def __init__(self, ack: BaseException | None = None) -> None:
        self.headers = {"event-id": str(uuid4()), "event-type": "order.paid"}
        self.answers: list[str] = []
        self._ack = ack

    async def ack(self) -> None:
        if self._ack is not None:
            raise self._ack
        self.answers.append("ack")

    async def nack(self, requeue: bool) -> None:
        self.answers.append(f"nack {requeue=}")


def kafka_consumer(**options: Any) -> KafkaConsumer:
    return KafkaConsumer("127.0.0.1:1", "topic", group="g", **(GIVEN | options))


def rabbitmq_consumer(**options: Any) -> RabbitmqConsumer:
    return RabbitmqConsumer("amqp://127.0.0.1:1/", "q", **(GIVEN | options))


def event() -> Event:
    return Event(uuid4(), "order.paid", "Order", "7", {}, {}, 1, datetime.now(UTC))


async def attended(consumer: Any, message: Any = None) -> Any:
    return await asyncio.wait_for(consumer._attend(message or FakeMessage(), asyncio.Event()), PATIENCE)


ODD = pytest.mark.parametrize("error", [ZeroDivisionError("odd"), asyncio.CancelledError()])


@pytest.mark.parametrize("entry", ["handle", "ahandle"])
async def test_a_plain_handler_that_returns_an_awaitable_is_not_done(entry: str) -> None:
    consumer = kafka_consumer()

    async def work() -> None:
        pytest.fail("it runs after the commit")

    @consumer.on("order.*")
    def on_order(event: Event) -> Awaitable[None]:
        return work()

    verdict = consumer.handle(event()) if entry == "handle" else await consumer.ahandle(event())
    assert isinstance(verdict, Crashed)
    assert "awaitable" in verdict.reason


@pytest.mark.parametrize("milliseconds", [2**63 - 1, -(2**63), 10**15])
async def test_a_timestamp_that_no_calendar_has_is_taken_for_now(milliseconds: int) -> None:
    consumer, seen = kafka_consumer(), []

    @consumer.on("order.*")
    def on_order(event: Event) -> None:
        seen.append(event.created_at)

    before = datetime.now(UTC)
    assert await attended(consumer, FakeMessage((1, milliseconds))) is True
    assert before <= seen[0] <= datetime.now(UTC)


@ODD
async def test_a_partition_goes_on_whatever_is_raised(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    consumer, fails = kafka_consumer(), [error]

    @consumer.on("order.*")
    def on_order(event: Event) -> None: ...

    read = kafka._received

    def failing(message: Any, attempt: int) -> Any:
        if fails:
            raise fails.pop()
        return read(message, attempt)

    monkeypatch.setattr(kafka, "_received", failing)
    queue = kafka.PartitionQueue(consumer._attend, asyncio.Event())
    queue.put(FakeMessage())
    await await_for(lambda: queue.next_offset == 8)
    assert type(error).__name__ in caplog.text
    assert "its partition waits" in caplog.text


async def test_a_synchronous_handler_that_raises_a_cancellation_is_tried_again() -> None:
    consumer, attempts = kafka_consumer(), []

    @consumer.on("order.*")
    def on_order(event: Event) -> None:
        attempts.append(event.attempt)
        if event.attempt == 1:
            raise asyncio.CancelledError

    assert await attended(consumer) is True
    assert attempts == [1, 2]


async def test_cancelling_the_wait_is_obeyed() -> None:
    consumer, begun = kafka_consumer(transaction=aopened), asyncio.Event()

    @consumer.on("order.*")
    async def on_order(event: Event) -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(consumer._attend(FakeMessage(), asyncio.Event()))
    await begun.wait()
    await cancel(task)


async def test_settings_that_the_client_refuses_leave_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    def threads() -> int:
        return sum(thread.name == "relaybox-kafka" for thread in threading.enumerate())

    before = threads()
    async with running(kafka_consumer(settings={"security.protocol": "nonsense"})):
        await await_for(lambda: caplog.text.count("connecting again") > 3)
    assert threads() <= before


def paid(consumer: Loop) -> Any:
    @consumer.on("order.*")
    def on_order(event: Event) -> None: ...

    return consumer


@ODD
async def test_a_message_whose_end_fails_goes_back(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    delivery = FakeDelivery(ack=error)
    await attended(paid(rabbitmq_consumer()), delivery)
    assert delivery.answers == ["nack requeue=True"]
    assert type(error).__name__ in caplog.text


async def test_a_channel_that_is_gone_is_reported_and_not_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    delivery = FakeDelivery(ack=aio_pika.exceptions.ChannelInvalidStateError("closed"))
    await attended(paid(rabbitmq_consumer()), delivery)
    assert delivery.answers == []
    assert "was not acknowledged: ChannelInvalidStateError" in caplog.text


@ODD
async def test_what_fails_around_handlers_comes_again(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, verdicts = rabbitmq_consumer(), [error, Done()]

    async def ahandle(event: Event) -> Any:
        if isinstance(verdict := verdicts.pop(0), BaseException):
            raise verdict
        return verdict

    monkeypatch.setattr(consumer, "ahandle", ahandle)
    delivery = FakeDelivery()
    await attended(consumer, delivery)
    assert delivery.answers == ["ack"]


async def test_a_client_that_cancels_its_waiting_calls_is_connected_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    consumer, calls = rabbitmq_consumer(), []

    async def consume() -> None:
        calls.append("consume")
        if len(calls) < 3:
            raise asyncio.CancelledError
        await consumer._stopping.wait()

    monkeypatch.setattr(consumer, "_consume", consume)
    with caplog.at_level(logging.WARNING, "relaybox.consumer"):
        async with running(consumer):
            await await_for(lambda: len(calls) == 3)
    assert caplog.text.count("connecting again") == 2


async def test_a_run_that_is_cancelled_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer, begun = rabbitmq_consumer(), asyncio.Event()

    async def consume() -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(consumer, "_consume", consume)
    task = asyncio.create_task(consumer.run())
    await begun.wait()
    await cancel(task)


async def test_a_broker_that_falls_silent_while_it_is_asked_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent:
        async def channel(self, **_: Any) -> None:
            await asyncio.Event().wait()

        async def close(self) -> None: ...

    async def connect(*_: Any, **__: Any) -> Silent:
        return Silent()

    monkeypatch.setattr(rabbitmq.aio_pika, "connect", connect)
    monkeypatch.setattr(rabbitmq, "CONNECT_SECONDS", 0.05)
    async with running(rabbitmq_consumer()):
        await await_for(lambda: "RabbitMQ did not answer in 0.05s; connecting again" in caplog.text)


LEFT_OPEN = ("connect", "Session", "sessionmaker()", "async connect", "AsyncSession", "async_sessionmaker()")
COMMITTED = ("engine", "begin", "sessionmaker", "sessionmaker.begin", "async engine", "async begin")
COMMITTED += ("async_sessionmaker", "async_sessionmaker.begin")
FORMS = [*((name, False) for name in LEFT_OPEN), *((name, True) for name in COMMITTED)]


@pytest.fixture
def forms(tmp_path: Any) -> Iterator[dict[str, Any]]:
    """Yield the forms that open a transaction of SQLAlchemy; some do not commit it."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/a.db")
    aengine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/b.db")
    yield {
        "connect": engine.connect,
        "Session": lambda: Session(engine),
        "sessionmaker()": lambda: sessionmaker(engine)(),
        "async connect": aengine.connect,
        "AsyncSession": lambda: AsyncSession(aengine),
        "async_sessionmaker()": lambda: async_sessionmaker(aengine)(),
        "engine": engine,
        "begin": engine.begin,
        "sessionmaker": sessionmaker(engine),
        "sessionmaker.begin": sessionmaker(engine).begin,
        "async engine": aengine,
        "async begin": aengine.begin,
        "async_sessionmaker": async_sessionmaker(aengine),
        "async_sessionmaker.begin": async_sessionmaker(aengine).begin,
    }
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    engine.dispose()
    asyncio.run(aengine.dispose())


@pytest.mark.parametrize(("name", "commits"), FORMS)
def test_only_what_commits_is_taken(
    forms: dict[str, Any], name: str, commits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = kafka_consumer(transaction=forms[name])
    if "async" in name.lower():

        @consumer.on("order.*")
        async def aon_order(event: Event, connection: Any) -> None: ...

    else:

        @consumer.on("order.*")
        def on_order(event: Event, connection: Any) -> None: ...

    verdict = asyncio.run(consumer.ahandle(event()))
    assert (verdict == Done()) is commits
    assert (ConfigError.__name__ in caplog.text) is not commits
    assert ("does not commit" in caplog.text) is not commits


class Hang:
    """A handler in a thread that does not return before it may."""

    def __init__(self) -> None:
        self.called: list[int] = []
        self.go_on, self.over = threading.Event(), threading.Event()

    def handle(self, event: Event) -> None:
        self.called.append(event.attempt)
        self.go_on.wait(PATIENCE)
        self.over.set()


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.go_on.set()


async def test_a_thread_that_hangs_is_left_and_its_event_waits(
    hang: Hang, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = kafka_consumer(timeout="50ms")
    consumer.on("order.*")(hang.handle)
    attending = asyncio.create_task(attended(consumer))
    await await_for(lambda: caplog.text.count("has not returned yet") > 2)
    assert "took longer than 0.05s" in caplog.text
    assert hang.called == [1]
    hang.go_on.set()
    assert await attending is True
    assert len(hang.called) >= 2


async def test_threads_that_hang_take_no_place(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "AT_ONCE", 1)
    consumer = kafka_consumer(timeout="50ms")
    monkeypatch.setattr(calls, "AT_ONCE", 3)
    consumer.on("order.*")(hang.handle)
    verdicts = await asyncio.gather(*(consumer.ahandle(event()) for _ in range(3)))
    assert verdicts == [Later("the handler took longer than 0.05s")] * 3


async def test_only_so_many_threads_hang(
    hang: Hang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "AT_ONCE", 2)
    consumer = kafka_consumer(timeout="50ms")
    consumer.on("order.*")(hang.handle)
    for _ in range(3):
        verdicts = await asyncio.gather(*(consumer.ahandle(event()) for _ in range(10)))
    # Those that were under way when the others came to hang are among them.
    [refused] = {verdict.reason for verdict in verdicts}
    hanging = int(refused.partition(" ")[0])
    assert 2 <= hanging < 4
    assert refused == f"{hanging} handlers hang, and no other is called before one of them is over"
    # On a busy machine a thread may only come to its function after its time.
    await await_for(lambda: len(hang.called) == hanging)
    assert caplog.text.count("handlers hang; none is called") == 1
    hang.go_on.set()

    async def done() -> bool:
        return await consumer.ahandle(event()) == Done()

    await await_for(done)


async def test_an_async_handler_that_hangs_is_cancelled_and_called_again() -> None:
    consumer, attempts = kafka_consumer(transaction=aopened, timeout="50ms"), []

    @consumer.on("order.*")
    async def hang(event: Event) -> None:
        attempts.append(event.attempt)
        if event.attempt == 1:
            await asyncio.Event().wait()

    assert await attended(consumer) is True
    assert attempts == [1, 2]


async def test_a_time_limit_of_the_handlers_own_is_its_failure() -> None:
    consumer = kafka_consumer(transaction=aopened)

    @consumer.on("order.*")
    async def give_up(event: Event) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    assert await consumer.ahandle(event()) == Crashed("TimeoutError")


@pytest.mark.parametrize("trouble", ["a thread hangs", "a task hangs", "it cancels itself"])
async def test_a_dead_letter_function_that_does_not_return_is_called_again(hang: Hang, trouble: str) -> None:
    calls: list[str] = []

    def bury(message: Any, reason: str) -> None:
        calls.append(reason)
        if len(calls) == 1:
            hang.handle(event())

    async def abury(message: Any, reason: str) -> None:
        calls.append(reason)
        if len(calls) == 1 and trouble == "it cancels itself":
            raise asyncio.CancelledError
        if len(calls) == 1:
            await asyncio.Event().wait()

    hangs = {"timeout": "50ms"} if "hangs" in trouble else {}
    consumer = kafka_consumer(dead_letter=bury if trouble == "a thread hangs" else abury, **hangs)
    message = FakeMessage()
    message.headers = list  # type: ignore[method-assign]
    assert await attended(consumer, message) is True
    assert len(calls) == 2 or (hangs and len(calls) > 2)


def test_a_stop_does_not_wait_for_a_thread_that_hangs(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PATIENCE", 0.1)
    consumer, delivery = rabbitmq_consumer(timeout="1h"), FakeDelivery()
    consumer.on("order.*")(hang.handle)

    async def consume() -> None:
        async with loop.Work() as work:
            work.start(consumer._attend(delivery, work.ending))  # type: ignore[arg-type]
            await await_for(lambda: hang.called)
            consumer.stop()

    monkeypatch.setattr(consumer, "_consume", consume)
    # Its end waits for the threads of asyncio.
    asyncio.run(consumer.run())
    assert not hang.over.is_set()
    assert delivery.answers == []


def test_an_invalid_timeout_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeout"):
        kafka_consumer(timeout="0s")
