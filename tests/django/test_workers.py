"""The processes of Celery that other tests rely on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from tests.django import workers
from tests.django.conftest import Live
from tests.django.shop.models import Order
from tests.django.shop.tasks import place_order

pytestmark = pytest.mark.processes

on_postgresql = pytest.mark.parametrize("live", ["default"], indirect=True)


@pytest.mark.parametrize("pool", ["solo", "prefork", "threads", "gevent", "eventlet"])
@on_postgresql
def test_a_worker_runs_a_task(live: Live, broker: str, pool: str) -> None:
    with (
        workers.worker(live.url, broker, pool=pool, concurrency=2) as worker,
        workers.sending_to(broker),
    ):
        place_order.delay(7)
        workers.wait_for(lambda: placed(live) == [7], explain=lambda: worker.log)


def test_a_worker_and_the_test_see_the_same_database(live: Live, broker: str) -> None:
    with (
        workers.worker(live.url, broker, pool="solo") as worker,
        workers.sending_to(broker),
    ):
        place_order.delay(7)
        workers.wait_for(lambda: placed(live) == [7], explain=lambda: worker.log)
        worker.stop()
        assert worker.process.returncode == 0


@on_postgresql
def test_a_database_is_a_broker_and_the_beat_keeps_its_schedule_in_one(live: Live) -> None:
    every_second, _ = IntervalSchedule.objects.get_or_create(every=1, period=IntervalSchedule.SECONDS)
    PeriodicTask.objects.create(name="orders", task=place_order.name, interval=every_second, args="[7]")
    broker = workers.through_database(live.url)
    with (
        workers.worker(live.url, broker, pool="solo") as worker,
        workers.beat(live.url, broker, scheduler=workers.DATABASE) as beat,
    ):
        workers.wait_for(lambda: 7 in placed(live), explain=lambda: beat.log + worker.log)


@on_postgresql
def test_a_beat_keeps_its_schedule_in_a_file(live: Live, broker: str) -> None:
    with workers.beat(live.url, broker) as beat:
        beat.until_logged("beat: Starting...")
        beat.stop()
        assert beat.process.returncode == 0


@on_postgresql
def test_a_killed_worker_leaves_no_child(live: Live, broker: str) -> None:
    with workers.worker(live.url, broker, concurrency=2) as worker:
        assert len(members(worker.process.pid)) == 3
        worker.kill()
        workers.wait_for(lambda: not members(worker.process.pid), 10)


@on_postgresql
def test_no_child_outlives_its_worker(live: Live, broker: str) -> None:
    with workers.worker(live.url, broker, concurrency=2) as worker:
        worker.process.kill()
        workers.wait_for(lambda: not members(worker.process.pid), 10)


def placed(live: Live) -> list[int]:
    return list(Order.objects.using(live.using).values_list("total", flat=True))


def members(group: int) -> list[int]:
    """The processes of a group that are not dead."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, its_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(process.name))
    return found
