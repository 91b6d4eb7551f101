"""Transactions that are open where none should be, and errors in the midst of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError, connections, transaction
from django.test import override_settings

from relaybox import Event
from relaybox.contrib.django import emit, emit_event, queued, tasks
from relaybox.contrib.django.drain import Drained, drain
from relaybox.contrib.django.models import OutboxEvent
from relaybox.contrib.django.sink import LEFT_OPEN
from relaybox.contrib.django.store import is_busy
from relaybox.contrib.django.tasks import deliver_outbox_events_task
from relaybox.errors import StoreError, TransactionFailed
from tests.django.eager import handled_by
from tests.django.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _nobody_is_told() -> Iterator[None]:
    with override_settings(OUTBOX={**settings.OUTBOX, "DISPATCH": "none"}):
        yield


def place(using: str, number: int = 1) -> None:
    with transaction.atomic(using=using):
        emit_event("order", number, "order.placed", {}, using=using)


def events(using: str) -> Any:
    return OutboxEvent.objects.using(using).order_by("position")


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
            Order.objects.using(using).create(total=1)

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
    assert not Order.objects.using(using).exists()


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
    assert queued.mark(using, 60.0)


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
    """A key without its event would make every later try a duplicate."""
    execute = emit.execute_ours

    def refuse_rows(connection: Any, query: Any) -> Any:
        if "aggregate_type" in query.sql:
            raise OperationalError("the lock was not had in time")
        return execute(connection, query)

    def try_twice() -> None:
        with transaction.atomic(using=using):
            with monkeypatch.context() as patch:
                patch.setattr(emit, "execute_ours", refuse_rows)
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
