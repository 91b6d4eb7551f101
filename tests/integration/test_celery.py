"""Deliveries as tasks on a real broker, also one that goes away, and tasks that take effect once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.signals import import_modules
from kombu import Queue
from kombu.transport.pyamqp import Transport
from kombu.utils.json import dumps
from sqlalchemy.orm import Session, sessionmaker

from relaybox import Reject, Retry
from relaybox.contrib.celery import inbox_task
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Released, Unavailable, Unreachable
from relaybox.errors import ConfigError
from relaybox.receive.inbox import Inbox
from relaybox.sinks.sink import Answer, Regardless
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration.consumed import EFFECT, Ground, ground, packed
from tests.integration.sinking import check_refused, send, sink_to
from tests.servers import redis
from tests.waiting import PATIENCE, cancel, wait_for


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    """Return the application of this test, with an empty queue."""
    app = Celery("shop", broker=redis_url)
    app.conf.task_default_queue = f"shop-{id(app)}"
    yield app
    app.close()


def messages(app: Celery, queue: str | None = None) -> list[Any]:
    """Return the messages that workers would find, oldest first."""
    with app.connection_for_read() as connection:
        bound = Queue(queue or app.conf.task_default_queue)(connection.channel())
        return list(iter(lambda: bound.get(no_ack=True), None))


def call(**about: Any) -> str:
    return dumps({"task": "shop.tasks.index", "args": [], "kwargs": {}, "options": {}, **about})


async def test_a_task_is_called_with_the_event_in_the_format_of_the_destination(app: Celery) -> None:
    delivery = make_delivery('{"total": 42}')
    assert await send("celery:shop.tasks.index", delivery) == [Delivered()]
    [message] = messages(app)
    assert message.headers["task"] == "shop.tasks.index"
    assert message.headers["id"] == str(delivery.id)
    [event], kwargs, _ = message.payload
    assert (kwargs, event["id"], event["type"]) == ({}, str(delivery.event_id), "order.paid")
    assert event["data"] == {"total": 42}
    assert await send("celery:shop.tasks.index", make_delivery("[7]"), format="payload") == [Delivered()]
    [message] = messages(app)
    assert message.payload[0] == [[7]]


async def test_an_event_names_its_task_and_what_it_is_called_with(app: Celery) -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    given = [moment, Decimal("1.50"), UUID(int=7), b"x", {"a": [1.5, None]}]
    delivery = make_delivery(call(args=given, kwargs={"of": "b"}, options={"priority": 3}))
    assert await send("celery:", delivery) == [Delivered()]
    [message] = messages(app)
    args, kwargs, _ = message.payload
    assert (args, kwargs) == (given, {"of": "b"})
    assert message.properties["priority"] == 3


async def test_a_delivery_that_is_sent_again_is_the_same_task(app: Celery) -> None:
    delivery = make_delivery()
    again = msgspec.structs.replace(delivery, attempts=2)
    assert await send("celery:shop.tasks.index", delivery, again) == [Delivered()] * 2
    assert {message.headers["id"] for message in messages(app)} == {str(delivery.id)}


@pytest.mark.parametrize(
    ("delivery", "reason"),
    [
        (make_delivery('{"total": 42}'), "delay_via_outbox"),
        (make_delivery(data=b"\xff"), "bytes"),
        (make_delivery('{"__type__": "of tomorrow", "__value__": 1}'), "not what Celery reads"),
    ],
)
async def test_what_makes_no_message_is_rejected(app: Celery, delivery: Delivery, reason: str) -> None:
    [answer] = await send("celery:", delivery)
    check_refused(answer, Reject, reason)
    assert not messages(app)


async def test_a_broker_that_is_down_is_unreachable_and_takes_messages_when_it_is_back() -> None:
    with available("Redis", redis.broker()) as broker:
        app = Celery("shop", broker=redis.url_of(broker))
        async with sink_to("celery:shop.tasks.index") as sink:
            for _ in range(2):
                broker.stop()
                [refused] = await sink.send([make_delivery()])
                check_refused(refused, Unreachable, "refused")
                broker.start()
                assert await sink.send([make_delivery() for _ in range(3)]) == [Delivered()] * 3
                assert len(messages(app)) == 3
            broker.stop()
            [gone] = await sink.send([make_delivery()])
            assert isinstance(gone, Unreachable)
        app.close()


async def test_a_broker_that_says_nothing_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        app = Celery("shop", broker=f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        [answer] = await send("celery:shop.tasks.index", make_delivery(), timeout=0.2)
    check_refused(answer, Unavailable, "took longer")
    app.close()


async def test_a_stop_during_an_outage_of_the_broker_counts_nothing() -> None:
    reported = asyncio.get_running_loop().create_future()

    class Reports(Regardless):
        def report(self, delivery: Delivery, answer: Answer) -> None:
            reported.set_result(answer)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        app = Celery("shop", broker=f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        async with sink_to("celery:shop.tasks.index") as sink:
            sending = asyncio.ensure_future(sink.send([make_delivery()], Reports()))
            connected, _ = await asyncio.to_thread(silent.accept)
            await cancel(sending)
            connected.close()
    assert await reported == Released()
    app.close()


async def test_a_task_says_where_its_messages_go(app: Celery) -> None:
    def index(event: Any) -> None:
        raise AssertionError

    def import_tasks(**_: Any) -> None:
        app.task(name="shop.tasks.index", queue="slow", priority=3, shared=False)(index)

    import_modules.connect(import_tasks, sender=app)
    deliveries = [make_delivery() for _ in range(3)]
    assert await send("celery:shop.tasks.index", *deliveries) == [Delivered()] * 3
    assert not messages(app)
    assert [message.properties["priority"] for message in messages(app, "slow")] == [3] * 3


async def test_rabbitmq_is_asked_to_confirm() -> None:
    app = Celery("shop", broker="amqp://127.0.0.1:1//")
    seen: list[Any] = []

    class Refusing(Transport):
        def establish_connection(self) -> Any:
            seen.append(self.client.transport_options)
            raise ConnectionRefusedError

    app.conf.broker_transport = Refusing
    [answer] = await send("celery:shop.tasks.index", make_delivery())
    assert isinstance(answer, Unreachable)
    assert seen[0]["confirm_publish"] is True
    app.close()


async def test_without_an_application_nothing_is_sent_to_one_that_is_made_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("celery._state._tls.current_app", None)
    monkeypatch.setattr("celery._state.default_app", None)
    [answer] = await send("celery:shop.tasks.index", make_delivery())
    check_refused(answer, Unreachable, "no Celery application")


async def test_where_tasks_are_eager_the_sink_runs_them(app: Celery) -> None:
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    got, ids = [], []

    @app.task(name="shop.tasks.index", shared=False)
    def index(event: Any) -> None:
        got.append(event["data"])
        raise ZeroDivisionError

    @app.task(name="shop.tasks.add", bind=True, shared=False)
    def add(self: Any, one: int) -> None:
        ids.append(self.request.id)

    one, two = make_delivery(), make_delivery(call(task="shop.tasks.add", args=[1]))
    assert await send("celery:shop.tasks.index", one) == [Delivered()]
    assert await send("celery:", two) == [Delivered()]
    [unknown] = await send("celery:shop.tasks.other", make_delivery())
    assert (got, ids) == ([{"total": 42}], [str(two.id)])
    assert isinstance(unknown, Reject)
    assert not messages(app)


# --- tasks that take effect once ---


@pytest.fixture(scope="module")
def place(module_database: Callable[[str], str]) -> Iterator[Ground]:
    with ground(module_database("postgresql-18")) as made:
        yield made


@pytest.fixture
def eager() -> Celery:
    made = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    made.conf.update(task_always_eager=True, task_store_eager_result=False)
    return made


def notes(place: Ground, note: str) -> int:
    return [found for _, found in place.effects()].count(note)


def task_of(app: Celery, place: Ground, **options: Any) -> Any:
    @inbox_task(inbox=Inbox(), transaction=sessionmaker(place.engine), app=app, shared=False, **options)
    def index(session: Session, event: Any, error: str | None = None) -> str:
        note = str(event["id"]) if isinstance(event, dict) else event
        session.execute(EFFECT.insert().values(event_id="", note=note))
        if error:
            raise {"retry": Retry("later", after=0), "reject": Reject("never"), "other": OSError("x")}[error]
        return note

    return index


@pytest.mark.parametrize("format", ["json", "flat", "cloudevents"])
def test_an_event_that_is_queued_twice_takes_effect_once(eager: Celery, place: Ground, format: str) -> None:
    task = task_of(eager, place, consumer=f"test.{format}")
    event_id, envelope = packed(format=format)
    event = msgspec.json.decode(envelope.body)
    results = [task.apply_async([event], task_id=str(uuid4())).get() for _ in range(3)]
    assert results == [str(event_id), None, None]
    assert notes(place, str(event_id)) == 1


def test_a_call_is_known_by_its_id(eager: Celery, place: Ground) -> None:
    task = task_of(eager, place)
    note, task_id = f"call {uuid4()}", str(uuid4())
    for same in (task_id, task_id, str(uuid4())):
        task.apply_async([note], task_id=same)
    assert notes(place, note) == 2


def test_an_object_with_an_id_is_not_an_event(eager: Celery, place: Ground) -> None:
    task, order = task_of(eager, place), {"id": str(uuid4()), "total": 42}
    for _ in range(2):
        task.delay(order)
    assert notes(place, order["id"]) == 2


@pytest.mark.parametrize(("error", "raised"), [("reject", Reject), ("other", OSError), ("retry", Retry)])
def test_what_fails_leaves_nothing(eager: Celery, place: Ground, error: str, raised: type[Exception]) -> None:
    task = task_of(eager, place, max_retries=1, consumer="test.failing")
    note, task_id, marks = f"{error} {uuid4()}", str(uuid4()), place.marks("test.failing")
    result = task.apply_async([note, error], task_id=task_id)
    assert isinstance(result.result, raised)
    assert notes(place, note) == 0
    assert place.marks("test.failing") == marks
    assert task.apply_async([note], task_id=task_id).get() == note
    assert notes(place, note) == 1


def test_a_function_that_returns_its_work_fails_and_leaves_no_mark(eager: Celery, place: Ground) -> None:
    async def later() -> None: ...

    @inbox_task(inbox=Inbox(), transaction=place.engine, app=eager, shared=False, consumer="test.returning")
    def returning(connection: Any) -> Any:
        return later()

    result = returning.delay().result
    assert isinstance(result, ConfigError)
    assert "awaitable" in str(result)
    assert place.marks("test.returning") == 0


def test_a_transaction_that_swallows_the_failure_is_not_a_success(eager: Celery, place: Ground) -> None:
    @contextmanager
    def swallowing() -> Iterator[Any]:
        with suppress(OSError), place.engine.begin() as connection:
            yield connection

    @inbox_task(inbox=Inbox(), transaction=swallowing, app=eager, shared=False, consumer="test.swallowing")
    def failing(connection: Any) -> None:
        raise OSError("x")

    result = failing.delay()
    assert result.state == "FAILURE"
    assert "swallowed" in str(result.result)
    assert place.marks("test.swallowing") == 0


def test_a_block_that_does_not_commit_is_refused(eager: Celery, place: Ground) -> None:
    @inbox_task(inbox=Inbox(), transaction=place.engine.connect, app=eager, shared=False)
    def unwritten(connection: Any) -> None: ...

    assert "does not commit" in str(unwritten.delay().result)


def test_messages_stay_until_the_commit_unless_set_otherwise(eager: Celery, place: Ground) -> None:
    task = task_of(eager, place)
    assert (task.acks_late, task.reject_on_worker_lost) == (True, True)
    assert task.name.endswith("index")
    assert task_of(Celery("other", set_as_current=False), place, acks_late=False).acks_late is False


def test_a_worker_runs_it(eager: Celery, place: Ground) -> None:
    eager.conf.task_always_eager = False
    task = task_of(eager, place)
    note, task_id = f"worker {uuid4()}", str(uuid4())
    with start_worker(eager, perform_ping_check=False, shutdown_timeout=PATIENCE, loglevel="ERROR"):
        for _ in range(3):
            task.apply_async([note], task_id=task_id)
        last = f"worker {uuid4()}"
        task.delay(last)
        wait_for(lambda: notes(place, last) == 1, "the last task")
    assert notes(place, note) == 1


def test_mistakes_are_reported() -> None:
    async def asynchronous(session: Any) -> None: ...

    with pytest.raises(ConfigError, match="is async; make it a plain function"):
        inbox_task(inbox=Inbox(), transaction=dict)(asynchronous)
    with pytest.raises(ConfigError, match="transaction = 5"):
        inbox_task(inbox=Inbox(), transaction=5)
