"""Algolia as its public documentation describes it: a server of our own, which keeps its data when killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.servers import base, restart

APPLICATION = "TESTAPP001"
KEY = "0123456789abcdef0123456789abcdef"
READY = "Algolia is listening"
"""What the log of its process says."""
ROOT = Path(__file__).parents[2]


class Server(restart.Restartable):
    """A process with an application of one key, at one port."""

    key = KEY

    def __init__(self, directory: Path) -> None:
        def command(port: int) -> base.Command:
            program = ["env", f"PYTHONPATH={ROOT}", "--default-signal=QUIT", sys.executable, "-B"]
            module = ["-m", "tests.servers.algolia_app", "--port", str(port)]
            return [*program, *module, "--application", APPLICATION, "--key", KEY, "--directory", directory]

        super().__init__(command, directory, READY)

    @property
    def url(self) -> str:
        """Return the URL of a sink with an index for each type of aggregate."""
        return self.url_of("")

    def url_of(self, index: str) -> str:
        """Return the sink of an index."""
        return f"algolia://{APPLICATION}/{index}?host=127.0.0.1:{self.port}&tls=false"

    def start(self) -> None:
        """Start it: the first time at a free port, then always at that one, with its data."""

        def command(free: int) -> base.Command:
            return self._command(self.port or free)

        # Other users may not be allowed to read the programs of this user.
        running = base.running(command, self._directory, self._ready, as_root=True)
        free = self._running.enter_context(running)
        self.port = self.port or free

    def faults(self, **given: Any) -> None:
        """Set what goes wrong from now on (see ``Faults`` in the server's module); nothing sets all right."""
        self._ask("/__faults", given)

    def requests(self) -> list[list[Any]]:
        """Method, path and size of every request so far."""
        asked: list[list[Any]] = self._ask("/__requests")
        return asked

    def _ask(self, path: str, given: dict[str, Any] | None = None) -> Any:
        body = None if given is None else json.dumps(given).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"http://127.0.0.1:{self.port}{path}", body, headers)) as answer:
            return json.load(answer)


@contextmanager
def server() -> Iterator[Server]:
    """Yield a server that has started."""
    with base.workspace() as directory:
        started = Server(directory)
        started.start()
        try:
            yield started
        finally:
            started.stop()


@contextmanager
def server_url() -> Iterator[str]:
    """Yield the URL of a server with its key, and an index for each type of aggregate."""
    with server() as started:
        yield started.url.replace("://", f"://:{started.key}@")
