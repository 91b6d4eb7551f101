"""Emitting inside Django's transactions, and the gradual rollout of the routes in ``OUTBOX``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import DatabaseError, connections, transaction
from django.test import override_settings
from django.utils.translation import gettext_lazy

from relaybox import Route
from relaybox.contrib.django import (
    aemit_event,
    conf,
    emit_event,
    emit_events,
    enabled,
    rollout,
    shadow,
)
from relaybox.core.settings import Settings
from relaybox.emit.row import RowBuilder
from relaybox.errors import (
    ConfigError,
    InvalidField,
    NotInTransaction,
    PayloadError,
    TransactionFailed,
    UnknownDestination,
    Unrouted,
)
from tests.django.shop.models import Order
from tests.django.steps import events, orders


def place(using: str, **options: Any) -> Any:
    return emit_event("order", 1, "order.placed", {"total": 42}, using=using, **options)


def test_an_event_is_a_row_of_the_open_transaction(using: str) -> None:
    emitted = place(using, headers={"by": "a test"})

    event = events(using).get()
    assert (event.id, event.event_id) == (emitted.event_id, emitted.event_id)
    assert (event.aggregate_type, event.aggregate_id, event.event_type) == ("order", "1", "order.placed")
    assert event.payload == {"total": 42}
    assert event.headers == {"by": "a test"}
    assert (event.status, event.destination, event.max_attempts) == ("pending", "memory", 5)
    assert abs(datetime.now(UTC) - event.created_at) < timedelta(seconds=60)
    assert event.position > 0


@pytest.mark.django_db(transaction=True)
def test_an_event_goes_with_the_transaction_that_is_rolled_back(using: str) -> None:
    with suppress(ZeroDivisionError), transaction.atomic(using=using):
        orders(using).create(total=1)
        place(using)
        raise ZeroDivisionError

    assert not events(using).exists()
    assert not orders(using).exists()


@pytest.mark.django_db(transaction=True)
def test_an_event_goes_with_its_savepoint(using: str) -> None:
    with transaction.atomic(using=using):
        kept = place(using)
        with suppress(ZeroDivisionError), transaction.atomic(using=using):
            place(using)
            raise ZeroDivisionError

    assert [event.event_id for event in events(using)] == [kept.event_id]


@pytest.mark.django_db(transaction=True)
def test_outside_atomic_it_raises(using: str) -> None:
    with pytest.raises(NotInTransaction, match=r"transaction\.atomic"):
        place(using)
    assert not events(using).exists()


@pytest.mark.django_db(transaction=True)
@override_settings(OUTBOX={"REQUIRE_ATOMIC": False, "DISPATCH": "none"})
def test_outside_atomic_it_commits_by_itself_where_that_is_wanted(using: str) -> None:
    first = place(using, idempotency_key="k")
    second = place(using, idempotency_key="k")

    assert (first.duplicate, second.duplicate) == (False, True)
    assert events(using).count() == 1


def test_a_duplicate_key_writes_nothing_and_the_transaction_goes_on(using: str) -> None:
    first = place(using, idempotency_key="k")
    second = place(using, idempotency_key="k")
    third = emit_event("order", 1, "order.paid", {}, idempotency_key="k", using=using)

    assert (second.event_id, second.duplicate, second.destinations) == (first.event_id, True, ())
    assert not third.duplicate
    assert events(using).count() == 2


def test_several_at_once_keep_their_order(using: str) -> None:
    calls = [
        {"aggregate_type": "order", "aggregate_id": n, "event_type": "order.placed", "payload": n}
        for n in range(3)
    ]
    emitted = emit_events(calls, using=using)

    assert [row.event_id for row in events(using)] == [one.event_id for one in emitted]
    assert [row.payload for row in events(using)] == [0, 1, 2]
    with pytest.raises(PayloadError, match=r"calls\[1\]"):
        emit_events([calls[0], {**calls[0], "payload": object()}], using=using)
    assert events(using).count() == 3


BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("payload", {"x": object()}, PayloadError, ""),
    ("payload", {"x": float("nan")}, PayloadError, ""),
    ("payload", Order(total=1), PayloadError, ""),
    ("payload", "x" * 2_000_000, PayloadError, r"raise OUTBOX\['MAX_PAYLOAD'\]"),
    ("idempotency_key", "k" * 256, InvalidField, ""),
    ("aggregate_id", "i" * 256, InvalidField, ""),
    ("aggregate_type", "", InvalidField, ""),
    ("event_type", "order.plcaed", Unrouted, r"add 'order.plcaed': \['…'\] to OUTBOX\['ROUTES'\]"),
    ("destinations", ["memry"], UnknownDestination, ""),
    ("max_attempts", 0, InvalidField, ""),
    ("deliver_at", datetime(2030, 1, 1), InvalidField, ""),
    ("using", "defualt", ConfigError, "did you mean 'default'"),
]


def test_bad_input_is_refused_in_the_words_of_the_settings_and_the_transaction_goes_on(using: str) -> None:
    call = {"aggregate_type": "order", "aggregate_id": 1, "event_type": "order.placed", "payload": {}}
    for name, value, error, said in BAD:
        with pytest.raises(error, match=said or None):
            emit_event(**{**call, "using": using, name: value})
        orders(using).create(total=1)
        assert not events(using).exists(), name


def test_lazy_text_is_text(using: str) -> None:
    emit_event("order", 1, "order.placed", {"title": gettext_lazy("Yes")}, using=using)

    assert events(using).get().payload == {"title": "Yes"}


def test_a_transaction_in_error_raises(using: str) -> None:
    with transaction.atomic(using=using):
        transaction.set_rollback(True, using=using)
        with pytest.raises(TransactionFailed):
            place(using)


@pytest.mark.django_db
def test_a_statement_that_failed_before_is_named_as_the_cause() -> None:
    with transaction.atomic():
        with suppress(DatabaseError), connections["default"].cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
        with pytest.raises(TransactionFailed):
            emit_event("order", 1, "order.placed", {})
        transaction.set_rollback(True)


@pytest.mark.django_db(transaction=True)
async def test_asynchronous_code_emits_where_its_synchronous_calls_are(using: str) -> None:
    block = transaction.atomic(using=using)
    await sync_to_async(block.__enter__)()
    emitted = await aemit_event("order", 1, "order.placed", {}, using=using)
    await sync_to_async(block.__exit__)(None, None, None)

    assert (await events(using).aget()).event_id == emitted.event_id
    await sync_to_async(connections.close_all)()


IN, OUT = 2, 1


@pytest.fixture
def rolled_out() -> Iterator[None]:
    """Route a share of the aggregates."""
    route: dict[str, Any] = {"events": "file.*", "to": "runner", "rollout": 10}
    with override_settings(OUTBOX={**settings.OUTBOX, "ROUTES": [route]}):
        yield


def add(using: str, aggregate_id: int) -> tuple[str, ...]:
    return emit_event("file", aggregate_id, "file.added", {}, using=using).destinations


@pytest.mark.usefixtures("rolled_out")
def test_a_share_of_the_aggregates_is_emitted(using: str) -> None:
    assert (add(using, IN), add(using, OUT)) == (("runner",), ())
    assert (enabled("runner", IN), enabled("file.*", OUT)) == (True, False)
    assert events(using).get().aggregate_id == str(IN)


@pytest.mark.usefixtures("rolled_out")
def test_routes_change_in_this_process_until_there_are_other_settings(using: str) -> None:
    rollout("file.*", 100)
    shadow(Route("file.*", to="runner"), True)
    assert add(using, OUT) == ("runner",)
    assert not enabled("runner", OUT)
    assert events(using).get().headers == {"relaybox-shadow": True}
    shadow("runner", False)
    assert enabled("runner", OUT)
    with override_settings(OUTBOX=settings.OUTBOX):
        assert not enabled("runner", OUT)


@pytest.mark.usefixtures("rolled_out")
def test_a_handler_that_comes_later_changes_nothing(handler: Any) -> None:
    rollout("runner", 100)

    @handler("late.*")
    def on_late(event: Any) -> None:
        raise AssertionError("nothing is delivered")

    assert enabled("runner", OUT)
    assert enabled("late.*", OUT)


@pytest.mark.usefixtures("rolled_out")
def test_a_change_while_another_thread_reads_the_settings_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """That thread has read the former routes, and comes to its end after the change."""

    def slowly(given: Settings) -> RowBuilder:
        monkeypatch.setattr(conf, "RowBuilder", RowBuilder)
        rollout("runner", 100)
        return RowBuilder(given)

    conf.forget()
    monkeypatch.setattr(conf, "RowBuilder", slowly)
    conf.get_configuration()

    assert enabled("runner", OUT)


@pytest.mark.usefixtures("rolled_out")
def test_what_is_not_known_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'runner'"):
        enabled("runer", 1)
    with pytest.raises(ConfigError, match="rollout = 101"):
        rollout("runner", 101)
