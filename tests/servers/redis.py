"""Redis, from Debian's package."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers import base

HASTY = ("--save", "", "--appendonly", "no")
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@contextmanager
def server(*, durable: bool = False, port: int | None = None) -> Iterator[str]:
    """Yield the URL of RELAYBOX_TEST_REDIS, or of a new server; always of a new one where a port is given."""
    if port is None and (url := os.environ.get("RELAYBOX_TEST_REDIS")):
        yield url
        return
    program = _program()
    with base.workspace() as directory:

        def command(free: int) -> base.Command:
            return [
                program,
                *("--port", str(port or free)),
                *("--bind", "127.0.0.1"),
                *("--dir", directory),
                # Its arguments stay in the list of processes, where its directory tells it from others.
                *("--set-proc-title", "no"),
                *(DURABLE if durable else HASTY),
            ]

        with base.running(command, directory, ready="Ready to accept connections") as free:
            yield f"redis://127.0.0.1:{port or free}/0"


def _program() -> str:
    if not shutil.which("redis-server"):
        base.apt_install("redis-server")
    program = shutil.which("redis-server")
    if not program:
        raise base.Unavailable("redis-server is not on PATH")
    return program
