"""Prometheus and promtool, from Debian's package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.servers import base

READY = "Server is ready to receive web requests"


@contextmanager
def server(files: Mapping[str, str]) -> Iterator[str]:
    """Yield the URL of a new server with these files, of which ``prometheus.yml`` is its configuration."""
    program = program_path("prometheus")
    with base.workspace() as directory:
        for name, text in files.items():
            (directory / name).write_text(text)

        def command(port: int) -> base.Command:
            return [
                program,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ]

        with base.running(command, directory, READY) as port:
            yield f"http://127.0.0.1:{port}"


@contextmanager
def promtool() -> Iterator[str]:
    """Yield the path of promtool."""
    yield program_path("promtool")


def program_path(name: str) -> str:
    return base.program(name, "prometheus", service="prometheus")
