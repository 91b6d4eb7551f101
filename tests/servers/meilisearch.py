"""Meilisearch: the one that MEILISEARCH_URL names, else an imitation of it, a process of its own."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers import base, restart

KEY = "the-master-key-of-the-tests"
LIMIT = 100 * 1024 * 1024
"""Bytes of a payload; the real one's ``--http-payload-size-limit`` is as large."""
READY = "Meilisearch imitation is ready"


class Server(restart.Restartable):
    """A Meilisearch that can be stopped, started again with its data, and made to fail."""

    imitated = True
    """Whether faults can be injected."""

    def __init__(self, directory: Path, key: str, limit: int) -> None:
        super().__init__(lambda port: _command(port, key, limit), directory, READY)
        self.key = key

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it: the first time at a free port, then always at that one. It ends with the thread."""

        def command(free: int) -> base.Command:
            return self._command(self.port or free)

        free = self._running.enter_context(base.running(command, self._directory, self._ready, as_root=True))
        self.port = self.port or free

    def fault(
        self,
        *,
        paused: bool = False,
        delay: float = 0.0,
        tasks: tuple[dict[str, Any], ...] = (),
        requests: tuple[dict[str, Any], ...] = (),
        quota: int | None = None,
    ) -> None:
        """Have exactly these faults from now on, or none.

        ``paused``: tasks stay enqueued. ``delay``: seconds that a batch takes. ``tasks``: such as
        ``{"code": "internal", "count": 1}``, with a ``type`` and a ``message`` if need be. ``requests``:
        such as ``{"status": 429, "after": 2, "count": 1}`` or ``{"drop": "before", "count": 1}`` (or
        ``after`` it has done what was asked), with ``on``, an expression that ``POST /indexes/…`` has to
        match. ``quota``: documents that all indexes may hold.
        """
        asked = {"paused": paused, "delay": delay, "tasks": tasks, "requests": requests, "quota": quota}
        self.ask("POST", "/__faults", asked)

    def asked(self) -> dict[str, int]:
        """Return the number of requests of each kind, such as ``{"GET /tasks": 3}``."""
        counts: dict[str, int] = self.ask("GET", "/__asked")
        return counts

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the answer of its API; raise if it is an error."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


class Given(Server):
    """A server that somebody else runs: it takes no faults."""

    imitated = False

    def __init__(self, url: str, key: str) -> None:
        self.key = key
        self._url = url.rstrip("/")

    @property
    def url(self) -> str:
        return self._url


@contextmanager
def server(key: str = KEY, limit: int = LIMIT) -> Iterator[Server]:
    """Yield the server of MEILISEARCH_URL (its key in MEILISEARCH_KEY), or a new one."""
    if url := os.environ.get("MEILISEARCH_URL"):
        yield Given(url, os.environ.get("MEILISEARCH_KEY", ""))
        return
    with imitation(key, limit) as started:
        yield started


@contextmanager
def server_url() -> Iterator[str]:
    """Yield the URL of a server with its key, without an index."""
    with server() as started:
        yield destination_url(started).replace("://", f"://:{started.key}@")


@contextmanager
def imitation(key: str = KEY, limit: int = LIMIT) -> Iterator[Server]:
    """Yield a new server, which takes faults."""
    with base.workspace() as directory:
        started = Server(directory, key, limit)
        started.start()
        try:
            yield started
        finally:
            started.stop()


def destination_url(server: Server, path: str = "") -> str:
    """Return the URL for a destination's sink: ``meilisearch://127.0.0.1:7700/documents``."""
    scheme, _, rest = server.url.partition("://")
    return f"{'meilisearchs' if scheme == 'https' else 'meilisearch'}://{rest}/{path}".rstrip("/")


def _command(port: int, key: str, limit: int) -> base.Command:
    root = Path(__file__).resolve().parents[2]
    # A shell has what runs in its background ignore the signal that is to end it.
    heeding = ["env", "--default-signal=QUIT", f"PYTHONPATH={root}", f"MEILI_MASTER_KEY={key}"]
    program = [sys.executable, "-B", "-m", "tests.servers.meilisearch_app"]
    return [*heeding, *program, "--port", str(port), "--limit", str(limit)]
