"""MariaDB, from Debian's packages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers import base

ACCOUNT = """\
CREATE DATABASE relaybox;
CREATE USER relaybox@'127.0.0.1' IDENTIFIED BY 'relaybox';
GRANT ALL PRIVILEGES ON *.* TO relaybox@'127.0.0.1' WITH GRANT OPTION;
"""
HASTY = ("--innodb-flush-log-at-trx-commit=0", "--skip-innodb-doublewrite")


@contextmanager
def server(*, durable: bool = False) -> Iterator[str]:
    """Yield the URL of RELAYBOX_TEST_MARIADB, or of a new server."""
    if url := os.environ.get("RELAYBOX_TEST_MARIADB"):
        yield url
        return
    mariadbd, install_db = programs()
    with base.workspace(durable=durable) as directory:
        data = directory / "data"
        # A server that starts removes the temporary tables it finds, also those of another server.
        own = ("--no-defaults", "--skip-name-resolve", f"--datadir={data}", f"--tmpdir={directory}")
        base.prepare([install_db, *own, "--skip-test-db"], directory)
        account = directory / "account.sql"
        account.write_text(ACCOUNT)

        def command(port: int) -> base.Command:
            return [
                mariadbd,
                *own,
                f"--init-file={account}",
                f"--port={port}",
                "--bind-address=127.0.0.1",
                "--socket=server.sock",
                "--max-connections=200",
                "--character-set-server=utf8mb4",
                *(() if durable else HASTY),
            ]

        with base.running(command, directory, ready="ready for connections") as port:
            yield f"mysql://relaybox:relaybox@127.0.0.1:{port}/relaybox"


def programs() -> tuple[str, str]:
    if not _find("mariadbd") or not _find("my_print_defaults"):
        # These packages bring the programs without the service.
        base.apt_install("mariadb-server-core", "mariadb-client-core")
    mariadbd, install_db = _find("mariadbd"), _find("mariadb-install-db")
    if not mariadbd or not install_db:
        raise base.Unavailable("mariadbd and mariadb-install-db are not on PATH")
    return mariadbd, install_db


def _find(program: str) -> str | None:
    # Debian keeps mariadbd in a directory that only root has on PATH.
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
