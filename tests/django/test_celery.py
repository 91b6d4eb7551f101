"""Celery: delivery through real workers and a real beat, and tasks that are queued with a transaction."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import redis
from django.conf import settings
from django.db import transaction
from django.test import override_settings
from kombu import Queue

from relaybox.contrib.django import emit_events
from relaybox.contrib.django.conf import get_configuration
from relaybox.contrib.django.drain import Drained, drain
from relaybox.contrib.django.models import OutboxLeader
from relaybox.contrib.django.tasks import deliver_outbox_events_task, queue
from relaybox.errors import ConfigError, InvalidField, NotInTransaction, PayloadError
from tests.conftest import available
from tests.django import workers
from tests.django.conftest import Live
from tests.django.project.celery import app
from tests.django.shop.models import Order, Receipt
from tests.django.shop.tasks import lose, ship
from tests.django.steps import NOBODY, command, eager, events, orders, place, statuses, totals
from tests.servers import redis as server
from tests.waiting import wait_for

on_postgresql = pytest.mark.parametrize("live", ["default"], indirect=True)
EVENTS = 1_000


def pay(live: Live, number: int = 1) -> Any:
    return place(live.using, number, "order.paid")


def pay_many(live: Live, count: int) -> None:
    call = {"aggregate_type": "order", "event_type": "order.paid", "payload": {}}
    with transaction.atomic(using=live.using):
        emit_events([{**call, "aggregate_id": number} for number in range(count)], using=live.using)


def receipts(live: Live) -> list[UUID]:
    return list(Receipt.objects.using(live.using).values_list("event_id", flat=True))


def until_delivered(live: Live, count: int, *running: workers.Running) -> None:
    wait_for(
        lambda: events(live.using).delivered().count() == count,
        lambda: (
            f"{count} delivered\n{Counter(statuses(live.using))}\n" + "\n".join(one.log for one in running)
        ),
        # Thousands of deliveries may take their time on a busy machine.
        seconds=180,
    )


def test_a_commit_is_delivered_at_once_and_without_a_broker_by_the_sweep(live: Live, broker: str) -> None:
    with workers.worker(live.url, broker, pool="solo") as worker:
        with workers.sending_to(broker):
            first = pay(live)
            until_delivered(live, 1, worker)
        worker.until_logged("succeeded")
        with workers.sending_to(NOBODY):
            second = pay(live)
        assert statuses(live.using) == ["delivered", "pending"]
        with workers.beat(live.url, broker) as beat:
            until_delivered(live, 2, worker, beat)
            beat.stop()
        worker.stop()
    assert sorted(receipts(live)) == [first.event_id, second.event_id]


@pytest.mark.processes
@on_postgresql
@pytest.mark.full
def test_a_worker_that_is_killed_loses_nothing(live: Live, broker: str) -> None:
    with workers.worker(live.url, broker, pool="prefork") as worker, workers.sending_to(broker):
        # Enough for it to be in the midst of them when it is killed.
        pay_many(live, 2 * EVENTS)
        wait_for(lambda: events(live.using).delivered().exists(), lambda: worker.log)
        worker.kill()
    left = 2 * EVENTS - events(live.using).delivered().count()
    events(live.using).sending().update(leased_until="2020-01-01T00:00:00Z")

    with workers.worker(live.url, broker, pool="solo") as worker, workers.beat(live.url, broker):
        until_delivered(live, 2 * EVENTS, worker)
    assert left > 0
    assert len(set(receipts(live))) == 2 * EVENTS


@pytest.mark.processes
@pytest.mark.full
def test_two_workers_send_nothing_twice(live: Live, broker: str) -> None:
    pay_many(live, EVENTS)
    with (
        workers.worker(live.url, broker, pool="prefork", concurrency=2) as first,
        workers.worker(live.url, broker, pool="prefork", concurrency=2) as second,
        workers.sending_to(broker),
    ):
        # More than one worker fetches in advance, so that each gets some.
        for _ in range(24):
            deliver_outbox_events_task.delay(using="default")
        until_delivered(live, EVENTS, first, second)
        for worker in (first, second):
            worker.until_logged("succeeded")
    assert Counter(receipts(live)).most_common(1)[0][1] == 1
    assert len(receipts(live)) == EVENTS


@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet", "threads"])
@on_postgresql
@pytest.mark.full
def test_every_pool_delivers_and_queues_and_runs_a_task_once(live: Live, broker: str, pool: str) -> None:
    with (
        workers.worker(live.url, broker, pool=pool, concurrency=4) as worker,
        workers.sending_to(broker),
    ):
        pay_many(live, 50)
        until_delivered(live, 50, worker)
        for count, number in enumerate((7, 8), 1):
            with transaction.atomic():
                ship.delay_via_outbox(number)
            wait_for(lambda count=count: len(totals(live.using)) >= count, lambda: worker.log)
            until_delivered(live, 50 + count, worker)
        worker.stop()
    assert totals(live.using) == [7, 8]
    assert len(receipts(live)) == 50


@pytest.mark.processes
@on_postgresql
@pytest.mark.full
def test_postgresql_is_the_broker_and_the_schedule_is_in_the_database(live: Live) -> None:
    # This process stays connected to such a broker.
    live.spoil()
    broker = f"sqla+{live.url}"
    with override_settings(OUTBOX={**settings.OUTBOX, "SWEEP_INTERVAL": "1s"}):
        command("schedule")
    with workers.sending_to(NOBODY):
        pay(live, 1)
    with (
        workers.worker(live.url, broker, pool="solo") as worker,
        workers.beat(live.url, broker, scheduler=workers.DATABASE) as beat,
        workers.sending_to(broker),
    ):
        until_delivered(live, 1, worker, beat)
        pay(live, 2)
        until_delivered(live, 2, worker, beat)
    assert len(receipts(live)) == 2


def test_one_task_is_queued_for_a_transaction_and_none_while_one_is(live: Live, broker: str) -> None:
    with workers.sending_to(broker), redis.Redis.from_url(broker) as client:
        with transaction.atomic(using=live.using):
            for number in range(3):
                pay(live, number)
        assert client.llen("celery") == 1
        pay(live)
        queue(live.using)
        assert client.llen("celery") == 1
        deliver_outbox_events_task.run(using=live.using)
        pay(live)
        assert client.llen("celery") == 2
    assert OutboxLeader.objects.using(live.using).count() == 1


@pytest.mark.processes
@on_postgresql
def test_a_broker_that_came_back_gets_messages_at_once(live: Live) -> None:
    with (
        available("Redis", server.broker()) as redis_,
        workers.sending_to(server.url_of(redis_)),
        redis.Redis.from_url(server.url_of(redis_)) as client,
    ):
        pay(live, 1)
        deliver_outbox_events_task.run(using=live.using)
        client.flushdb()
        redis_.stop()
        redis_.start()
        pay(live, 2)
        assert client.llen("celery") == 1


def messages(broker: str) -> list[Any]:
    """Return the messages that workers would find, oldest first."""
    with app.connection_for_read(broker) as connection:
        waiting = Queue(app.conf.task_default_queue)(connection.channel())
        return list(iter(lambda: waiting.get(no_ack=True), None))


def test_a_task_is_a_row_of_the_open_transaction(using: str) -> None:
    result = ship.apply_async_via_outbox((7,), {"by": UUID(int=1)}, queue="slow", priority=3, using=using)

    event = events(using).get()
    assert (str(event.id), event.destination, event.status) == (result.id, "celery", "pending")
    named = (event.aggregate_type, event.aggregate_id, event.event_type)
    assert named == ("celery", ship.name, "celery.task")
    assert event.payload["task"] == ship.name
    assert event.payload["args"] == [7]
    assert event.payload["options"] == {"queue": "slow", "priority": 3}


def test_a_countdown_and_an_eta_are_when_it_is_queued(using: str) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    ship.apply_async_via_outbox((1,), countdown=3600, using=using)
    ship.apply_async_via_outbox((2,), eta=soon, using=using)
    ship.apply_async_via_outbox((3,), eta=soon.replace(tzinfo=None), using=using)

    first, *others = [event.next_attempt_at for event in events(using)]
    assert soon <= first <= datetime.now(UTC) + timedelta(hours=1)
    assert others == [soon, soon]


def test_what_expires_does_so_from_now_on(using: str) -> None:
    before = datetime.now(UTC)
    ship.apply_async_via_outbox((1,), expires=60, countdown=30, using=using)

    marked = events(using).get().payload["options"]["expires"]
    moment = datetime.fromisoformat(marked["__value__"])
    assert before <= moment - timedelta(seconds=60) <= datetime.now(UTC)


def test_a_key_that_was_given_before_is_the_first_task(using: str) -> None:
    one, two = (ship.apply_async_via_outbox((n,), idempotency_key="k", using=using) for n in (1, 2))
    other = lose.apply_async_via_outbox((3,), idempotency_key="k", using=using)

    assert one.id == two.id != other.id
    assert events(using).count() == 2


BAD: list[tuple[dict[str, Any], type[Exception]]] = [
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
]


def test_bad_input_is_refused_and_the_transaction_goes_on(using: str) -> None:
    for call, error in BAD:
        with pytest.raises(error):
            ship.apply_async_via_outbox(**{"using": using, **call})
        orders(using).create(total=1)
        assert not events(using).exists(), call


@pytest.mark.django_db(transaction=True)
def test_outside_atomic_it_raises() -> None:
    with pytest.raises(NotInTransaction, match="no transaction is open"):
        ship.delay_via_outbox(1)
    assert not events("default").exists()


@pytest.mark.django_db
def test_another_destination_of_the_name_is_reported() -> None:
    others = {"celery": {"sink": "celery:shop.tasks.index"}}
    with override_settings(OUTBOX={"DESTINATIONS": others}), pytest.raises(ConfigError, match="another name"):
        ship.delay_via_outbox(1)
    with override_settings(OUTBOX={"DESTINATIONS": {"celery": {"sink": "celery:", "max_attempts": 9}}}):
        ship.delay_via_outbox(1)
    assert events("default").get().max_attempts == 9


def test_without_celery_there_is_no_such_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaybox.contrib.django.conf.find_spec", lambda name: None)
    with override_settings(OUTBOX={}):
        assert "celery" not in {one.name for one in get_configuration().settings.destinations}
    monkeypatch.undo()
    with override_settings(OUTBOX={}):
        assert "celery" in {one.name for one in get_configuration().settings.destinations}


@pytest.mark.usefixtures("quiet")
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


@override_settings(OUTBOX={**settings.OUTBOX, "DISPATCH": "none", "BACKOFF": {"base": 1}})
@on_postgresql
def test_what_commits_while_the_broker_is_down_is_queued_when_it_is_back(live: Live) -> None:
    with available("Redis", server.broker()) as redis_, workers.sending_to(broker := server.url_of(redis_)):
        redis_.stop()
        with transaction.atomic():
            result = ship.delay_via_outbox(7)
        assert drain(live.using).delivered == 0
        event = events(live.using).get()
        assert (event.status, event.attempts) == ("pending", 0)
        assert "refused" in event.error_message

        redis_.start()
        wait_for(lambda: drain(live.using).delivered == 1)
        assert [message.headers["id"] for message in messages(broker)] == [result.id]


@pytest.mark.django_db(transaction=True)
def test_where_tasks_are_eager_it_runs_with_the_commit() -> None:
    with eager(propagates=True):
        with transaction.atomic():
            ship.delay_via_outbox(7)
            assert not totals()
        assert totals() == [7]
        with transaction.atomic():
            lose.delay_via_outbox(1)
    assert statuses() == ["delivered", "delivered"]


def test_in_a_test_it_runs_in_the_tests_transaction(
    django_capture_on_commit_callbacks: Any, db: None
) -> None:
    with (
        eager(propagates=True),
        django_capture_on_commit_callbacks(execute=True),
        transaction.atomic(),
    ):
        ship.delay_via_outbox(7)
    assert totals() == [7]
