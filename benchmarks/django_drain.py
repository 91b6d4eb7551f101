"""Measure the Celery drain against django-outbox-pattern's ``publish``, both into nothing.

The task is called in this process as a worker calls it, and once more in a real worker, measured from the
moment it is queued. The publisher is its management command in this process, with its fastest chunk size and
a connection that does nothing.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from django_outbox_pattern import settings as publisher_settings

from benchmarks.django_project.celery import app
from benchmarks.harness import Sample, fill, report, run, take_turns
from benchmarks.peers.base import check
from benchmarks.peers.django_outbox_pattern import publish
from benchmarks.process import begin
from relaybox.contrib.django.models import OutboxEvent
from relaybox.contrib.django.tasks import deliver_outbox_events_task

REQUIRED = 5.0
ROUNDS = 3
CHUNKS = (200, 1_000, 5_000)
START_SECONDS = 60.0
PATIENCE = 600.0


def best_chunk(url: str, rows: int) -> int:
    """Return the publisher's fastest chunk size, measured on a part of the work."""
    rates = {}
    for chunk in CHUNKS:
        publisher_settings.DEFAULT_PUBLISHED_CHUNK_SIZE = chunk
        rates[chunk] = publish(url, rows)
    return max(rates, key=lambda chunk: rates[chunk])


def in_this_process(url: str, rows: int) -> float:
    """Return events per second through the task, called directly."""
    return _drain(url, rows, lambda: deliver_outbox_events_task(using="default"))


def in_worker(url: str, rows: int) -> float:
    """Return events per second through the task, queued."""

    def queue_and_wait() -> None:
        deliver_outbox_events_task.delay(using="default")
        _wait_for(lambda: not OutboxEvent.objects.pending().exists(), PATIENCE, "the worker delivers")

    return _drain(url, rows, queue_and_wait)


def _drain(url: str, rows: int, deliver: Callable[[], object]) -> float:
    run(url, "TRUNCATE outbox_event")
    fill(url, rows)
    began = begin()
    deliver()
    spent = time.monotonic() - began
    done = OutboxEvent.objects.delivered().count()
    check(done, done, rows)
    return rows / spent


@contextmanager
def worker() -> Iterator[None]:
    """Start a Celery worker that is ready; it finds no earlier message."""
    app.control.purge()
    program = ["setpriv", "--pdeathsig=KILL", sys.executable, "-m", "celery"]
    program += ["--app", "benchmarks.django_project.celery", "worker"]
    options = ["--pool", "solo", "--without-mingle", "--without-gossip", "--loglevel", "INFO"]
    with TemporaryDirectory(prefix="relaybox-") as directory:
        output = Path(directory) / "log"
        with output.open("wb") as log:
            environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
            process = subprocess.Popen([*program, *options], env=environment, stdout=log, stderr=log)
        try:
            _wait_for(lambda: " ready." in output.read_text(errors="replace"), START_SECONDS, "Celery starts")
            yield
        finally:
            process.terminate()
            process.wait()


def _wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.01)


def measure(url: str, rows: int) -> list[list[str]]:
    """Return the table and the requirements."""
    chunk = best_chunk(url, rows // 10)
    publisher_settings.DEFAULT_PUBLISHED_CHUNK_SIZE = chunk
    variants = {"publisher": publish, "task": in_this_process, "worker": in_worker}
    with worker():
        found = take_turns(
            {name: functools.partial(variant, url, rows) for name, variant in variants.items()}, ROUNDS
        )
    run(url, "TRUNCATE published, outbox_event")
    _show(found, rows, chunk)
    gain = found["task"].over(found["publisher"])
    met = "yes" if gain.median >= REQUIRED else "no"
    return [["Celery drain / publisher", f"≥ {REQUIRED:.0f}", gain.show(2), met]]


def _show(found: dict[str, Sample], rows: int, chunk: int) -> None:
    titles = {
        "publisher": f"django-outbox-pattern publish, chunks of {chunk}",
        "task": "deliver_outbox_events_task, called",
        "worker": "deliver_outbox_events_task, in a worker",
    }
    lines: list[list[str]] = []
    facts: list[dict[str, Any]] = []
    for name, sample in found.items():
        gain = sample.over(found["publisher"])
        lines.append([titles[name], sample.show(), gain.show(2)])
        facts.append({"variant": name, "events_a_second": sample.median, "gain": gain.median})
    columns = [f"{rows:,} events", "events/s", "× the publisher"]
    report("drain", columns, lines, {"results": facts, "chunk": chunk, "required": REQUIRED})
