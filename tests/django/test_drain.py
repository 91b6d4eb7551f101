"""Draining on Django's own connection."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.test import override_settings

from relaybox import Event, Reject
from relaybox.contrib.django import configuration, emit_event, handlers, outbox_handler
from relaybox.contrib.django.drain import Drained, drain, drain_rows, upkeep
from relaybox.contrib.django.models import OutboxAttempt, OutboxEvent
from relaybox.contrib.django.signals import event_delivered, event_failed
from tests.django.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _nobody_is_told() -> Iterator[None]:
    from django.conf import settings

    with override_settings(OUTBOX={**settings.OUTBOX, "DISPATCH": "none"}):
        yield


@pytest.fixture
def handler() -> Iterator[Any]:
    """Registers a handler for one test."""
    before = dict(handlers.registered)
    yield outbox_handler
    handlers.registered.clear()
    handlers.registered.update(before)
    configuration.forget()


def place(using: str, number: int = 1, event_type: str = "order.placed") -> Any:
    with transaction.atomic(using=using):
        return emit_event("order", number, event_type, {"number": number}, using=using)


def events(using: str) -> Any:
    return OutboxEvent.objects.using(using)


def test_what_is_committed_is_delivered(using: str, received: list[Event]) -> None:
    emitted = [place(using, number) for number in range(3)]

    assert drain(using) == Drained(delivered=3)
    assert [event.id for event in received] == [one.event_id for one in emitted]
    assert {event.status for event in events(using)} == {"delivered"}
    assert drain(using) == Drained()


def test_a_handler_that_raises_is_tried_again_later(using: str, handler: Any) -> None:
    @handler("order.odd", name="odd")
    def refuse(event: Event) -> None:
        raise ZeroDivisionError("no")

    place(using, event_type="order.odd")

    assert drain(using) == Drained(retried=1)
    event = events(using).get()
    assert (event.status, event.attempts, event.error_message) == ("pending", 1, "ZeroDivisionError: no")
    wait = event.next_attempt_at - event.last_attempt_at
    assert timedelta(seconds=50) < wait < timedelta(seconds=70)
    assert OutboxAttempt.objects.using(using).count() == 1
    assert drain(using) == Drained()


def test_a_handler_that_rejects_fails_the_event(using: str, handler: Any) -> None:
    @handler("order.odd", name="odd")
    def refuse(event: Event) -> None:
        raise Reject("never")

    place(using, event_type="order.odd")

    assert drain(using) == Drained(failed=1)
    assert events(using).get().status == "failed"


def test_only_these_rows(using: str, received: list[Event]) -> None:
    other, wanted = place(using, 1), place(using, 2)

    assert drain_rows(using, {"memory": [wanted.event_id]}, seconds=5) == Drained(delivered=1)
    assert [event.id for event in received] == [wanted.event_id]
    assert events(using).get(id=other.event_id).status == "pending"


def test_inside_an_open_transaction_nothing_is_done(using: str, received: list[Event]) -> None:
    place(using)

    with transaction.atomic(using=using):
        assert drain(using) == Drained(finished=False)
    assert not received
    assert drain(using) == Drained(delivered=1)


def test_a_handler_works_in_the_callers_thread_and_on_its_connection(using: str, handler: Any) -> None:
    seen = []

    @handler("order.odd", name="odd")
    def look(event: Event) -> None:
        seen.append(connections[using])
        Order.objects.using(using).create(total=event.payload["number"])

    place(using, 7, "order.odd")
    drain(using)

    assert seen == [connections[using]]
    assert Order.objects.using(using).get().total == 7


def test_an_asynchronous_handler_works_on_the_callers_connection_too(using: str, handler: Any) -> None:
    @handler("order.odd", name="odd")
    async def look(event: Event) -> None:
        await Order.objects.using(using).acreate(total=event.payload["number"])

    place(using, 7, "order.odd")

    assert drain(using) == Drained(delivered=1)
    assert Order.objects.using(using).get().total == 7


def test_signals_are_sent_after_the_fact(using: str, handler: Any, caplog: Any) -> None:
    told: list[Any] = []

    @handler("order.odd", name="odd")
    def refuse(event: Event) -> None:
        raise Reject("never")

    def on_delivered(sender: Any, event: Event, destination: str, using: str, **_: Any) -> None:
        told.append((destination, event.payload, using, events(using).get(event_id=event.id).status))
        raise ZeroDivisionError

    def on_failed(sender: Any, event: Event, error: str, **_: Any) -> None:
        told.append((error, sender))

    event_delivered.connect(on_delivered)
    event_failed.connect(on_failed)
    try:
        place(using)
        place(using, 2, "order.odd")
        assert drain(using) == Drained(delivered=1, failed=1)
    finally:
        event_delivered.disconnect(on_delivered)
        event_failed.disconnect(on_failed)

    assert ("memory", {"number": 1}, using, "delivered") in told
    assert ("never", OutboxEvent) in told
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
    from datetime import UTC, datetime

    connections[using].close()
    place(using)
    drain(using)

    assert abs(datetime.now(UTC) - received[0].created_at) < timedelta(minutes=1)


def test_a_destination_that_cannot_be_opened_holds_up_no_other(
    using: str, received: list[Event], caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.conf import settings

    monkeypatch.delenv("MISSING_SECRET", raising=False)
    runner = {"sink": "https://runner.example/events", "secret": "env:MISSING_SECRET"}
    with override_settings(
        OUTBOX={
            **settings.OUTBOX,
            "DESTINATIONS": {"runner": runner},
            "ROUTES": {"order.placed": ["runner"]},
        }
    ):
        place(using)
        assert drain(using) == Drained(delivered=1)

    assert len(received) == 1
    assert events(using).pending().get().destination == "runner"
    assert "nothing is sent to runner from this process" in caplog.text
    assert "env:MISSING_SECRET is missing" in caplog.text
