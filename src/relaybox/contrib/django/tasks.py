"""The Celery tasks: deliver what is due, and remove what was kept long enough.

Any number of workers can run them at once. A mark in the database keeps a second delivery task from being
queued; the task clears it before it looks for work (see ``docs/explanation/django.md``).
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
from relaybox.contrib.django.databases import connection_of, get_statements
from relaybox.contrib.django.drain import Drained, drain, drain_rows, upkeep
from relaybox.contrib.django.outbox import is_busy
from relaybox.database.statements.upkeep import TASK_MARK

T = TypeVar("T")

log = logging.getLogger("relaybox.django")

LOST = 60.0
"""Seconds after which a queued task that has not begun counts as lost, and another may be queued."""

REST = 5.0
"""Seconds to leave a broker alone after it refused, so that it does not slow down every request."""

ANSWER = 2.0
"""Seconds that Redis has to answer, unless ``broker_transport_options`` set a limit."""

MARK = "celery task"

broker = SimpleNamespace(refused_until=0.0)


@shared_task(ignore_result=True)  # type: ignore[untyped-decorator]
def deliver_outbox_events_task(
    using: str | None = None, rows: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    """Deliver what is due for up to ``OUTBOX["DRAIN_SECONDS"]``, then queue another task for the rest.

    Without arguments, as from beat, sweep every database of ``OUTBOX["DATABASES"]``. With ``rows`` (ids by
    destination, in eager mode), deliver only these for up to ``OUTBOX["EAGER_SECONDS"]``.
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
    """Remove rows delivered ``OUTBOX["RETENTION_HOURS"]`` ago and other expired rows; return their number."""
    aliases = get_settings().DATABASES if using is None else (using,)
    rounds = [chores.pruned for chores in _each(aliases, upkeep)]
    return sum(round_.changed for round_ in rounds if round_ is not None)


def _deliver(using: str, sweep: bool) -> Drained:
    _execute(using, "clear")
    if is_busy(connection_of(using)):
        # Do not queue another task: it would end here too.
        log.error(
            "nothing is delivered from %s: the task runs inside a transaction that is open already, as of a"
            " task class that opens atomic(), or of DATABASES[%r]['AUTOCOMMIT'] = False",
            using,
            using,
        )
        return Drained(finished=False)
    drained = drain(using, seconds=get_settings().DRAIN_SECONDS, sweep=sweep)
    # An eager task would start at once, and stop where this one did.
    if not drained.finished and not deliver_outbox_events_task.app.conf.task_always_eager:
        queue(using)
    return drained


def _each(aliases: Iterable[str], work: Callable[[str], T]) -> list[T]:
    """Do the work in every database; if one fails, continue and raise its error at the end."""
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
        # Raise errors in the caller, whatever Celery's settings for eager tasks are.
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
    """Publish a task. Fail at once if the broker is down; retry once if the connection broke."""
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
    """Return the broker pool's key, cached as it is slow to make; give Redis a time limit, which it lacks."""
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
    query = get_statements(connection).others(TASK_MARK)(name, mark=MARK, **params)
    with connection.cursor() as cursor:
        cursor.execute(query.sql, query.params)
        return bool(cursor.rowcount == 1)
