"""The schedule of Celery's beat: as a dict for its settings, or as rows of django-celery-beat.

CELERY_BEAT_SCHEDULE = {**beat_schedule(OUTBOX), ...}     # in settings.py
app.conf.beat_schedule |= beat_schedule()                 # or in celery.py
"""

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
    """The entries for ``beat_schedule``: the sweep every ``SWEEP_INTERVAL``, the clean-up every hour.

    ``outbox`` is the dict ``OUTBOX``, which settings.py itself has to hand over. A task that no worker took
    before the next one was due expires, so that none pile up while the workers are down.
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
    """Write the schedule into django-celery-beat's tables; the names of the entries, and their seconds.

    What is there under these names is brought up to date, but stays switched off where somebody did that.
    """
    schedule = beat_schedule()
    with _models() as models:
        for name, entry in schedule.items():
            models.PeriodicTask.objects.update_or_create(name=name, defaults=_columns(entry, models))
    return {name: entry["schedule"] for name, entry in schedule.items()}


def unregister() -> int:
    """Take the schedule out of django-celery-beat's tables; how many entries that was."""
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
            "django-celery-beat is not among INSTALLED_APPS: pip install django-celery-beat, add"
            " 'django_celery_beat' there and run `manage.py migrate`; without it, set CELERY_BEAT_SCHEDULE ="
            " relaybox.contrib.django.beat.beat_schedule(OUTBOX)"
        )
    from django_celery_beat import models

    try:
        yield models
    except Error as error:
        said, fix = " ".join(str(error).split()), "run `manage.py migrate django_celery_beat`"
        raise ConfigError(f"the tables of django-celery-beat: {said}; {fix}") from error
