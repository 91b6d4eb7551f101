"""Celery's own processes, run as users run them, and the broker that this process sends to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from kombu import pools

from relaybox.contrib.django import tasks
from tests.django.databases import VARIABLE
from tests.django.project.celery import app

ALIASES = ("default", "mariadb", "sqlite")
ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
STOP_SECONDS = 30.0
PERSISTENT = "celery.beat:PersistentScheduler"
DATABASE = "django_celery_beat.schedulers:DatabaseScheduler"


@dataclass(frozen=True, slots=True)
class Running:
    """A process of Celery with all its children, and what it has logged."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self.output.read_text(errors="replace")

    def kill(self) -> None:
        """End it and its children in mid-work, as a crash of the machine would."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Let it finish what it is doing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(STOP_SECONDS)

    def until_logged(self, text: str, seconds: float = START_SECONDS) -> None:
        """Wait until the log has the text."""
        wait_for(lambda: text in self.log or self.process.poll() is not None, seconds, self._explained(text))
        assert text in self.log, self._explained(text)()

    def _explained(self, text: str) -> Callable[[], str]:
        return lambda: f"no {text!r} in the log (exit code {self.process.poll()}):\n{self.log}"

    def _signal(self, number: signal.Signals) -> None:
        # The group outlives its leader as long as it has members, so the id is still its own.
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return


@contextmanager
def worker(
    database: str, broker: str, *options: str, pool: str = "prefork", concurrency: int = 1
) -> Iterator[Running]:
    """A worker; ``pool`` is solo, prefork, threads, gevent or eventlet."""
    name = f"{uuid4().hex}@localhost"
    # A worker that asks its neighbours for news starts a second later.
    arguments = ["--pool", pool, "--concurrency", str(concurrency), "--hostname", name, "--without-mingle"]
    with celery(database, broker, "worker", *arguments, *options) as running:
        running.until_logged(f"{name} ready.")
        yield running


@contextmanager
def beat(
    database: str, broker: str, *options: str, scheduler: str = PERSISTENT, max_interval: int = 1
) -> Iterator[Running]:
    """A beat, which looks at its schedule every ``max_interval`` seconds."""
    with TemporaryDirectory(prefix="relaybox-") as directory:
        arguments = ["--scheduler", scheduler, "--schedule", f"{directory}/schedule", "--pidfile="]
        arguments += ["--max-interval", str(max_interval)]
        with celery(database, broker, "beat", *arguments, *options) as running:
            running.until_logged("beat: Starting...")
            yield running


@contextmanager
def celery(database: str, broker: str, *arguments: str) -> Iterator[Running]:
    """``celery`` with the project of the tests, whose aliases all mean one database; killed at the end."""
    environment = {
        **os.environ,
        VARIABLE: json.dumps(dict.fromkeys(ALIASES, database)),
        "RELAYBOX_TEST_BROKER": broker,
        "RELAYBOX_TEST_SWEEP": "1s",
        # Errors are for the tests alone: others' warnings are not theirs.
        "PYTHONWARNINGS": "ignore",
    }
    program = [sys.executable, "-m", "celery", "--app", "tests.django.project.celery"]
    with TemporaryDirectory(prefix="relaybox-") as directory:
        output = Path(directory) / "log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *program, *arguments, "--loglevel", "INFO"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        running = Running(process, output)
        try:
            yield running
        finally:
            running.kill()


@contextmanager
def sending_to(broker: str) -> Iterator[None]:
    """Let the tasks that this process queues go to a broker."""
    before = app.conf.broker_url
    _reconnect(broker)
    try:
        yield
    finally:
        _reconnect(before)


def _reconnect(broker: str) -> None:
    pools.reset()
    app.conf.broker_url = broker
    # What Celery itself does in a forked child, so that it takes new connections.
    app._after_fork()
    # One that refused is not asked again for a while; this is another.
    tasks.broker.refused_until = 0.0


def through_database(url: str) -> str:
    """The broker that keeps its messages in a database."""
    return f"sqla+{url}"


def wait_for(
    condition: Callable[[], bool], seconds: float = 30.0, explain: Callable[[], str] = lambda: "it never was"
) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.02)
