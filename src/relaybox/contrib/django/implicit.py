"""The destinations that a project has without writing them down: its Celery tasks and its Django tasks.

Either may be written down all the same, to give it other options: ``"celery": {"sink": "celery:", …}`` and
``"tasks": {"sink": "handler:", …}`` in ``OUTBOX["DESTINATIONS"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

from django.conf import settings
from django.utils.module_loading import import_string

from relaybox.config import Destination
from relaybox.errors import ConfigError

CELERY = "celery"
"""Where ``delay_via_outbox`` sends to."""

TASKS = "tasks"
"""Where ``task_backend.OutboxBackend`` sends to."""

CONNECTIONS = 4
"""To the broker, of one process that delivers; to publish takes a moment."""


class Implicit(NamedTuple):
    """A destination, the events it takes, and the function that it calls if it is a handler."""

    name: str
    sink: str
    events: str
    function: Callable[..., Any] | None = None
    concurrency: int = 50


def implicit(written: Sequence[Destination], handlers: Sequence[str]) -> Iterator[Implicit]:
    """Those that the project needs; raises ``ConfigError`` where its own have the name of one."""
    sinks = {destination.name: destination.sink for destination in written}
    if (
        find_spec("celery") is not None
        and sinks.get(CELERY, "celery:") == "celery:"
        and CELERY not in handlers
    ):
        yield Implicit(CELERY, "celery:", "celery.task", concurrency=CONNECTIONS)
    if _has_backend():
        if TASKS in handlers or sinks.get(TASKS, "handler:") != "handler:":
            raise ConfigError(
                f"OUTBOX: the destination {TASKS!r} is that of the task backend in TASKS; rename yours"
            )
        from relaybox.contrib.django.task_backend import run

        yield Implicit(TASKS, "handler:", "django.task", run)


def _has_backend() -> bool:
    """Whether the project's Django tasks go through the outbox."""
    given = getattr(settings, "TASKS", None)
    backends = given.values() if isinstance(given, Mapping) else ()
    return any(_is_ours(backend.get("BACKEND")) for backend in backends if isinstance(backend, Mapping))


def _is_ours(path: object) -> bool:
    # What cannot be imported, the framework itself tells of.
    with suppress(ImportError):
        backend = import_string(str(path))
        from relaybox.contrib.django.task_backend import OutboxBackend

        return isinstance(backend, type) and issubclass(backend, OutboxBackend)
    return False
