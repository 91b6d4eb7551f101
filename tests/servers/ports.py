"""Ports for the servers of tests: below the range from which the system takes those of outgoing connections.

A port of that range is free only until any connection takes it, which fails a server that starts again at its
port. Each process has a range of its own. It holds the range by a socket with a name and without a file,
which is free again when the process has ended.
"""

from __future__ import annotations

import os
import socket
import threading

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
        with _lock:
            for _ in range(SIZE):
                port = FIRST + self.number * SIZE + self._next
                self._next = (self._next + 1) % SIZE
                if _is_free(port):
                    return port
        raise RuntimeError(
            f"no free port from {FIRST + self.number * SIZE} on: end the servers of an earlier run"
        )


_range: Range | None = None
_lock = threading.Lock()


def own() -> Range:
    """Return the range of this process; a fork gets one of its own."""
    global _range
    with _lock:
        if _range is None or _range.process != os.getpid():
            _range = _claim()
        return _range


def _claim() -> Range:
    for number in range(RANGES):
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0relaybox-ports-{number}")
        except OSError:
            lock.close()
        else:
            # Left open until the process ends.
            lock.detach()
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
