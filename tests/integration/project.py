"""A user's directory, in which the command is run as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import warm
from tests.waiting import wait_for

OURS = ("RELAYBOX_DATABASE", "RELAYBOX_CONFIG", "DATABASE_URL", "NO_COLOR")
COMMAND = (sys.executable, "-m", "relaybox")
"""The command from a cold start; by default it comes from a warm interpreter, which is much faster."""


class Project:
    """A directory with files in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {name: value for name, value in os.environ.items() if name not in OURS}

    def write(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)

    def read(self, name: str) -> str:
        path = self.directory / name
        return path.read_text() if path.exists() else ""

    def lines(self, name: str) -> list[str]:
        return self.read(name).splitlines()

    def run(self, *arguments: str, status: int = 0, command: tuple[str, ...] = (), **env: str) -> str:
        """Standard output, or standard error where the status is another than 0."""
        where = {"cwd": self.directory, "env": self.environment | env}
        if command:
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, **where)
        else:
            done = warm.run(arguments, **where)
        assert done.returncode == status, done
        assert "Traceback" not in done.stderr, done.stderr
        return done.stderr if status else done.stdout

    @contextmanager
    def running(self, *arguments: str, **env: str) -> Iterator[warm.Process]:
        """Run a command in the background; its log is in the file ``log`` and its output in ``out``."""
        with (self.directory / "log").open("wb") as log, (self.directory / "out").open("wb") as out:
            environment = self.environment | env
            process = warm.start(arguments, self.directory, environment, out.fileno(), log.fileno())
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait for a condition; the log says why it does not come."""
        wait_for(reached, lambda: self.read("log"))
