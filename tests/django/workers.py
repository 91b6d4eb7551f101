"""Celery's own processes, run as users run them, and the broker that this process sends to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from kombu import pools

from relaybox.contrib.django import tasks
from tests.django.databases import VARIABLE
from tests.django.project.celery import app
from tests.waiting import wait_for

ALIASES = ("default", "mariadb", "sqlite")
ROOT = Path(__file__).parents[2]
PERSISTENT = "celery.beat:PersistentScheduler"
DATABASE = "django_celery_beat.schedulers:DatabaseScheduler"


@dataclass(frozen=True, slots=True)
class Running:
    """A process of Celery with all its children, and what it has logged."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def log(self) -> str:
        """Return what it has written so far."""
        return self.output.read_text(errors="replace")

    def kill(self) -> None:
        """End it and its children in mid-work, as a crash of the machine would."""
        # The group outlives its leader as long as it has members, so the id is still its own.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Let it finish what it is doing, and expect that it ends well."""
        self.process.send_signal(how)
        assert self.process.wait(60) == 0, self.log

    def until_logged(self, text: str) -> None:
        """Wait until the log has the text."""
        wait_for(
            lambda: text in self.log or self.process.poll() is not None, lambda: f"{text!r} in {self.log}"
        )
        assert text in self.log, f"exit code {self.process.poll()}:\n{self.log}"


@contextmanager
def worker(database: str, broker: str, pool: str, concurrency: int = 1) -> Iterator[Running]:
    """Run a worker; ``pool`` is solo, prefork, threads, gevent or eventlet."""
    name = f"{uuid4().hex}@localhost"
    # A worker that asks its neighbours for news starts a second later.
    arguments = ["--pool", pool, "--concurrency", str(concurrency), "--hostname", name, "--without-mingle"]
    with celery(database, broker, "worker", *arguments) as running:
        running.until_logged(f"{name} ready.")
        yield running


@contextmanager
def beat(database: str, broker: str, scheduler: str = PERSISTENT) -> Iterator[Running]:
    """Run a beat that looks at its schedule every second."""
    with TemporaryDirectory(prefix="relaybox-") as directory:
        arguments = ["--scheduler", scheduler, "--schedule", f"{directory}/schedule", "--pidfile="]
        with celery(database, broker, "beat", *arguments, "--max-interval", "1") as running:
            running.until_logged("beat: Starting...")
            yield running


@contextmanager
def celery(database: str, broker: str, *arguments: str) -> Iterator[Running]:
    """``celery`` with the project of the tests, whose aliases all mean one database; killed at the end."""
    program = ["celery", "--app", "tests.django.project.celery", *arguments, "--loglevel", "INFO"]
    variables = {"RELAYBOX_TEST_BROKER": broker, "RELAYBOX_TEST_SWEEP": "1s"}
    with module(dict.fromkeys(ALIASES, database), *program, **variables) as running:
        yield running


@contextmanager
def module(databases: dict[str, str], *program: str, **variables: str) -> Iterator[Running]:
    """``python -m`` a module with the project of the tests; killed at the end."""
    with TemporaryDirectory(prefix="relaybox-") as directory:
        output = Path(directory) / "log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", sys.executable, "-m", *program],
                cwd=ROOT,
                env=environment(databases, **variables),
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


def run(environment: dict[str, str], *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end."""
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=120
    )


def environment(databases: dict[str, str], **variables: str) -> dict[str, str]:
    """Return the environment of a process that has the tests' project on these databases."""
    return {
        **os.environ,
        VARIABLE: json.dumps(databases),
        "DJANGO_SETTINGS_MODULE": "tests.django.project.settings",
        "PYTHONUNBUFFERED": "1",
        # Errors are for the tests alone: others' warnings are not theirs.
        "PYTHONWARNINGS": "ignore",
        **variables,
    }


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
