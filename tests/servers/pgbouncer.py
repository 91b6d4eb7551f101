"""PgBouncer, from Debian's package: a transaction pooler in front of a PostgreSQL server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from tests.servers import base

SETTINGS = """\
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = transaction
server_login_retry = 1
default_pool_size = {sessions}
max_client_conn = 500
"""


@contextmanager
def server(target: str, *, sessions: int = 5) -> Iterator[str]:
    """Yield the URL of the target's database through RELAYBOX_TEST_PGBOUNCER, or through a new pooler.

    The clients of one database share so many ``sessions`` of the target, a transaction at a time. A new
    pooler knows every database of the target by its own name.
    """
    url = sa.make_url(target)
    if given := os.environ.get("RELAYBOX_TEST_PGBOUNCER"):
        yield through(given, target)
        return
    program = program_path()
    with base.workspace() as directory:
        users, settings = directory / "users.txt", directory / "pgbouncer.ini"
        users.write_text(f'"{url.username}" "{url.password}"\n')

        def command(port: int) -> base.Command:
            text = SETTINGS.format(host=url.host, port=url.port, listen=port, users=users, sessions=sessions)
            settings.write_text(text)
            return [program, settings]

        with base.running(command, directory, ready="process up") as port:
            yield _at(url, "127.0.0.1", port)


def through(pooler: str, target: str) -> str:
    """Return the URL of a database of the same server, by way of the pooler."""
    way = sa.make_url(pooler)
    return _at(sa.make_url(target), way.host, way.port)


def _at(url: sa.URL, host: str | None, port: int | None) -> str:
    return url.set(host=host, port=port).render_as_string(hide_password=False)


def program_path() -> Path:
    return Path(base.program("pgbouncer", "pgbouncer", service="pgbouncer"))
