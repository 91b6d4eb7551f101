"""The inbox inside Django's transactions, and handlers that run once."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from django.db import DatabaseError, connections, transaction

from relaybox import Event
from relaybox.contrib.django import once, only_once
from relaybox.contrib.django.drain import drain
from relaybox.contrib.django.models import InboxMessage
from relaybox.contrib.django.outbox import get_outbox
from relaybox.errors import ConfigError, InvalidField, NotInTransaction, TransactionFailed
from tests.django.steps import events, orders, place

AT_ONCE = 16


class Failure(Exception):
    """What a consumer raises."""


def marks(using: str) -> list[str]:
    return list(InboxMessage.objects.using(using).values_list("consumer", flat=True))


def due(using: str) -> None:
    """Let the one event be delivered once more, now."""
    now = events(using).get().created_at
    events(using).update(status="pending", delivered_at=None, next_attempt_at=now)


def test_the_first_delivery_is_first(using: str) -> None:
    message = uuid4()
    with once(message, consumer="billing", using=using) as first:
        assert first
    with once(str(message), consumer="billing", using=using) as first:
        assert not first
    with once(message, consumer="shipping", using=using) as first:
        assert first
    assert sorted(marks(using)) == ["billing", "shipping"]


@pytest.mark.django_db(transaction=True)
def test_work_and_mark_are_rolled_back_together(using: str) -> None:
    for outcome in (Failure, None):
        with (
            suppress(Failure),
            transaction.atomic(using=using),
            once("m", consumer="c", using=using) as first,
        ):
            assert first
            orders(using).create(total=1)
            if outcome:
                raise outcome
        assert (orders(using).count(), len(marks(using))) == ((0, 0) if outcome else (1, 1))


@pytest.mark.django_db(transaction=True)
def test_an_exception_that_is_caught_inside_the_transaction_leaves_no_mark(using: str) -> None:
    with transaction.atomic(using=using):
        with suppress(Failure), once("m", consumer="c", using=using):
            raise Failure
        orders(using).create(total=1)
    assert (orders(using).count(), marks(using)) == (1, [])


@pytest.mark.django_db(transaction=True)
def test_the_same_message_sixteen_times_at_once_has_one_effect(using: str) -> None:
    def process() -> None:
        try:
            for _ in range(20):
                # MariaDB may choose one of those who wait to break a deadlock.
                with suppress(DatabaseError), transaction.atomic(using=using):
                    with once("m", consumer="c", using=using) as first:
                        if first:
                            orders(using).create(total=1)
                    answers.append(first)
                    return
        finally:
            connections.close_all()

    answers: list[bool] = []
    threads = [threading.Thread(target=process) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == [False] * (AT_ONCE - 1) + [True]
    assert (orders(using).count(), len(marks(using))) == (1, 1)


@pytest.mark.django_db(transaction=True)
def test_outside_atomic_it_raises(using: str) -> None:
    with pytest.raises(NotInTransaction, match=r"transaction\.atomic"), once("m", consumer="c", using=using):
        raise AssertionError("never reached")
    assert marks(using) == []


def test_bad_input_is_refused_and_the_transaction_goes_on(using: str) -> None:
    for message in ("", "x" * 256, "\0", None, b"x"):
        with pytest.raises(InvalidField), once(message, consumer="c", using=using):
            raise AssertionError("never reached")
    with (
        pytest.raises(ConfigError, match="no database has this name"),
        once("m", consumer="c", using="nope"),
    ):
        raise AssertionError("never reached")
    orders(using).create(total=1)


def test_a_transaction_in_error_raises(using: str) -> None:
    with transaction.atomic(using=using):
        transaction.set_rollback(True, using=using)
        with pytest.raises(TransactionFailed), once("m", consumer="c", using=using):
            raise AssertionError("never reached")


def test_a_decorated_function_runs_once_for_each_message(using: str) -> None:
    @only_once(id_of=lambda order: order["id"], using=using)
    def bill(order: dict[str, Any], *, total: int) -> int:
        return total

    answers = [bill({"id": name}, total=total) for name, total in (("a", 7), ("a", 7), ("b", 8))]
    assert answers == [7, None, 8]
    assert {name.rpartition(".")[2] for name in marks(using)} == {"bill"}
    with pytest.raises(ConfigError, match="async function"):

        @only_once()
        async def ship(message: str) -> None: ...


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("quiet")
def test_a_handler_runs_in_one_transaction_with_its_mark(using: str, handler: Any) -> None:
    trouble, calls = [Failure("no luck")], []

    @handler("ledger.entered", name="books", once=True, backoff={"base": "1h", "cap": "1h"})
    def book(event: Event, connection: Any) -> None:
        calls.append(event.id)
        assert connection.alias == using
        assert connection.in_atomic_block
        orders(using).create(total=event.payload["number"])
        if trouble:
            raise trouble.pop()

    place(using, event_type="ledger.entered")
    assert drain(using).retried == 1
    assert (orders(using).count(), marks(using)) == (0, [])
    due(using)
    assert drain(using).delivered == 1
    assert (len(calls), orders(using).count(), marks(using)) == (2, 1, ["books"])

    due(using)
    assert drain(using).delivered == 1
    assert (len(calls), orders(using).count()) == (2, 1)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("quiet")
def test_a_handler_of_one_argument_may_run_once_too(using: str, handler: Any) -> None:
    calls = []

    @handler("ledger.entered", name="books", once=True)
    def book(event: Event) -> None:
        calls.append(event.id)

    place(using, event_type="ledger.entered")
    assert drain(using).delivered == 1
    assert (len(calls), marks(using)) == (1, ["books"])


@pytest.mark.usefixtures("quiet")
def test_a_relay_with_connections_of_its_own_has_the_handler_mark_on_djangos(live: Any, handler: Any) -> None:
    using, calls = live.using, []

    @handler("ledger.entered", name="books", once=True)
    def book(event: Event, connection: Any) -> None:
        calls.append((connection.alias, connection.in_atomic_block))

    place(using, event_type="ledger.entered")
    for _ in range(2):
        get_outbox(using).drain()
        due(using)
    assert calls == [(using, True)]
    assert marks(using) == ["books"]


def test_an_async_handler_is_refused_where_it_is_registered(handler: Any) -> None:
    with pytest.raises(ConfigError, match=r"async function"):

        @handler("ledger.entered", name="books", once=True)
        async def book(event: Event) -> None: ...
