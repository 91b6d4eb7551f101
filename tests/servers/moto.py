"""Amazon's SQS and SNS, as moto imitates them: its server in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers import base


@contextmanager
def server() -> Iterator[str]:
    """Yield the endpoint that RELAYBOX_TEST_MOTO names, or that of a new server, which keeps nothing."""
    if url := os.environ.get("RELAYBOX_TEST_MOTO"):
        yield url
        return
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        raise base.Unavailable("moto[server] is not installed")
    with base.workspace() as directory:

        def command(port: int) -> base.Command:
            # A shell has what runs in its background ignore the signal that is to end it.
            heeding = ["env", "--default-signal=QUIT"]
            return [*heeding, sys.executable, "-B", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

        with base.running(command, directory, ready="Running on http://", as_root=True) as port:
            yield f"http://127.0.0.1:{port}"
