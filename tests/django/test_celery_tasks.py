"""Celery tasks that are queued with a transaction."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from django.conf import settings
from django.db import transaction
from django.test import override_settings
from kombu import Queue

from relaybox.contrib.django.configuration import get_configuration
from relaybox.contrib.django.drain import Drained, drain
from relaybox.contrib.django.models import OutboxEvent
from relaybox.errors import ConfigError, InvalidField, NotInTransaction, PayloadError
from tests.conftest import available
from tests.django import workers
from tests.django.conftest import Live
from tests.django.project.celery import app
from tests.django.shop.models import Order
from tests.django.shop.tasks import lose, ship
from tests.integration.test_celery_sink import free_port
from tests.servers import redis

on_postgresql = pytest.mark.parametrize("live", ["default"], indirect=True)
quiet = override_settings(OUTBOX={**settings.OUTBOX, "DISPATCH": "none"})


@pytest.fixture
def eager() -> Iterator[Celery]:
    """Tasks run where they are called, and would raise there."""
    app.conf.task_always_eager = app.conf.task_eager_propagates = True
    yield app
    app.conf.task_always_eager = app.conf.task_eager_propagates = False


def events(using: str) -> Any:
    return OutboxEvent.objects.using(using)


def shipped(using: str) -> list[int]:
    return list(Order.objects.using(using).values_list("total", flat=True))


def messages(broker: str) -> list[Any]:
    """What workers would find, oldest first."""
    with app.connection_for_read(broker) as connection:
        queue = Queue(app.conf.task_default_queue)(connection.channel())
        return list(iter(lambda: queue.get(no_ack=True), None))


def test_a_task_is_a_row_of_the_open_transaction(using: str) -> None:
    result = ship.apply_async_via_outbox((7,), {"by": UUID(int=1)}, queue="slow", priority=3, using=using)

    event = events(using).get()
    assert (str(event.id), event.destination, event.status) == (result.id, "celery", "pending")
    assert (event.aggregate_type, event.aggregate_id, event.event_type) == (
        "celery",
        ship.name,
        "celery.task",
    )
    assert event.payload["task"] == ship.name
    assert event.payload["args"] == [7]
    assert event.payload["options"] == {"queue": "slow", "priority": 3}


def test_a_countdown_and_an_eta_are_when_it_is_queued(using: str) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    ship.apply_async_via_outbox((1,), countdown=3600, using=using)
    ship.apply_async_via_outbox((2,), eta=soon, using=using)
    ship.apply_async_via_outbox((3,), eta=soon.replace(tzinfo=None), using=using)

    for event in events(using):
        assert abs(event.next_attempt_at - soon) < timedelta(seconds=60)


def test_what_expires_does_so_from_now_on(using: str) -> None:
    ship.apply_async_via_outbox((1,), expires=60, countdown=30, using=using)

    marked = events(using).get().payload["options"]["expires"]
    moment = datetime.fromisoformat(marked["__value__"])
    assert timedelta(seconds=50) < moment - datetime.now(UTC) <= timedelta(seconds=60)


def test_a_key_that_was_given_before_is_the_first_task(using: str) -> None:
    one, two = (ship.apply_async_via_outbox((n,), idempotency_key="k", using=using) for n in (1, 2))
    other = lose.apply_async_via_outbox((3,), idempotency_key="k", using=using)

    assert one.id == two.id != other.id
    assert events(using).count() == 2


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ({"args": (object(),)}, PayloadError),
        ({"args": (float("nan"),)}, PayloadError),
        ({"args": (1,), "kwargs": {"by": Order(total=1)}}, PayloadError),
        ({"args": (1,), "queue": Queue("slow")}, PayloadError),
        ({"args": (1, 2, 3)}, TypeError),
        ({"args": (1,), "link": lose.s()}, InvalidField),
        ({"args": (1,), "prioritty": 1}, InvalidField),
        ({"args": (1,), "countdown": 1, "eta": datetime.now(UTC)}, InvalidField),
        ({"args": (1,), "countdown": float("inf")}, InvalidField),
        ({"args": (1,), "idempotency_key": "k" * 250}, InvalidField),
        ({"args": (1,), "using": "defualt"}, ConfigError),
    ],
)
def test_bad_input_is_refused_and_the_transaction_goes_on(
    using: str, call: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        ship.apply_async_via_outbox(**{"using": using, **call})

    Order.objects.using(using).create(total=1)
    assert not events(using).exists()


@pytest.mark.django_db(transaction=True)
def test_outside_atomic_it_raises() -> None:
    with pytest.raises(NotInTransaction, match="no transaction is open"):
        ship.delay_via_outbox(1)
    assert not events("default").exists()


@pytest.mark.django_db
def test_another_destination_of_the_name_is_told_of() -> None:
    others = {"celery": {"sink": "celery:shop.tasks.index"}}
    with override_settings(OUTBOX={"DESTINATIONS": others}), pytest.raises(ConfigError, match="another name"):
        ship.delay_via_outbox(1)
    with override_settings(OUTBOX={"DESTINATIONS": {"celery": {"sink": "celery:", "max_attempts": 9}}}):
        ship.delay_via_outbox(1)
    assert events("default").get().max_attempts == 9


def test_without_celery_there_is_no_such_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaybox.contrib.django.implicit.find_spec", lambda name: None)
    with override_settings(OUTBOX={}):
        assert "celery" not in {one.name for one in get_configuration().settings.destinations}
    monkeypatch.undo()
    with override_settings(OUTBOX={}):
        assert "celery" in {one.name for one in get_configuration().settings.destinations}


@quiet
def test_a_rollback_queues_nothing_and_a_commit_one_task(live: Live, broker: str) -> None:
    with workers.sending_to(broker):
        with transaction.atomic(using=live.using):
            ship.apply_async_via_outbox((7,), using=live.using)
            transaction.set_rollback(True, using=live.using)
        assert drain(live.using) == Drained()
        with transaction.atomic(using=live.using):
            result = ship.apply_async_via_outbox(
                (8,), {"at": datetime(2030, 1, 1, tzinfo=UTC)}, using=live.using
            )
        assert drain(live.using) == Drained(delivered=1)

    [message] = messages(broker)
    assert message.headers["id"] == result.id
    assert message.payload[:2] == [[8], {"at": datetime(2030, 1, 1, tzinfo=UTC)}]


@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet"])
@on_postgresql
def test_a_worker_queues_and_runs_it_once(live: Live, broker: str, pool: str) -> None:
    with (
        workers.worker(live.url, broker, pool=pool, concurrency=2) as worker,
        workers.sending_to(broker),
    ):
        with transaction.atomic():
            ship.delay_via_outbox(7)
        workers.wait_for(lambda: shipped(live.using) == [7], explain=lambda: worker.log)
        workers.wait_for(lambda: events(live.using).delivered().count() == 1, explain=lambda: worker.log)
        with transaction.atomic():
            ship.delay_via_outbox(8)
        workers.wait_for(lambda: shipped(live.using) == [7, 8], explain=lambda: worker.log)
        worker.stop()
    assert shipped(live.using) == [7, 8]


@override_settings(OUTBOX={**settings.OUTBOX, "DISPATCH": "none", "BACKOFF": {"base": 1}})
@on_postgresql
def test_what_commits_while_the_broker_is_down_is_queued_when_it_is_back(live: Live) -> None:
    port = free_port()
    broker = f"redis://127.0.0.1:{port}/0"
    with workers.sending_to(broker):
        with transaction.atomic():
            result = ship.delay_via_outbox(7)
        assert drain(live.using).delivered == 0
        event = events(live.using).get()
        assert (event.status, event.attempts) == ("pending", 0)
        assert "refused" in event.error_message

        with available("Redis", redis.server(port=port)):
            workers.wait_for(lambda: drain(live.using).delivered == 1, 60)
            assert [message.headers["id"] for message in messages(broker)] == [result.id]


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("eager")
def test_where_tasks_are_eager_it_runs_with_the_commit(received: list[Any]) -> None:
    with transaction.atomic():
        ship.delay_via_outbox(7)
        assert not shipped("default")
    assert shipped("default") == [7]
    with transaction.atomic():
        lose.delay_via_outbox(1)
    assert {event.status for event in events("default")} == {"delivered"}


@pytest.mark.usefixtures("eager")
def test_in_a_test_it_runs_in_the_tests_transaction(
    django_capture_on_commit_callbacks: Any, db: None
) -> None:
    with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
        ship.delay_via_outbox(7)
    assert shipped("default") == [7]
