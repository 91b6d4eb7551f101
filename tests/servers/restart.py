"""A server that can be stopped and started again with its data at its port, and be made to say nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.servers import base

PID_FILE = "server.pid"
"""Where a server writes its number, in its directory."""


class Restartable:
    """``command`` spells a server out for a port; ``ready`` is what its log says when it has started."""

    def __init__(self, command: Callable[[int], base.Command], directory: Path, ready: str) -> None:
        self.port = 0
        self._command = command
        self._directory = directory
        self._ready = ready
        self._running = ExitStack()

    def start(self) -> None:
        """Start it: the first time at a free port, then always at that one."""

        def command(free: int) -> base.Command:
            return self._command(self.port or free)

        free = self._running.enter_context(base.running(command, self._directory, self._ready))
        self.port = self.port or free

    def stop(self) -> None:
        """Stop it as if its process had been killed."""
        self._running.close()

    def kill(self) -> None:
        """Stop it where it says nothing."""
        os.kill(self._process, signal.SIGKILL)
        self.stop()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Suspend it: it keeps its connections and does nothing, unless it is killed."""
        process = self._process
        os.kill(process, signal.SIGSTOP)
        # Each of its threads stops when it has a turn.
        while not all(map(_is_stopped, Path(f"/proc/{process}/task").iterdir())):
            time.sleep(0.005)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    @property
    def _process(self) -> int:
        return int((self._directory / PID_FILE).read_text())


def _is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(") ")[2].startswith("T")


@contextmanager
def running(command: Callable[[int, Path], base.Command], ready: str) -> Iterator[Restartable]:
    """Yield a server that has started, with a directory of its own."""
    with base.workspace() as directory, ExitStack() as stack:
        server = Restartable(lambda port: command(port, directory), directory, ready)
        stack.callback(server.stop)
        server.start()
        yield server
