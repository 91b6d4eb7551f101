"""After the commit: who is told, how often, and what becomes of it when that fails."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.conf import settings
from django.db import connections, transaction
from django.test import override_settings

from relaybox import Event
from relaybox.contrib.django import dispatch, emit_event, tasks
from relaybox.contrib.django.models import OutboxEvent
from relaybox.contrib.django.outbox import get_outbox
from tests.django import workers
from tests.django.eager import eager

pytestmark = pytest.mark.django_db(transaction=True)

NOBODY = "redis://127.0.0.1:1/0"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, list[str]]]]:
    """What was told, instead of telling it."""
    calls: list[tuple[str, dict[str, list[str]]]] = []
    monkeypatch.setattr(dispatch, "tell", lambda using, rows: calls.append((using, dict(rows))))
    return calls


@pytest.fixture
def configured() -> Iterator[Callable[..., None]]:
    """Changes keys of OUTBOX for one test."""
    overrides = []

    def change(**keys: Any) -> None:
        override = override_settings(OUTBOX={**settings.OUTBOX, **keys})
        override.enable()
        overrides.append(override)

    yield change
    for override in reversed(overrides):
        override.disable()


def place(using: str, number: int = 1) -> str:
    emitted = emit_event("order", number, "order.placed", {"number": number}, using=using)
    return str(emitted.event_id)


def normal(rows: list[str]) -> list[str]:
    return [row.replace("-", "") for row in rows]


def test_a_transaction_is_told_of_once(using: str, told: list[Any]) -> None:
    with transaction.atomic(using=using):
        ids = [place(using, number) for number in range(3)]
        with transaction.atomic(using=using):
            ids.append(place(using, 3))
        assert not told

    [(alias, rows)] = told
    assert (alias, normal(rows["memory"])) == (using, normal(ids))


def test_a_savepoint_that_is_rolled_back_does_not_take_the_hook_along(using: str, told: list[Any]) -> None:
    with transaction.atomic(using=using):
        with suppress(ZeroDivisionError), transaction.atomic(using=using):
            place(using)
            raise ZeroDivisionError
        kept = place(using)

    [(_, rows)] = told
    assert normal([kept])[0] in normal(rows["memory"])


def test_a_transaction_that_is_rolled_back_is_not_told_of(using: str, told: list[Any]) -> None:
    with suppress(ZeroDivisionError), transaction.atomic(using=using):
        place(using)
        raise ZeroDivisionError
    assert not told

    with transaction.atomic(using=using):
        second = place(using)
    [(_, rows)] = told
    assert normal(rows["memory"]) == normal([second])


def test_many_savepoints_cost_no_more_each(using: str, told: list[Any]) -> None:
    with transaction.atomic(using=using):
        for number in range(20):
            with transaction.atomic(using=using):
                place(using, number)
        hooks = [hook for hook in connections[using].run_on_commit if isinstance(hook[1], dispatch.Dispatch)]
        assert len({id(hook[1]) for hook in hooks}) == 1

    assert len(told) == 1


def test_transactions_by_hand_have_no_hook_and_nothing_is_lost(using: str, told: list[Any]) -> None:
    transaction.set_autocommit(False, using=using)
    try:
        place(using)
        transaction.commit(using=using)
    finally:
        transaction.rollback(using=using)
        transaction.set_autocommit(True, using=using)

    assert not told
    assert OutboxEvent.objects.using(using).due().count() == 1


def test_a_broker_that_refuses_is_logged_and_not_asked_again_at_once(
    using: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    publish = tasks._publish
    monkeypatch.setattr(tasks, "_publish", lambda using: (asked.append(using), publish(using)))
    with workers.sending_to(NOBODY):
        for number in range(3):
            with transaction.atomic(using=using):
                place(using, number)

    assert len(asked) == 1
    assert len([record for record in caplog.records if "the next sweep will find" in record.message]) == 1
    assert OutboxEvent.objects.using(using).due().count() == 3


def test_a_broker_that_does_not_answer_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "ANSWER", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with workers.sending_to(f"redis://127.0.0.1:{port}/0"), transaction.atomic():
            place("default")

    assert "the next sweep will find" in caplog.text
    assert OutboxEvent.objects.due().count() == 1


def test_a_task_that_could_not_be_queued_leaves_no_mark(using: str, broker: str) -> None:
    import redis

    with workers.sending_to(NOBODY), transaction.atomic(using=using):
        place(using)
    with workers.sending_to(broker), redis.Redis.from_url(broker) as client:
        with transaction.atomic(using=using):
            place(using)
        assert client.llen("celery") == 1


def test_without_celery_relays_are_woken(
    using: str, configured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(DISPATCH="relay")
    woken: list[tuple[str, ...]] = []
    monkeypatch.setattr(get_outbox(using), "wake", lambda *names: woken.append(names))
    with transaction.atomic(using=using):
        place(using)

    assert woken == [("memory",)]


def test_nobody_is_told_where_that_is_wanted(using: str, configured: Any, received: list[Event]) -> None:
    configured(DISPATCH="none")
    with workers.sending_to(NOBODY), transaction.atomic(using=using):
        place(using)

    assert not received
    assert OutboxEvent.objects.using(using).due().count() == 1


@pytest.mark.parametrize("propagates", [False, True])
def test_an_eager_task_that_fails_is_logged_and_the_request_does_not_notice(
    using: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, propagates: bool
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError("no drain today")

    monkeypatch.setattr(tasks, "drain_rows", refuse)
    with eager(propagates=propagates), transaction.atomic(using=using):
        place(using)

    assert "which the next sweep will find: ZeroDivisionError: no drain today" in caplog.text
    assert OutboxEvent.objects.using(using).due().count() == 1
