"""The Celery tasks: deliver what is due, and remove what was kept long enough.

Both are safe in any number of workers at once. While a delivery task is queued and has not begun, a mark in
the database keeps others from being queued. The task removes the mark when it begins, before it looks: that
task sees what committed earlier, and what commits later queues another. The mark of a lost task expires.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

from celery import shared_task
from kombu.pools import producers

from relaybox.contrib.django.conf import get_settings
from relaybox.contrib.django.databases import connection_of, dialect_of, get_statements
from relaybox.contrib.django.drain import Drained, drain, drain_rows, upkeep
from relaybox.contrib.django.store import is_busy
from relaybox.database.statements.upkeep import TASK_MARK

T = TypeVar("T")

log = logging.getLogger("relaybox.django")

LOST = 60.0
"""Seconds after which a queued task that has not begun is taken to be lost, and another is queued."""

REST = 5.0
"""Seconds for which a broker that refused is not asked again, so that it does not slow every request down."""

ANSWER = 2.0
"""Seconds that Redis has to answer, unless ``broker_transport_options`` say otherwise."""

MARK = "celery task"

broker = SimpleNamespace(refused_until=0.0)
"""What this process knows of the broker."""


@shared_task(ignore_result=True)  # type: ignore[untyped-decorator]
def deliver_outbox_events_task(
    using: str | None = None, rows: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    """Deliver what is due for up to ``OUTBOX["DRAIN_SECONDS"]``; for what is left, another task is queued.

    Without arguments, as from beat, every database of ``OUTBOX["DATABASES"]`` is swept. ``rows``, in eager
    mode: only these ids, by destination, for up to ``OUTBOX["EAGER_SECONDS"]``.
    """
    settings = get_settings()
    if using is not None and rows is not None:
        ids = {name: [UUID(row) for row in of_one] for name, of_one in rows.items()}
        return asdict(drain_rows(using, ids, seconds=settings.EAGER_SECONDS, patience=0.0))
    if using is not None:
        return asdict(_deliver(using, sweep=False))
    return asdict(sum(_each(settings.DATABASES, partial(_deliver, sweep=True)), Drained()))


@shared_task(ignore_result=True)  # type: ignore[untyped-decorator]
def cleanup_delivered_outbox_events_task(using: str | None = None) -> int:
    """Remove, in batches, what was delivered more than ``OUTBOX["RETENTION_HOURS"]`` ago; how many rows.

    With it goes the rest that was kept long enough: discarded rows, idempotency keys, records of attempts.
    """
    aliases = get_settings().DATABASES if using is None else (using,)
    rounds = [chores.pruned for chores in _each(aliases, upkeep)]
    return sum(round_.changed for round_ in rounds if round_ is not None)


def _deliver(using: str, sweep: bool) -> Drained:
    _execute(using, "clear")
    if is_busy(connection_of(using)):
        # Another task would find the same, and another after that.
        log.error(
            "nothing is delivered from %s: the task runs inside a transaction that is open already, as of a"
            " task class that opens atomic(), or of DATABASES[%r]['AUTOCOMMIT'] = False",
            using,
            using,
        )
        return Drained(finished=False)
    drained = drain(using, seconds=get_settings().DRAIN_SECONDS, sweep=sweep)
    # An eager task would begin here and now, where this one could not go on.
    if not drained.finished and not deliver_outbox_events_task.app.conf.task_always_eager:
        queue(using)
    return drained


def _each(aliases: Iterable[str], work: Callable[[str], T]) -> list[T]:
    """Do the work in every database; if it fails in one, go on with the others and raise at the end."""
    done, errors = [], []
    for alias in aliases:
        try:
            done.append(work(alias))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return done


def deliver_or_queue(using: str, rows: Mapping[str, Sequence[str]]) -> None:
    """Deliver these rows now if tasks are eager, otherwise queue a task."""
    if deliver_outbox_events_task.app.conf.task_always_eager:
        # An error is the caller's, whatever Celery's settings say of eager tasks.
        deliver_outbox_events_task.apply(kwargs={"using": using, "rows": dict(rows)}, throw=True)
    else:
        queue(using)


def queue(using: str) -> None:
    """Queue a task, unless one is queued already or the broker refused a moment ago."""
    if time.monotonic() < broker.refused_until or not mark_queued(using, LOST):
        return
    try:
        _publish(using)
    except Exception:
        broker.refused_until = time.monotonic() + REST
        _execute(using, "clear")
        raise


def _publish(using: str) -> None:
    """Publish a task. Do not wait for a broker that is away; retry one that lost the connection once."""
    app = deliver_outbox_events_task.app
    with producers[_connection(app, repr(app.conf.broker_write_url))].acquire(block=True) as producer:
        producer.connection.ensure_connection(max_retries=0)
        deliver_outbox_events_task.apply_async(
            kwargs={"using": using},
            queue=get_settings().QUEUE,
            producer=producer,
            retry=True,
            retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0},
            ignore_result=True,
        )


@lru_cache(maxsize=4)
def _connection(app: Any, _url: str) -> Any:
    """Return the key of the pool of an application's broker; costly to make, so once for each URL.

    Redis gets a time limit: it has none by default.
    """
    connection = app.connection_for_write()
    if connection.get_transport_cls().driver_type == "redis":
        for option in ("socket_timeout", "socket_connect_timeout"):
            connection.transport_options.setdefault(option, ANSWER)
    return connection


def mark_queued(using: str, seconds: float) -> bool:
    """Mark that a task is queued. False if another was marked less than ``seconds`` ago."""
    if _execute(using, "mark", seconds=seconds):
        return True
    return _execute(using, "make") and _execute(using, "mark", seconds=seconds)


def _execute(using: str, name: str, **params: Any) -> bool:
    """Execute one statement. True if it changed the row."""
    connection = connection_of(using)
    query = get_statements(dialect_of(connection)).others(TASK_MARK)(name, mark=MARK, **params)
    with connection.cursor() as cursor:
        cursor.execute(query.sql, query.params)
        return bool(cursor.rowcount == 1)
