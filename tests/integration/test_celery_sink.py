"""Deliveries as messages on a real broker, and a broker that goes away."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from celery import Celery
from celery.signals import import_modules
from kombu import Queue
from kombu.transport.pyamqp import Transport
from kombu.utils.json import dumps

from relaybox.event import Delivery
from relaybox.outcome import Delivered, Reject, Unavailable, Unreachable
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration.sinking import check_refused, send, sink_to
from tests.servers import redis


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    """The application of this test, with a queue that is empty."""
    app = Celery("shop", broker=redis_url)
    app.conf.task_default_queue = f"shop-{id(app)}"
    yield app
    app.close()


def messages(app: Celery, queue: str | None = None) -> list[Any]:
    """What workers would find, oldest first."""
    with app.connection_for_read() as connection:
        bound = Queue(queue or app.conf.task_default_queue)(connection.channel())
        return list(iter(lambda: bound.get(no_ack=True), None))


def call(**about: Any) -> str:
    return dumps({"task": "shop.tasks.index", "args": [], "kwargs": {}, "options": {}, **about})


async def test_a_task_is_called_with_the_event(app: Celery) -> None:
    delivery = make_delivery('{"total": 42}')
    assert await send("celery:shop.tasks.index", delivery) == [Delivered()]

    [message] = messages(app)
    assert message.headers["task"] == "shop.tasks.index"
    assert message.headers["id"] == str(delivery.id)
    [event], kwargs, _ = message.payload
    assert (kwargs, event["id"], event["type"]) == ({}, str(delivery.event_id), "order.paid")
    assert event["data"] == {"total": 42}


async def test_the_format_is_the_destinations(app: Celery) -> None:
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
    app.conf.task_always_eager = True
    app.conf.task_eager_propagates = True
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
