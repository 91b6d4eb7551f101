"""PostgreSQL 15, from Debian's package."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.servers import base, postgres

DEBIAN = Path("/usr/lib/postgresql/15/bin")


@contextmanager
def server(*, durable: bool = False, own: Sequence[str] = ()) -> Iterator[str]:
    """Yield the URL of RELAYBOX_TEST_POSTGRES15, or of a new server; of a new one with ``own`` settings."""
    if not own and (url := os.environ.get("RELAYBOX_TEST_POSTGRES15")):
        yield url
        return
    with postgres.cluster(binaries(), durable=durable, own=own) as url:
        yield url


def binaries() -> Path:
    if found := _on_path():
        return found
    if not DEBIAN.exists():
        base.apt_install("postgresql-15")
        # The package starts a cluster of its own.
        subprocess.run(["pg_ctlcluster", "15", "main", "stop"], capture_output=True)
    return DEBIAN


def _on_path() -> Path | None:
    program = shutil.which("postgres")
    if program is None:
        return None
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    return Path(program).resolve().parent if " 15." in version else None
