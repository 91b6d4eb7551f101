"""Delivery through real Celery workers and a real beat."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from io import StringIO
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.management import call_command
from django.db import transaction
from django.test import override_settings

from relaybox.contrib.django import emit_event, emit_events
from relaybox.contrib.django.models import OutboxEvent, OutboxLeader
from relaybox.contrib.django.tasks import deliver_outbox_events_task, queue
from tests.django import workers
from tests.django.conftest import Live
from tests.django.shop.models import Receipt
from tests.servers import redis as server

on_postgresql = pytest.mark.parametrize("live", ["default"], indirect=True)
EVENTS = 2_000


def pay(live: Live, number: int = 1) -> Any:
    with transaction.atomic(using=live.using):
        return emit_event("order", number, "order.paid", {"number": number}, using=live.using)


def pay_many(live: Live, count: int) -> None:
    call = {"aggregate_type": "order", "event_type": "order.paid", "payload": {}}
    with transaction.atomic(using=live.using):
        emit_events([{**call, "aggregate_id": number} for number in range(count)], using=live.using)


def receipts(live: Live) -> Any:
    return Receipt.objects.using(live.using)


def delivered(live: Live) -> int:
    return int(OutboxEvent.objects.using(live.using).delivered().count())


def test_emit_commit_delivered(live: Live, broker: str) -> None:
    with workers.worker(live.url, broker, pool="solo") as worker, workers.sending_to(broker):
        emitted = pay(live)
        workers.wait_for(lambda: delivered(live) == 1, explain=lambda: worker.log)
    assert [receipt.event_id for receipt in receipts(live)] == [emitted.event_id]


def test_what_was_emitted_while_no_worker_was_there_is_delivered_by_the_sweep(
    live: Live, broker: str
) -> None:
    with workers.sending_to("redis://127.0.0.1:1/0"):
        first = pay(live)
    assert not delivered(live)

    with (
        workers.worker(live.url, broker, pool="solo") as worker,
        workers.beat(live.url, broker) as beat,
    ):
        workers.wait_for(lambda: delivered(live) == 1, explain=lambda: worker.log + beat.log)
    assert [receipt.event_id for receipt in receipts(live)] == [first.event_id]


@pytest.mark.processes
@on_postgresql
def test_a_worker_that_is_killed_loses_nothing(live: Live, broker: str) -> None:
    with workers.worker(live.url, broker, pool="prefork") as worker, workers.sending_to(broker):
        pay_many(live, EVENTS)
        workers.wait_for(lambda: delivered(live) > 0, explain=lambda: worker.log)
        worker.kill()
    left = EVENTS - delivered(live)
    OutboxEvent.objects.using(live.using).sending().update(leased_until="2020-01-01T00:00:00Z")

    with workers.worker(live.url, broker, pool="solo") as worker, workers.beat(live.url, broker):
        workers.wait_for(lambda: delivered(live) == EVENTS, 60, explain=lambda: worker.log)
    assert left > 0
    assert len({receipt.event_id for receipt in receipts(live)}) == EVENTS


@pytest.mark.processes
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
        workers.wait_for(
            lambda: delivered(live) == EVENTS and "succeeded" in first.log and "succeeded" in second.log,
            120,
            explain=lambda: f"{delivered(live)}\n{first.log}{second.log}",
        )
    assert Counter(receipts(live).values_list("event_id", flat=True)).most_common(1)[0][1] == 1
    assert receipts(live).count() == EVENTS


@pytest.mark.processes
@pytest.mark.parametrize("pool", ["gevent", "eventlet", "threads"])
@on_postgresql
def test_every_pool_delivers(live: Live, broker: str, pool: str) -> None:
    with (
        workers.worker(live.url, broker, pool=pool, concurrency=4) as worker,
        workers.sending_to(broker),
    ):
        pay_many(live, 50)
        workers.wait_for(lambda: delivered(live) == 50, explain=lambda: worker.log)
    assert receipts(live).count() == 50


@pytest.mark.processes
@on_postgresql
def test_postgresql_is_the_broker_and_the_schedule_is_in_the_database(live: Live) -> None:
    broker = workers.through_database(live.url)
    with override_settings(OUTBOX={**settings.OUTBOX, "SWEEP_INTERVAL": "1s"}):
        call_command("outbox", "schedule", stdout=StringIO())
    with workers.sending_to("redis://127.0.0.1:1/0"):
        pay(live, 1)
    with (
        workers.worker(live.url, broker, pool="solo") as worker,
        workers.beat(live.url, broker, scheduler=workers.DATABASE) as beat,
        workers.sending_to(broker),
    ):
        workers.wait_for(lambda: delivered(live) == 1, 60, explain=lambda: worker.log + beat.log)
        pay(live, 2)
        workers.wait_for(lambda: delivered(live) == 2, 60, explain=lambda: worker.log + beat.log)
    assert receipts(live).count() == 2


def test_one_task_is_queued_for_a_transaction_and_none_while_one_is(live: Live, broker: str) -> None:
    with workers.sending_to(broker), redis.Redis.from_url(broker) as client:
        with transaction.atomic(using=live.using):
            for number in range(3):
                with transaction.atomic(using=live.using):
                    emit_event("order", number, "order.paid", {}, using=live.using)
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
def test_a_broker_that_came_back_is_told_at_once(live: Live) -> None:
    with ExitStack() as first:
        broker = first.enter_context(server.server())
        port = int(broker.rpartition(":")[2].partition("/")[0])
        with workers.sending_to(broker):
            pay(live, 1)
            deliver_outbox_events_task.run(using=live.using)
            first.close()
            with server.server(port=port) as again, redis.Redis.from_url(again) as client:
                pay(live, 2)
                assert client.llen("celery") == 1
