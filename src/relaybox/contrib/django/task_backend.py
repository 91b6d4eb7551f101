"""A backend for Django's tasks: a task is enqueued if and only if the transaction commits.

``TASKS = {"default": {"BACKEND": "relaybox.contrib.django.task_backend.OutboxBackend"}}``, for the tasks of
Django 6.0 or ``django-tasks``. The project's relay or worker runs each at least once; errors are retried.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from uuid import UUID

from django.db import transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from relaybox.contrib.django.conf import TASKS
from relaybox.contrib.django.databases import connection_of
from relaybox.contrib.django.emit import default_alias, emit_event
from relaybox.core.event import Event
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.sinks.sink import describe

try:
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ImportError:
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started

log = logging.getLogger("relaybox.handler")


class OutboxTaskResult(TaskResult):  # type: ignore[misc]
    """A task's result, without its return value."""

    @property
    def return_value(self) -> Any:
        """Raise for a successful task: the return value is not kept."""
        if self.status == TaskResultStatus.SUCCESSFUL:
            raise NotImplementedError("the outbox does not keep a task's return value; save it in the task")
        return super().return_value


class OutboxBackend(BaseTaskBackend):  # type: ignore[misc]
    """A backend that enqueues tasks as events in the database ``OPTIONS["using"]``."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Write the event; outside ``atomic()``, commit it immediately."""
        self.validate_task(task)
        # Built first, because it rejects arguments that are not JSON.
        result = _result(task, "", args, kwargs, status=TaskResultStatus.READY, enqueued_at=timezone.now())
        call = {"task": task.module_path, "args": result.args, "kwargs": result.kwargs}
        call |= {"queue": task.queue_name, "backend": task.backend}
        run_after = task.run_after
        if run_after is not None and timezone.is_naive(run_after):
            run_after = timezone.make_aware(run_after)
        using = self._using()
        with nullcontext() if connection_of(using).in_atomic_block else transaction.atomic(using=using):
            event = ("task", task.module_path, "django.task", call)
            emitted = emit_event(*event, deliver_at=run_after, destinations=[TASKS], using=using)
        result = replace(result, id=str(emitted.event_id))
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """Return a task's current result. Raise if it does not exist or was removed."""
        from relaybox.contrib.django.models import DatabaseNow, OutboxAttempt, OutboxEvent

        using = self._using()
        events = OutboxEvent.objects.using(using).filter(destination=TASKS)
        try:
            event = events.annotate(now=DatabaseNow()).get(pk=UUID(result_id))
        except (OutboxEvent.DoesNotExist, ValueError, AttributeError):
            raise TaskResultDoesNotExist(result_id) from None
        failures = OutboxAttempt.objects.using(using).filter(delivery_id=event.id).order_by("attempt")
        return _stored(event, list(failures))

    def _using(self) -> str:
        using: str = self.options.get("using") or default_alias()
        return using


def run(event: Event) -> None:
    """Run an event's task and drop its return value."""
    call, now = event.payload, timezone.now()
    task = _task(call)
    result = _result(
        task,
        str(event.id),
        call["args"],
        call["kwargs"],
        status=TaskResultStatus.RUNNING,
        enqueued_at=event.created_at,
        started_at=now,
        last_attempted_at=now,
        worker_ids=[f"{socket.gethostname()}:{os.getpid()}"] * event.attempt,
    )
    task_started.send(type(task.get_backend()), task_result=result)
    context = (TaskContext(task_result=result),) if task.takes_context else ()
    try:
        task.call(*context, *result.args, **result.kwargs)
    except (Retry, Reject, Unavailable):
        raise
    except Exception as error:
        log.warning("the task %s failed with %s", task.module_path, describe(error), exc_info=error)
        kind = type(error)
        # A result's errors name their classes by full path.
        raise Retry(f"{kind.__module__}.{describe(error)}") from error
    ended = replace(result, status=TaskResultStatus.SUCCESSFUL, finished_at=timezone.now())
    # The task is done; an error in a receiver must not run it again.
    task_finished.send_robust(type(task.get_backend()), task_result=ended)


def _task(call: Mapping[str, Any]) -> Task:
    """Return the task that an event names. Reject any other object, so that it is never called."""
    task = import_string(call["task"])
    if not isinstance(task, Task):
        raise Reject(f"{call['task']} is not a task; decorate it with @task")
    return task.using(queue_name=call["queue"], backend=call["backend"])


def _stored(event: Any, failures: Sequence[Any]) -> TaskResult:
    match event.status:
        case "delivered":
            status, finished_at = TaskResultStatus.SUCCESSFUL, event.delivered_at
        case "failed" | "discarded":
            status, finished_at = TaskResultStatus.FAILED, event.updated_at
        case _:
            running = event.leased_until is not None and event.leased_until > event.now
            status, finished_at = (TaskResultStatus.RUNNING if running else TaskResultStatus.READY), None
    workers = {failure.attempt: failure.relay for failure in failures}
    return _result(
        _task(event.payload),
        str(event.id),
        event.payload["args"],
        event.payload["kwargs"],
        status=status,
        enqueued_at=event.created_at,
        last_attempted_at=event.last_attempt_at,
        finished_at=finished_at,
        errors=[_error(failure.error_message) for failure in failures],
        worker_ids=[
            workers.get(attempt, event.lease_owner or "") for attempt in range(1, event.attempts + 1)
        ],
    )


def _error(message: str) -> TaskError:
    """Return the error with its class, if the message names one. The log has the traceback."""
    path, _, _ = message.partition(": ")
    known = all(part.isidentifier() for part in path.split(".")) and "." in path
    return TaskError(exception_class_path=path if known else f"{Retry.__module__}.Retry", traceback=message)


def _result(task: Task, id_: str, args: Sequence[Any], kwargs: Mapping[str, Any], **about: Any) -> TaskResult:
    unknown: dict[str, Any] = {"started_at": None, "last_attempted_at": None, "finished_at": None}
    given = {**unknown, "errors": [], "worker_ids": [], **about}
    return OutboxTaskResult(
        task=task, id=id_, args=list(args), kwargs=dict(kwargs), backend=task.backend, **given
    )
