"""The schedule of Celery's beat."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from django.apps import apps
from django.core.management import CommandError
from django.test import override_settings
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from relaybox.contrib.django import tasks
from relaybox.contrib.django.beat import beat_schedule
from relaybox.errors import ConfigError
from tests.django import workers
from tests.django.project.celery import app
from tests.django.steps import command

SETTINGS = """
from relaybox.contrib.django.beat import beat_schedule

SECRET_KEY = "x"
INSTALLED_APPS = ["relaybox.contrib.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}
OUTBOX = {"SWEEP_INTERVAL": "10s", "QUEUE": "outbox"}
CELERY_BEAT_SCHEDULE = beat_schedule(OUTBOX)
"""
PROGRAM = """
import django
from django.conf import settings
print(settings.CELERY_BEAT_SCHEDULE["relaybox-deliver"]["options"])
django.setup()
from relaybox.contrib.django.beat import beat_schedule
print(beat_schedule() == settings.CELERY_BEAT_SCHEDULE)
"""


def test_the_sweep_and_the_clean_up_are_tasks_that_exist_and_do_not_pile_up() -> None:
    with override_settings(OUTBOX={}):
        schedule = beat_schedule()

    assert {entry["task"]: (entry["schedule"], entry["options"]) for entry in schedule.values()} == {
        tasks.deliver_outbox_events_task.name: (60.0, {"expires": 60.0}),
        tasks.cleanup_delivered_outbox_events_task.name: (3600.0, {"expires": 3600.0}),
    }
    assert {entry["task"] for entry in schedule.values()} <= set(app.tasks)


def test_the_settings_decide_how_often_and_through_which_queue() -> None:
    sweep, clean_up = beat_schedule({"SWEEP_INTERVAL": "90s", "QUEUE": "slow"}).values()
    assert (sweep["schedule"], sweep["options"]) == (90.0, {"expires": 90.0, "queue": "slow"})
    assert clean_up["options"] == {"expires": 3600.0, "queue": "slow"}
    with pytest.raises(ConfigError, match="did you mean 'QUEUE'"):
        beat_schedule({"QUEU": "slow"})


def test_settings_can_use_it_before_django_is_set_up(tmp_path: Path) -> None:
    (tmp_path / "their_settings.py").write_text(SETTINGS)
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "their_settings", "PYTHONPATH": str(tmp_path)}
    done = workers.run(environment, "-c", PROGRAM, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("{'expires': 10.0, 'queue': 'outbox'}\nTrue\n", "")


schedule = partial(command, "schedule")


@pytest.mark.django_db
def test_the_command_registers_brings_up_to_date_and_removes() -> None:
    with override_settings(OUTBOX={"SWEEP_INTERVAL": 30, "QUEUE": "first"}):
        assert schedule() == "relaybox-deliver: every 30 s\nrelaybox-clean-up: every 3600 s\n"
    PeriodicTask.objects.filter(name="relaybox-deliver").update(enabled=False)
    with override_settings(OUTBOX={"SWEEP_INTERVAL": "1500ms"}):
        schedule()
        schedule()
    PeriodicTask.objects.create(name="theirs", task="x", interval=IntervalSchedule.objects.first())

    sweep, clean_up, _ = PeriodicTask.objects.filter(interval__isnull=False).order_by("id")
    assert (sweep.task, sweep.enabled) == (tasks.deliver_outbox_events_task.name, False)
    assert (sweep.interval.every, sweep.interval.period) == (1_500_000, "microseconds")
    assert (sweep.queue, sweep.expire_seconds) == (None, 2)
    assert (clean_up.task, clean_up.enabled) == (tasks.cleanup_delivered_outbox_events_task.name, True)
    assert IntervalSchedule.objects.filter(every=3600, period="seconds").count() == 1
    assert [schedule("--remove"), schedule("--remove")] == ["removed 2\n", "removed 0\n"]
    assert PeriodicTask.objects.filter(name="theirs").exists()


def test_without_django_celery_beat_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps, "is_installed", lambda name: False)
    with pytest.raises(CommandError, match="pip install django-celery-beat") as raised:
        schedule()
    assert raised.value.returncode == 2
