"""Processes by the dozen: a warm interpreter that forks whatever it is asked for.

Forked, not started from scratch, so that a relay costs milliseconds. Forked from here, not from the process
that directs them, whose threads and sockets they would inherit. They die with the process that started them.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from tests.servers import base

ROOT = Path(__file__).parents[2]
JOBS = {"relay": "tests.chaos.fleet", "emitter": "tests.chaos.workload", "receiver": "tests.chaos.receiver"}
"""What can be asked for: the modules whose ``main`` takes a plan."""


class Change(NamedTuple):
    """A process ended with ``code`` (negative: by a signal), or was stopped where that is None."""

    pid: int
    code: int | None


class Asked(msgspec.Struct, frozen=True):
    """A line to the nursery: what to fork, with what plan, and the file that its words go to."""

    job: str
    plan: msgspec.Raw
    log: str


class Nursery:
    def __init__(self, environment: Mapping[str, str] | None = None, warm: Sequence[str] = ()) -> None:
        """``warm``: modules that are imported here, so that no process has to."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery", *warm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            # Only the directing process handles Ctrl-C; the others follow.
            start_new_session=True,
        )

    def start(self, job: str, plan: msgspec.Struct, log: Path) -> int:
        raw = msgspec.Raw(msgspec.json.encode(plan))
        pid: int = self._ask(Asked(job, raw, str(log)))
        return pid

    def changes(self) -> list[Change]:
        return [Change(*change) for change in self._ask(None)]

    def _ask(self, question: Asked | None) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(question) + b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # All processes that it forked end with it.
        self._process.kill()
        self._process.communicate()


def _serve() -> None:
    base.die_with_parent(os.getppid())
    works = {job: importlib.import_module(module).main for job, module in JOBS.items()}
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin.buffer:
        asked = msgspec.json.decode(line, type=Asked | None)
        answer = _changes() if asked is None else _fork(works[asked.job], asked)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _changes() -> list[Change]:
    found: list[Change] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append(Change(pid, None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)))


def _fork(work: Any, asked: Asked) -> int:
    me = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        base.die_with_parent(me)
        _silence(asked.log)
        # To ask a process that hangs what it does.
        faulthandler.register(signal.SIGUSR1, sys.stderr)
        work(bytes(asked.plan))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _silence(log: str) -> None:
    """Write what the process says to a file: its pipes belong to the nursery."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(file)


if __name__ == "__main__":
    _serve()
