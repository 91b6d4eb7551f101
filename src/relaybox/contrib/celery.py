"""Celery tasks whose effect happens once, however often their message is delivered.

    @inbox_task(inbox=inbox, transaction=Session)
    def index(session, event): ...

What the task changes and the inbox's mark are one transaction. The mark is that of the event, where the first
argument is one (see ``sinks/celery``: ``sink = "celery:shop.tasks.index"``), else that of the task's own id,
which is the same whenever the same message is delivered again.
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
    """Make a function a task that is done once. It gets what ``transaction`` opened, then its own arguments.

    ``transaction`` is that of ``relaybox.receive.consumer.Consumer``, ``consumer`` is ``module.function``
    unless it is given, ``options`` are Celery's. ``acks_late`` and ``reject_on_worker_lost`` are on, so that
    a message is there until its transaction has committed. ``Retry`` and ``Unavailable`` become Celery's own
    retry, as often as ``max_retries`` says; whatever else is raised fails the task as usual.
    """
    begin = opener(transaction)

    def decorate(function: Callable[..., Any]) -> Task:
        if is_asynchronous(function):
            raise ConfigError(f"inbox_task: {shorten(function)} is an async function, which no worker runs")
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
                log.debug("%s: message %s was done before", name, message_id)
            return result

        make = shared_task if app is None else app.task
        return make(**{"acks_late": True, "reject_on_worker_lost": True, **options, "bind": True})(run)

    return decorate


def _message_id(task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    event = args[0] if args else kwargs.get("event")
    # All of an envelope's fields, because many things have an id that comes again with other contents.
    if isinstance(event, Mapping) and (event.keys() >= _EVENT or event.keys() >= _CLOUDEVENT):
        return event["id"]
    return task.request.id


def _context(task: Task) -> Mapping[str, Any]:
    """The trace context in the headers of a task's message, which workers and eager calls keep apart."""
    request = task.request
    headers = request.headers or {}
    return {name: found for name in NAMES if (found := getattr(request, name, None) or headers.get(name))}
