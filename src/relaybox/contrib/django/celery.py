"""Celery tasks (``@shared_task(base=OutboxTask)``) that are queued if and only if a transaction commits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import EllipsisType
from typing import Any

from celery import Task
from celery.result import AsyncResult
from celery.utils.time import maybe_make_aware
from kombu.utils.json import dumps

from relaybox.contrib.django.conf import CELERY, get_configuration
from relaybox.contrib.django.emit import emit_event
from relaybox.errors import ConfigError, InvalidField, PayloadError, did_you_mean

OPTIONS = (
    *("queue", "exchange", "routing_key", "priority", "expires", "serializer", "compression"),
    *("headers", "shadow", "time_limit", "soft_time_limit", "ignore_result"),
)
"""The options of ``apply_async`` that work through the outbox."""


class OutboxTask(Task):  # type: ignore[misc]
    """A task that can be called through the outbox; ``Celery(…, task_cls=OutboxTask)`` makes all tasks so."""

    abstract = True

    def delay_via_outbox(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Queue the task with ``delay`` once the open ``atomic()`` commits."""
        return self.apply_async_via_outbox(args, kwargs)

    def apply_async_via_outbox(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        countdown: float | None = None,
        eta: datetime | None = None,
        idempotency_key: str | None = None,
        key: str | EllipsisType | None = ...,
        using: str | None = None,
        **options: Any,
    ) -> AsyncResult:
        """Queue the task with ``apply_async`` once the open ``atomic()`` commits.

        It is queued at least once, always with the same id, and not before ``countdown`` or ``eta``. If the
        same task repeats an ``idempotency_key``, nothing is queued and the first call's result is returned.
        ``key``, ``using`` and the errors are those of ``emit_event``; ``options`` are limited to ``OPTIONS``.
        """
        arguments = dict(kwargs or {})
        if self.typing:
            self.__header__(*args, **arguments)
        _check_destination()
        call = {
            "task": self.name,
            "args": [_plain(arg, f"$.args[{index}]") for index, arg in enumerate(args)],
            "kwargs": {name: _plain(arg, f"$.kwargs.{name}") for name, arg in arguments.items()},
            "options": {name: _plain(value, f"$.{name}") for name, value in self._options(options)},
        }
        event = ("celery", self.name, "celery.task", call)
        emitted = emit_event(
            *event,
            idempotency_key=None if idempotency_key is None else f"{self.name}:{idempotency_key}",
            key=key,
            deliver_at=self._moment("eta", eta, "countdown", countdown),
            destinations=[CELERY],
            using=using,
        )
        return self.AsyncResult(str(emitted.event_id))

    def _options(self, given: dict[str, Any]) -> list[tuple[str, Any]]:
        for name, value in given.items():
            if name not in OPTIONS:
                fix = f"a task in the outbox has no such option{did_you_mean(name, OPTIONS)}"
                raise InvalidField(name, value, fix)
        if isinstance(seconds := given.get("expires"), int | float):
            # Count from the call, not from the moment the task is queued.
            given["expires"] = self._moment("", None, "expires", seconds)
        return list(given.items())

    def _moment(self, at: str, moment: datetime | None, after: str, seconds: float | None) -> datetime | None:
        if seconds is None:
            aware: datetime | None = moment and maybe_make_aware(moment, self.app.timezone)
            return aware
        if moment is not None:
            raise InvalidField(after, seconds, f"give {after} or {at}, not both")
        try:
            return datetime.now(UTC) + timedelta(seconds=seconds)
        except (TypeError, OverflowError, ValueError):
            raise InvalidField(after, seconds, "give a number of seconds") from None


def _check_destination() -> None:
    sink = next((one.sink for one in get_configuration().settings.destinations if one.name == CELERY), None)
    if sink != "celery:":
        raise ConfigError(
            f"OUTBOX: DESTINATIONS[{CELERY!r}]: sink = {sink!r}: tasks of the outbox go there, "
            "so write 'celery:', or give your destination another name"
        )


def _plain(value: Any, path: str) -> Any:
    """Return the value as Celery writes it in JSON, from which it restores times, decimals and UUIDs."""
    try:
        return json.loads(dumps(value))  # type: ignore[no-untyped-call]
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadError(path, f"Celery cannot write it as JSON: {error}") from None
