"""Where a commit may happen, and in which thread and on which connection its events are delivered then."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import IntegrityError, connections, transaction
from django.test import AsyncClient, Client, override_settings
from django.utils import timezone

from relaybox import Event
from relaybox.contrib.django import emit_event
from relaybox.contrib.django.drain import drain
from relaybox.contrib.django.models import OutboxEvent
from relaybox.contrib.django.tasks import deliver_outbox_events_task
from tests.django.conftest import ALIASES
from tests.django.eager import eager, handled_by
from tests.django.shop.models import Order, Receipt

pytestmark = pytest.mark.django_db(transaction=True)


class Where:
    """A handler that notes where it is called."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.threads: list[int] = []
        self.connections: list[Any] = []
        self.seen: list[bool] = []

    def __call__(self, event: Event) -> None:
        connection = connections[self.using]
        self.threads.append(threading.get_ident())
        # Kept, so that no other can have its place in memory.
        self.connections.append(connection)
        self.seen.append(Order.objects.using(self.using).filter(pk=event.aggregate_id).exists())


def place(using: str = "default", event_type: str = "order.placed") -> None:
    with transaction.atomic(using=using):
        order = Order.objects.using(using).create(total=1)
        emit_event("order", order.pk, event_type, {}, using=using)


def statuses(using: str = "default") -> list[str]:
    return list(OutboxEvent.objects.using(using).order_by("position").values_list("status", flat=True))


def fail(event: Event) -> None:
    raise ZeroDivisionError("the handler's own")


@pytest.fixture
def tidy() -> Iterator[None]:
    """Close the connections of the thread that asynchronous code has for Django."""
    yield
    asyncio.run(sync_to_async(connections.close_all)())


def test_a_synchronous_view_delivers_in_its_thread_on_its_connection(client: Client) -> None:
    where = Where("default")
    with eager(), handled_by(where):
        response = client.post("/orders/", {"total": "42"})

    assert response.status_code == 201
    assert where.threads == [threading.get_ident()]
    assert where.connections == [connections["default"]]
    assert where.seen == [True]
    assert statuses() == ["delivered"]


def test_a_commit_delivers_in_its_thread_on_its_connection(using: str) -> None:
    where = Where(using)
    with eager(), handled_by(where):
        place(using)

    assert where.threads == [threading.get_ident()]
    assert where.connections == [connections[using]]
    assert (where.seen, statuses(using)) == ([True], ["delivered"])


async def test_an_asynchronous_view_delivers_where_its_synchronous_calls_are(
    async_client: AsyncClient, tidy: None
) -> None:
    where = Where("default")
    with eager(), handled_by(where):
        response = await async_client.post("/orders/async/", {"total": "42"})

    assert response.status_code == 201
    assert where.threads == [await sync_to_async(threading.get_ident)()]
    assert where.connections == [await sync_to_async(lambda: connections["default"])()]
    assert where.seen == [True]
    assert await sync_to_async(statuses)() == ["delivered"]


@pytest.mark.parametrize("propagates", [False, True])
def test_a_request_does_not_see_that_a_handler_raised(client: Client, propagates: bool) -> None:
    with eager(propagates=propagates), handled_by(fail):
        response = client.post("/orders/", {"total": "42"})

    assert response.status_code == 201
    row = OutboxEvent.objects.get()
    assert (row.status, row.attempts) == ("pending", 1)
    assert "the handler's own" in row.error_message
    assert row.next_attempt_at > timezone.now()


@pytest.mark.parametrize("propagates", [False, True])
def test_a_commit_does_not_see_that_the_drain_failed(
    using: str, propagates: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise IntegrityError("the drain's own")

    monkeypatch.setattr("relaybox.contrib.django.tasks.drain_rows", broken)
    with eager(propagates=propagates):
        place(using)

    assert statuses(using) == ["pending"]
    assert "the drain's own" in caplog.text
    assert drain(using).delivered == 1


async def test_where_a_loop_runs_in_this_thread_a_helper_has_its_own_connection(
    using: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    where = Where(using)
    with eager(), handled_by(where):
        place(using)

    assert (where.seen, statuses(using)) == ([True], ["delivered"])
    assert where.threads != [threading.get_ident()]
    assert where.connections != [connections[using]]
    assert where.connections[0].connection is None, "the helper's connection was left open"
    # A coroutine has its own, which nobody else would close.
    connections[using].close()


def test_inside_atomic_nothing_is_delivered_and_a_later_sweep_does_it(
    using: str, received: list[Event]
) -> None:
    with transaction.atomic(using=using):
        emit_event("order", 1, "order.placed", {}, using=using)
        assert not drain(using).finished
        with eager():
            assert not deliver_outbox_events_task.delay(using=using).get()["finished"]
        assert received == []

    assert drain(using, sweep=True).delivered == 1
    assert len(received) == 1


def test_what_is_emitted_inside_a_nested_block_waits_for_the_outermost(
    using: str, received: list[Event]
) -> None:
    with eager(), transaction.atomic(using=using):
        place(using)
        assert received == []
    assert len(received) == 1


def test_what_a_handler_emits_is_delivered_too(using: str) -> None:
    def pay(event: Event) -> None:
        with transaction.atomic(using=using):
            emit_event("order", event.aggregate_id, "order.paid", {}, using=using)

    paid: list[Event] = []
    with eager(), handled_by(pay), handled_by(paid.append, "receipts"):
        place(using)

    assert [event.type for event in paid] == ["order.paid"]
    assert statuses(using) == ["delivered", "delivered"]


def test_a_chain_without_an_end_is_cut_off(using: str) -> None:
    def again(event: Event) -> None:
        place(using)

    with eager(), handled_by(again), override_settings(OUTBOX={**settings.OUTBOX, "EAGER_SECONDS": 0.5}):
        begin = time.monotonic()
        place(using)
        took = time.monotonic() - begin

    *delivered, last = statuses(using)
    assert len(delivered) > 1
    assert (set(delivered), last) == ({"delivered"}, "pending")
    assert took < 5


def test_a_handler_that_takes_longer_than_the_request_may_wait_is_not_called_again(using: str) -> None:
    def dawdle(event: Event) -> None:
        calls.append(event)
        threading.Event().wait(0.4)

    calls: list[Event] = []
    with eager(), handled_by(dawdle), override_settings(OUTBOX={**settings.OUTBOX, "EAGER_SECONDS": 0.1}):
        place(using)

    assert statuses(using) == ["delivered"]
    assert (drain(using).delivered, len(calls)) == (0, 1)


def test_an_asynchronous_handler_uses_the_callers_connection(using: str) -> None:
    async def write(event: Event) -> None:
        order = await Order.objects.using(using).aget(pk=event.aggregate_id)
        await Receipt.objects.using(using).acreate(event_id=event.id, event_type=str(order.total))
        threads.append(await sync_to_async(threading.get_ident)())

    threads: list[int] = []
    with eager(), handled_by(write):
        place(using)

    assert threads == [threading.get_ident()]
    assert Receipt.objects.using(using).get().event_type == "1"
    assert statuses(using) == ["delivered"]


@pytest.mark.django_db(transaction=False)
def test_an_asynchronous_handler_sees_the_transaction_of_a_test(
    using: str, django_capture_on_commit_callbacks: Any
) -> None:
    async def write(event: Event) -> None:
        assert await Order.objects.using(using).filter(pk=event.aggregate_id).aexists()

    with eager(), handled_by(write), django_capture_on_commit_callbacks(using=using, execute=True):
        place(using)

    assert statuses(using) == ["delivered"]


@pytest.mark.django_db(transaction=True, databases=ALIASES)
def test_events_of_several_databases_are_delivered_from_each(received: list[Event]) -> None:
    with eager(), transaction.atomic(), transaction.atomic(using="sqlite"):
        place("default")
        place("sqlite")
        with transaction.atomic(using="mariadb"):
            place("mariadb")
        assert len(received) == 1, "the transaction of mariadb has committed"

    assert len(received) == 3
    assert [statuses(alias) for alias in ALIASES] == [["delivered"]] * 3


@pytest.mark.django_db(transaction=True, databases=ALIASES)
def test_a_handler_may_emit_into_another_database(received: list[Event]) -> None:
    def forward(event: Event) -> None:
        place("sqlite")

    with eager(), handled_by(forward, "receipts"):
        place("default", "order.paid")

    assert len(received) == 1
    assert [statuses(alias) for alias in ("default", "sqlite")] == [["delivered"]] * 2
