"""Draining on Django's own connection: what it delivers, what it leaves, and what may go wrong in it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError, connections, transaction
from django.test import override_settings
from opentelemetry import trace

from relaybox import Event, Reject
from relaybox.contrib.django import databases, emit_event, tasks
from relaybox.contrib.django.drain import LEFT_OPEN, Drained, drain, drain_rows, upkeep
from relaybox.contrib.django.models import OutboxAttempt, OutboxEvent
from relaybox.contrib.django.outbox import is_busy
from relaybox.contrib.django.signals import event_delivered, event_failed
from relaybox.contrib.django.tasks import deliver_outbox_events_task
from relaybox.errors import StoreError, TransactionFailed
from tests.django.steps import events, handled_by, orders, place, statuses

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("quiet")]


def reject(event: Event) -> None:
    raise Reject("never")


def test_what_is_committed_is_delivered(using: str, received: list[Event]) -> None:
    emitted = [place(using, number) for number in range(3)]

    assert drain(using) == Drained(delivered=3)
    assert [event.id for event in received] == [one.event_id for one in emitted]
    assert statuses(using) == ["delivered"] * 3
    assert drain(using) == Drained()


def test_a_handler_that_raises_is_tried_again_later(using: str) -> None:
    def refuse(event: Event) -> None:
        raise ZeroDivisionError("no")

    place(using)
    with handled_by(refuse):
        assert drain(using) == Drained(retried=1)
    event = events(using).get()
    assert (event.status, event.attempts, event.error_message) == ("pending", 1, "ZeroDivisionError: no")
    wait = event.next_attempt_at - event.last_attempt_at
    assert timedelta(seconds=50) < wait < timedelta(seconds=70)
    assert OutboxAttempt.objects.using(using).count() == 1
    assert drain(using) == Drained()


def test_only_these_rows(using: str, received: list[Event]) -> None:
    other, wanted = place(using, 1), place(using, 2)

    assert drain_rows(using, {"memory": [wanted.event_id]}, seconds=60) == Drained(delivered=1)
    assert [event.id for event in received] == [wanted.event_id]
    assert events(using).get(id=other.event_id).status == "pending"


def test_signals_are_sent_after_the_fact(using: str, caplog: Any) -> None:
    calls: list[Any] = []

    def on_delivered(sender: Any, event: Event, destination: str, using: str, **_: Any) -> None:
        calls.append((destination, event.payload, using, events(using).get(event_id=event.id).status))
        raise ZeroDivisionError

    def on_failed(sender: Any, event: Event, error: str, **_: Any) -> None:
        calls.append((error, sender))

    event_delivered.connect(on_delivered)
    event_failed.connect(on_failed)
    try:
        place(using)
        place(using, 2, "order.paid")
        with handled_by(reject, "receipts"):
            assert drain(using) == Drained(delivered=1, failed=1)
    finally:
        event_delivered.disconnect(on_delivered)
        event_failed.disconnect(on_failed)

    assert ("memory", {"number": 1}, using, "delivered") in calls
    assert ("never", OutboxEvent) in calls
    assert statuses(using) == ["delivered", "failed"]
    assert any(
        "ZeroDivisionError" in record.message for record in caplog.records if record.levelno == logging.ERROR
    )


def test_what_was_kept_long_enough_is_removed(using: str, received: list[Event]) -> None:
    old, young = place(using, 1), place(using, 2)
    drain(using)
    event = events(using).get(id=old.event_id)
    events(using).filter(id=old.event_id).update(delivered_at=event.delivered_at - timedelta(hours=169))

    pruned = upkeep(using).pruned

    assert pruned is not None
    assert pruned.changed == 1
    assert [event.id for event in events(using)] == [young.event_id]


@override_settings(USE_TZ=False, TIME_ZONE="Asia/Kathmandu")
def test_without_time_zones_times_are_right_all_the_same(using: str, received: list[Event]) -> None:
    connections[using].close()
    place(using)
    drain(using)

    assert abs(datetime.now(UTC) - received[0].created_at) < timedelta(minutes=1)


def test_a_destination_that_cannot_be_opened_holds_up_no_other(
    using: str, received: list[Event], caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MISSING_SECRET", raising=False)
    runner = {"sink": "https://runner.example/events", "secret": "env:MISSING_SECRET"}
    routed = {"DESTINATIONS": {"runner": runner}, "ROUTES": {"order.placed": ["runner"]}}
    with override_settings(OUTBOX={**settings.OUTBOX, **routed}):
        place(using)
        assert drain(using) == Drained(delivered=1)

    assert len(received) == 1
    assert events(using).pending().get().destination == "runner"
    assert "nothing is sent to runner from this process" in caplog.text
    assert "env:MISSING_SECRET is missing" in caplog.text


def test_a_handler_continues_the_emitters_trace(using: str) -> None:
    def look(event: Event) -> None:
        seen.append(trace.get_current_span().get_span_context().trace_id)

    seen: list[int] = []
    span: Any = trace.NonRecordingSpan(trace.SpanContext(5, 7, False, trace.TraceFlags(1)))
    with trace.use_span(span):
        place(using, 1)
    place(using, 2)
    with handled_by(look):
        assert drain(using).delivered == 2
    assert seen == [5, 0]


def by_hand(using: str) -> None:
    transaction.set_autocommit(False, using=using)


def never_left(using: str) -> None:
    transaction.atomic(using=using).__enter__()


@pytest.mark.parametrize("leave", [by_hand, never_left])
def test_what_a_handler_leaves_open_is_rolled_back_and_the_others_are_settled(
    using: str, leave: Callable[[str], None]
) -> None:
    def handle(event: Event) -> None:
        if event.aggregate_id == "1":
            leave(using)
            orders(using).create(total=1)

    place(using, 1)
    place(using, 2)
    with handled_by(handle):
        assert drain(using) == Drained(delivered=1, retried=1)
    # As Celery does after a task: what was not committed is gone.
    connections[using].close()

    assert [(event.status, event.error_message) for event in events(using)] == [
        ("pending", LEFT_OPEN),
        ("delivered", None),
    ]
    assert not orders(using).exists()


def test_a_task_inside_a_transaction_says_so_and_queues_no_other(
    using: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    published: list[str] = []
    monkeypatch.setattr(tasks, "_publish", published.append)
    place(using)

    with transaction.atomic(using=using), caplog.at_level(logging.ERROR, "relaybox.django"):
        assert not deliver_outbox_events_task(using=using)["finished"]

    assert published == []
    assert "inside a transaction" in caplog.text
    assert tasks.mark_queued(using, 60.0)


def test_a_database_without_autocommit_is_busy_before_it_is_connected(using: str) -> None:
    connection = connections[using]
    connection.close()
    connection.settings_dict["AUTOCOMMIT"] = False
    try:
        assert is_busy(connection)
    finally:
        connection.settings_dict["AUTOCOMMIT"] = True
    assert not is_busy(connection)


def test_what_an_error_cut_short_cannot_be_committed(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key without its event would make every later try a duplicate."""
    execute = databases.execute_ours

    def refuse_rows(connection: Any, query: Any) -> Any:
        if "aggregate_type" in query.sql:
            raise OperationalError("the lock was not had in time")
        return execute(connection, query)

    def try_twice() -> None:
        with transaction.atomic(using=using):
            with monkeypatch.context() as patch:
                patch.setattr(databases, "execute_ours", refuse_rows)
                with pytest.raises(OperationalError):
                    emit_event("order", 1, "order.placed", {}, idempotency_key="one", using=using)
            emit_event("order", 1, "order.placed", {}, idempotency_key="one", using=using)

    with pytest.raises(TransactionFailed):
        try_twice()
    with transaction.atomic(using=using):
        again = emit_event("order", 1, "order.placed", {}, idempotency_key="one", using=using)

    assert not again.duplicate
    assert events(using).count() == 1


@pytest.mark.parametrize("using", ["default", "mariadb"])
def test_a_connection_that_breaks_in_a_drain_has_nothing_handled_twice(using: str) -> None:
    handled: list[str] = []

    def handle(event: Event) -> None:
        handled.append(event.aggregate_id)
        if event.aggregate_id == "2":
            # Behind Django's back, as a server that is restarted would.
            connections[using].connection.close()

    for number in range(1, 6):
        place(using, number)
    with handled_by(handle):
        with pytest.raises(StoreError):
            drain(using)
        assert {event.status for event in events(using) if event.aggregate_id in handled} == {"delivered"}
        assert not events(using).exclude(lease_owner=None).exists()
        drain(using)

    assert sorted(handled) == ["1", "2", "3", "4", "5"]


class TooLongError(Exception):
    """What a soft time limit of Celery's raises wherever the thread happens to be."""


def test_what_a_drain_began_ends_with_it_where_its_thread_is_interrupted() -> None:
    """Otherwise its loop would wait for this thread forever, and the process for that loop."""

    async def slow(event: Event) -> None:
        # When the thread that drains has nothing left to do but to wait for this one.
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        await asyncio.sleep(600)

    def interrupt(*_: Any) -> None:
        raise TooLongError

    with handled_by(slow):
        place()
        before, handler = set(threading.enumerate()), signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(TooLongError):
                drain()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        gc.collect()
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
            assert not thread.is_alive()
        assert drain().finished
