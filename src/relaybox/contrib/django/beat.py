"""Schedule the sweep and the clean-up in Celery beat's settings, or in django-celery-beat's tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from django.apps import apps
from django.db import Error

from relaybox.contrib.django.conf import get_settings, parse
from relaybox.errors import ConfigError

DELIVER = "relaybox.contrib.django.tasks.deliver_outbox_events_task"
CLEAN_UP = "relaybox.contrib.django.tasks.cleanup_delivered_outbox_events_task"

CLEAN_UP_INTERVAL = 3600.0
"""Seconds between two clean-ups."""


def beat_schedule(outbox: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return the entries for beat: ``CELERY_BEAT_SCHEDULE = {**beat_schedule(OUTBOX), ...}``.

    A task expires when the next one is due, so that tasks do not pile up while the workers are down.
    """
    settings = get_settings() if outbox is None else parse(outbox)
    queue = {} if settings.QUEUE is None else {"queue": settings.QUEUE}
    every = {
        "relaybox-deliver": (DELIVER, settings.SWEEP_INTERVAL),
        "relaybox-clean-up": (CLEAN_UP, CLEAN_UP_INTERVAL),
    }
    return {
        name: {"task": task, "schedule": seconds, "options": {"expires": seconds, **queue}}
        for name, (task, seconds) in every.items()
    }


def register() -> dict[str, float]:
    """Create or update django-celery-beat's entries (disabled ones stay so); return their seconds by name."""
    schedule = beat_schedule()
    with _models() as models:
        for name, entry in schedule.items():
            models.PeriodicTask.objects.update_or_create(name=name, defaults=_columns(entry, models))
    return {name: entry["schedule"] for name, entry in schedule.items()}


def unregister() -> int:
    """Remove django-celery-beat's entries, and return their number."""
    with _models() as models:
        _, removed = models.PeriodicTask.objects.filter(name__in=list(beat_schedule())).delete()
    return int(removed.get("django_celery_beat.PeriodicTask", 0))


def _columns(entry: Mapping[str, Any], models: Any) -> dict[str, Any]:
    seconds, options = entry["schedule"], entry["options"]
    whole = seconds == int(seconds)
    period = models.IntervalSchedule.SECONDS if whole else models.IntervalSchedule.MICROSECONDS
    interval = {"every": int(seconds if whole else seconds * 1_000_000), "period": period}
    found = models.IntervalSchedule.objects.filter(**interval).first()
    return {
        "task": entry["task"],
        "interval": found or models.IntervalSchedule.objects.create(**interval),
        "queue": options.get("queue"),
        "expire_seconds": math.ceil(options["expires"]),
        "description": "Made by `manage.py outbox schedule`.",
        **dict.fromkeys(("crontab", "solar", "clocked", "expires")),
    }


@contextmanager
def _models() -> Iterator[Any]:
    """Yield django-celery-beat's models. Raise ``ConfigError`` if the app or its tables are missing."""
    if not apps.is_installed("django_celery_beat"):
        raise ConfigError(
            "django-celery-beat is not in INSTALLED_APPS: pip install django-celery-beat, add"
            " 'django_celery_beat' there and run `manage.py migrate`; without it, set CELERY_BEAT_SCHEDULE ="
            " relaybox.contrib.django.beat.beat_schedule(OUTBOX)"
        )
    from django_celery_beat import models

    try:
        yield models
    except Error as error:
        said, fix = " ".join(str(error).split()), "run `manage.py migrate django_celery_beat`"
        raise ConfigError(f"the tables of django-celery-beat: {said}; {fix}") from error
