"""Ports for the servers of tests: below the range from which the system takes those of outgoing connections.

A port of that range is free only until any connection takes it, which fails a server that starts again at its
port. Each process has a range of its own, held by a lock on a file until the process ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

FIRST = 10_000
RANGES = 64
SIZE = 300


class Range:
    """The ports of one process; ``number`` is unique among the processes that run now."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process = os.getpid()
        self._next = 0

    def take(self) -> int:
        """Return the next port at which nothing listens."""
        for _ in range(SIZE):
            port = FIRST + self.number * SIZE + self._next
            self._next = (self._next + 1) % SIZE
            if _is_free(port):
                return port
        raise RuntimeError(
            f"no free port from {FIRST + self.number * SIZE} on: end the servers of an earlier run"
        )


_range: Range | None = None


def own() -> Range:
    """Return the range of this process; a fork gets one of its own."""
    global _range
    if _range is None or _range.process != os.getpid():
        _range = _claim()
    return _range


def _claim() -> Range:
    directory = Path(tempfile.gettempdir(), f"relaybox-ports-{os.getuid()}")
    directory.mkdir(exist_ok=True)
    for number in range(RANGES):
        # Closed when the process ends.
        lock = os.open(directory / str(number), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return Range(number)
    raise RuntimeError(f"all {RANGES} ranges of ports are taken: end the test processes of earlier runs")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
