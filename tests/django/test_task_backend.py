"""Django's tasks through the outbox."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connections, transaction
from django.test import override_settings

from relaybox.contrib.django import emit_event
from relaybox.contrib.django.conf import get_configuration
from relaybox.contrib.django.drain import Drained, drain
from relaybox.contrib.django.task_backend import OutboxBackend
from relaybox.errors import ConfigError
from tests.django.shop.jobs import apack, pack, refuse, stubborn
from tests.django.steps import events, orders, place, totals

try:
    from django.tasks import TaskResultStatus, task_backends
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ImportError:
    from django_tasks import TaskResultStatus, task_backends
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started

BACKEND = "relaybox.contrib.django.task_backend.OutboxBackend"
QUIET = {**settings.OUTBOX, "DISPATCH": "none"}

pytestmark = pytest.mark.django_db(transaction=True)


def backend(**about: Any) -> dict[str, Any]:
    return {"default": {"BACKEND": BACKEND, **about}}


@pytest.fixture(autouse=True)
def _through_the_outbox(using: str) -> Iterator[None]:
    with override_settings(TASKS=backend(OPTIONS={"using": using}), OUTBOX=QUIET):
        yield


def test_a_task_runs_once_its_transaction_has_committed(using: str) -> None:
    with transaction.atomic(using=using):
        result = pack.enqueue(7, using=using)
    assert (result.status, result.args, result.kwargs) == (TaskResultStatus.READY, [7], {"using": using})
    assert not totals(using)

    assert drain(using) == Drained(delivered=1)
    assert totals(using) == [7]
    result.refresh()
    assert result.status == TaskResultStatus.SUCCESSFUL
    assert (result.is_finished, result.attempts, result.errors) == (True, 1, [])
    assert result.enqueued_at <= result.finished_at
    with pytest.raises(NotImplementedError, match="does not keep"):
        result.return_value  # noqa: B018


def test_a_rollback_leaves_no_task(using: str) -> None:
    with transaction.atomic(using=using):
        result = pack.enqueue(7, using=using)
        transaction.set_rollback(True, using=using)

    assert drain(using) == Drained()
    with pytest.raises(TaskResultDoesNotExist):
        pack.get_result(result.id)


def test_outside_atomic_it_commits_by_itself_and_may_be_asynchronous(using: str) -> None:
    pack.enqueue(7, using=using)
    apack.enqueue(8, using=using)

    assert drain(using) == Drained(delivered=2)
    assert sorted(totals(using)) == [7, 8]


async def test_asynchronous_code_enqueues(using: str) -> None:
    result = await pack.aenqueue(7, using=using)

    assert (await events(using).aget()).event_type == "django.task"
    assert (await pack.aget_result(result.id)).status == TaskResultStatus.READY
    # Of the thread that asynchronous code shares.
    await sync_to_async(connections.close_all)()


def test_a_task_that_raises_is_tried_again(using: str) -> None:
    result = stubborn.enqueue(using)
    assert drain(using) == Drained(retried=1)
    result.refresh()
    assert (result.status, result.attempts, result.is_finished) == (TaskResultStatus.READY, 1, False)
    [error] = result.errors
    assert error.exception_class is ZeroDivisionError
    assert "not yet" in error.traceback

    events(using).update(next_attempt_at=datetime(2020, 1, 1, tzinfo=UTC))
    assert drain(using) == Drained(delivered=1)
    result.refresh()
    assert (result.status, result.attempts, totals(using)) == (TaskResultStatus.SUCCESSFUL, 2, [2])


def test_a_task_that_is_given_up_has_failed(using: str) -> None:
    result = refuse.enqueue("never")

    assert drain(using) == Drained(failed=1)
    result.refresh()
    assert (result.status, result.is_finished) == (TaskResultStatus.FAILED, True)
    assert [error.traceback for error in result.errors] == ["never"]
    with pytest.raises(ValueError, match="failed"):
        result.return_value  # noqa: B018


def test_one_that_is_leased_is_running(using: str) -> None:
    result = pack.enqueue(7)
    until = datetime(2100, 1, 1, tzinfo=UTC)
    events(using).update(attempts=1, lease_token=uuid4(), lease_owner="relay-1", leased_until=until)

    result.refresh()
    assert (result.status, result.worker_ids) == (TaskResultStatus.RUNNING, ["relay-1"])


def test_run_after_is_when_it_is_due(using: str) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    pack.using(run_after=later).enqueue(7)

    assert drain(using) == Drained()
    assert abs(events(using).get().next_attempt_at - later) < timedelta(seconds=1)
    with override_settings(USE_TZ=False):
        naive = pack.using(run_after=later.replace(tzinfo=None)).enqueue(7)
    assert abs(events(using).get(id=naive.id).next_attempt_at - later) < timedelta(hours=24)


def test_what_the_backend_cannot_do_is_refused_and_nothing_is_written(using: str) -> None:
    with pytest.raises(InvalidTask, match="priority"):
        pack.using(priority=1)
    with pytest.raises(InvalidTask, match="Queue"):
        pack.using(queue_name="slow")
    with transaction.atomic(using=using):
        with pytest.raises(TypeError, match="Unsupported"):
            pack.enqueue(object())
        orders(using).create(total=1)

    assert not events(using).exists()
    assert totals(using) == [1]


def test_queues_are_names_that_a_result_keeps(using: str) -> None:
    with override_settings(TASKS=backend(OPTIONS={"using": using}, QUEUES=["default", "slow"])):
        result = pack.using(queue_name="slow").enqueue(7, using=using)
        assert pack.get_result(result.id).task.queue_name == "slow"


def test_only_a_task_is_ever_called(using: str) -> None:
    call = {"args": [], "kwargs": {}, "queue": "default", "backend": "default"}
    for path in ("tests.django.shop.jobs.no_task", "os.getcwd"):
        with transaction.atomic(using=using):
            emit_event("task", path, "django.task", {**call, "task": path}, using=using)

    assert drain(using) == Drained(failed=2)
    assert all("is not a task" in event.error_message for event in events(using))


def test_the_frameworks_signals_are_sent(using: str) -> None:
    seen: list[tuple[str, str, Any]] = []
    receivers = []
    for name, signal in (("enqueued", task_enqueued), ("started", task_started), ("finished", task_finished)):

        def receive(sender: Any, task_result: Any, name: str = name, **_: Any) -> None:
            assert sender is OutboxBackend
            seen.append((name, task_result.id, task_result.status))

        signal.connect(receive)
        receivers.append((signal, receive))
    result = pack.enqueue(7, using=using)
    drain(using)
    for signal, receive in receivers:
        signal.disconnect(receive)

    assert seen == [
        ("enqueued", result.id, TaskResultStatus.READY),
        ("started", result.id, TaskResultStatus.RUNNING),
        ("finished", result.id, TaskResultStatus.SUCCESSFUL),
    ]


def test_a_task_that_has_run_does_not_run_again_for_a_receiver_that_raises(using: str) -> None:
    def receive(**_: Any) -> None:
        raise ZeroDivisionError("the receiver's own")

    task_finished.connect(receive)
    pack.enqueue(7, using=using)
    drained = drain(using)
    task_finished.disconnect(receive)

    assert (drained, totals(using)) == (Drained(delivered=1), [7])


def test_a_task_that_does_not_exist_is_reported(using: str) -> None:
    for unknown in ("", "of no event", str(UUID(int=7)), str(place(using).event_id)):
        with pytest.raises(TaskResultDoesNotExist):
            task_backends["default"].get_result(unknown)


def test_the_destination_is_there_only_for_this_backend_and_its_options_are_settings() -> None:
    def destinations() -> dict[str, Any]:
        return {one.name: one for one in get_configuration().settings.destinations}

    assert destinations()["tasks"].max_attempts == 5
    written = {"tasks": {"sink": "handler:", "max_attempts": 1}}
    with override_settings(OUTBOX={"DESTINATIONS": written}):
        assert destinations()["tasks"].max_attempts == 1
    for given in (
        {},
        {"default": {"BACKEND": "django_tasks.backends.dummy.DummyBackend"}},
        {"default": {}},
        {"a": 1},
    ):
        with override_settings(TASKS=given):
            assert "tasks" not in destinations()
    with (
        override_settings(OUTBOX={"DESTINATIONS": {"tasks": {"sink": "console:"}}}),
        pytest.raises(ConfigError, match="rename yours"),
    ):
        destinations()
