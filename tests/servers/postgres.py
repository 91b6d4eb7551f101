"""What the PostgreSQL servers share: a new cluster from given binaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.servers import base

HASTY = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
LOGICAL = ("wal_level=logical",)
"""What it takes to read the log."""


@contextmanager
def cluster(
    binaries: Path, *, durable: bool, prefix: base.Command = (), own: Sequence[str] = ()
) -> Iterator[str]:
    """Run a new cluster and yield the URL of its database.

    ``prefix`` begins the server's command; ``own`` are settings for this one.
    """
    settings = [
        "listen_addresses=127.0.0.1",
        "unix_socket_directories=",
        "max_connections=200",
        *(() if durable else HASTY),
        *own,
    ]
    with base.workspace(durable=durable) as directory:
        data = directory / "data"
        initdb = ["--username=relaybox", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        base.prepare([binaries / "initdb", "-D", data, *initdb], directory)

        def command(port: int) -> base.Command:
            options = [word for setting in settings for word in ("-c", setting)]
            return [*prefix, binaries / "postgres", "-D", data, "-p", str(port), *options]

        # Killed, it would leave shared memory behind, and a backend that a test has stopped.
        with base.running(command, directory, ready="ready to accept connections", death="QUIT") as port:
            yield f"postgresql://relaybox:relaybox@127.0.0.1:{port}/postgres"
