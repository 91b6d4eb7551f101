"""Celery tasks that take effect once, even if their message is delivered more than once.

    @inbox_task(inbox=inbox, transaction=Session)
    def index(session, event): ...

The task's changes and the inbox's mark commit together. The mark has the event's id if the first argument is
an event (``sink = "celery:shop.tasks.index"``), otherwise the task's id, which a redelivery keeps.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relaybox.core.outcome import Retry, Unavailable
from relaybox.core.values import parse_name
from relaybox.errors import ConfigError, MissingExtra, shorten
from relaybox.receive.consumer import SWALLOWED, Once, finished, is_asynchronous, opened, opener, seconds_of
from relaybox.wire.tracing import NAMES, attached, received

try:
    from celery import Task, shared_task
except ImportError:
    raise MissingExtra("celery", "celery") from None

log = logging.getLogger("relaybox.consumer")

_EVENT = {"id", "type", "timestamp", "aggregate_id"}
_CLOUDEVENT = {"id", "type", "source", "specversion"}


def inbox_task(
    *, inbox: Once, transaction: Any, consumer: str | None = None, app: Any = None, **options: Any
) -> Callable[[Callable[..., Any]], Task]:
    """Make a function a task that runs once for each message.

    The function gets the connection that ``transaction`` opened (as in ``Consumer``), then the task's
    arguments. ``consumer`` defaults to ``module.function``; ``options`` go to Celery. ``acks_late`` and
    ``reject_on_worker_lost`` are on: the broker keeps the message until the commit. ``Retry`` and
    ``Unavailable`` become Celery retries, up to ``max_retries``. Other errors fail the task.
    """
    begin = opener(transaction)

    def decorate(function: Callable[..., Any]) -> Task:
        if is_asynchronous(function):
            raise ConfigError(f"inbox_task: {shorten(function)} is async; make it a plain function")
        name = parse_name(consumer or f"{function.__module__}.{function.__qualname__}", "consumer")

        @functools.wraps(function)
        def run(task: Task, *args: Any, **kwargs: Any) -> Any:
            message_id = _message_id(task, args, kwargs)
            result, ended = None, False
            try:
                with opened(begin) as connection, inbox.once(connection, message_id, consumer=name) as first:
                    if first:
                        with attached(received(_context(task))):
                            result = finished(function(connection, *args, **kwargs))
                    ended = True
            except (Retry, Unavailable) as error:
                raise task.retry(exc=error, countdown=seconds_of(error.after)) from error
            if not ended:
                raise RuntimeError(SWALLOWED)
            if not first:
                log.debug("%s: message %s was processed before", name, message_id)
            return result

        make = shared_task if app is None else app.task
        return make(**{"acks_late": True, "reject_on_worker_lost": True, **options, "bind": True})(run)

    return decorate


def _message_id(task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    event = args[0] if args else kwargs.get("event")
    # Require all fields of an envelope: other arguments may reuse an ``id`` with different contents.
    if isinstance(event, Mapping) and (event.keys() >= _EVENT or event.keys() >= _CLOUDEVENT):
        return event["id"]
    return task.request.id


def _context(task: Task) -> Mapping[str, Any]:
    """Return the message's trace context; workers and eager calls keep its headers in different places."""
    request = task.request
    headers = request.headers or {}
    return {name: found for name in NAMES if (found := getattr(request, name, None) or headers.get(name))}
