"""Redis, from Debian's package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import base, ports, restart

READY = "Ready to accept connections"
HASTY = ("--save", "", "--appendonly", "no")
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@contextmanager
def server(*, durable: bool = False, port: int | None = None) -> Iterator[str]:
    """Yield the URL of RELAYBOX_TEST_REDIS, or of a new server; always of a new one where a port is given."""
    if port is None and (url := os.environ.get("RELAYBOX_TEST_REDIS")):
        yield url
        return
    program = program_path()
    with base.workspace(durable=durable) as directory:

        def command(free: int) -> base.Command:
            return _command(program, port or free, directory, DURABLE if durable else HASTY)

        with base.running(command, directory, READY) as free:
            yield f"redis://127.0.0.1:{port or free}/0"


@contextmanager
def broker(*more: str) -> Iterator[restart.Restartable]:
    """Yield a new, durable server that can be stopped and started again; ``more`` are arguments of it."""
    program = program_path()

    def command(port: int, directory: Path) -> base.Command:
        return _command(program, port, directory, (*DURABLE, *more))

    with restart.running(command, READY) as started:
        yield started


def url_of(started: restart.Restartable, login: str = "") -> str:
    """Return the URL of a server, with ``login`` before the host."""
    return f"redis://{login}{'@' if login else ''}127.0.0.1:{started.port}/0"


def _command(program: str, port: int, directory: Path, more: tuple[str, ...]) -> base.Command:
    return [
        program,
        *("--port", str(port)),
        *("--bind", "127.0.0.1"),
        # One for each process of a run.
        *("--databases", str(ports.RANGES)),
        *("--dir", directory),
        *("--pidfile", directory / restart.PID_FILE),
        # Its arguments stay in the list of processes, where its directory tells it from others.
        *("--set-proc-title", "no"),
        *more,
    ]


def program_path() -> str:
    return base.program("redis-server", "redis-server")
