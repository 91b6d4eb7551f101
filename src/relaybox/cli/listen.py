"""Serve metrics and health of a relay, for ``relay --listen``.

The HTTP server is minimal: GET only, no bodies, one answer a connection. The standard library parses its
requests, so it needs only the extra ``metrics``.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from msgspec import json

from relaybox.errors import ConfigError, MissingExtra
from relaybox.operate.admin import Admin
from relaybox.operate.health import Health, Problem
from relaybox.operate.metrics import CONTENT_TYPE, Gauges, Latest, MetricsObserver
from relaybox.operate.observers.flow import Flow
from relaybox.outbox import Outbox
from relaybox.relay.observer import Observer
from relaybox.relay.relay import Relay
from relaybox.web.settings import is_loopback

try:
    from prometheus_client import ProcessCollector, generate_latest
except ImportError:
    raise MissingExtra("prometheus-client", "metrics") from None

LOOPBACK = "127.0.0.1"
HEAD = 16_384
"""Most bytes of a request's head."""
AT_ONCE = 50
"""Connections served at the same time; further ones are closed."""
SLOWEST = 5.0
"""Seconds for a client to send its request, and again to take the answer."""
SILENT = 30.0
"""Seconds without an answer from the database until a relay is not ready."""
STALLED = 45.0
"""Seconds of due work without a settlement; with the time between checks, under a minute."""

_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]\s]*):)?(?P<port>[0-9]{1,5})")

Reply: TypeAlias = tuple[int, str, bytes]
"""The response of a page: its status, content type and body."""

Page: TypeAlias = Callable[[], Awaitable[Reply]]


def listen(address: str) -> socket.socket:
    """Return a socket that listens at ``HOST:PORT``, or at ``PORT`` of the loopback address."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigError(f"--listen = {address!r}: write HOST:PORT, such as 127.0.0.1:9464")
    host, port = (match["host"] or LOOPBACK).strip("[]"), int(match["port"])
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = "another process listens there; choose another port for each relay of a host"
        else:
            problem = f"{error.strerror or error}; name an address of this host, and a port that is allowed"
        raise ConfigError(f"--listen = {address!r}: {problem}") from None


@asynccontextmanager
async def serving(listening: socket.socket, pages: Mapping[str, Page]) -> AsyncIterator[None]:
    """Serve the pages, by path, during the block."""
    served: set[asyncio.Task[None]] = set()
    local = is_loopback(str(listening.getsockname()[0]))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        try:
            if len(served) <= AT_ONCE:
                await _serve(reader, writer, pages, local)
        finally:
            served.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, sock=listening, limit=HEAD)
    try:
        yield
    finally:
        server.close()
        for task in served:
            task.cancel()


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pages: Mapping[str, Page], local: bool
) -> None:
    # Ignore clients that disconnect or are too slow.
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        try:
            async with asyncio.timeout(SLOWEST):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            head = b""
        request = _Request(head)
        status, content_type, body = await _reply(request, pages, local)
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"content-type: {content_type}",
            f"content-length: {len(body)}",
            "cache-control: no-store",
            "x-content-type-options: nosniff",
            "connection: close",
            *(["allow: GET, HEAD"] if status == 405 else []),
        ]
        head = "\r\n".join([*lines, "", ""]).encode()
        writer.write(head if request.command == "HEAD" else head + body)
        async with asyncio.timeout(SLOWEST):
            await writer.drain()


class _Request(BaseHTTPRequestHandler):
    """Parse the head of a request; the caller answers it."""

    def __init__(self, head: bytes) -> None:
        self.rfile = BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        parsed = self.parse_request() and self.request_version in ("HTTP/1.0", "HTTP/1.1")
        # A malformed line would hide the headers after it, such as Host.
        self.is_valid = parsed and not self.headers.defects

    def send_error(self, *about: Any) -> None:
        """Write nothing; the parser calls this on a malformed request."""

    def names_this_host(self) -> bool:
        """True if the Host header names this host, or is missing, which no browser does."""
        try:
            names = [urlsplit(f"//{host.strip()}").hostname for host in self.headers.get_all("host", ())]
        except ValueError:
            return False
        return all(is_loopback(name or "") for name in names)


async def _reply(request: _Request, pages: Mapping[str, Page], local: bool) -> Reply:
    if not request.is_valid:
        return _plain(400, "this is not an HTTP request")
    if local and not request.names_this_host():
        # DNS rebinding: a foreign page whose name resolves to this host could read the answer.
        return _plain(421, "only names of this host, such as localhost, are answered")
    path = request.path.partition("?")[0]
    if path not in pages:
        return _plain(404, f"there are {', '.join(pages)}")
    if request.command not in ("GET", "HEAD"):
        return _plain(405, "only GET is served")
    return await pages[path]()


def _plain(status: int, text: str) -> Reply:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


class Monitor:
    """Observe a relay, and serve its metrics and health."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        namespace = outbox.settings.namespace
        self._metrics = MetricsObserver(namespace=namespace)
        self._gauges = Gauges(namespace)
        self._flow = Flow()
        self._health: Latest[Health] = Latest(stale=SILENT)
        self._metrics.registry.register(self._gauges)
        ProcessCollector(registry=self._metrics.registry)
        self.observers: list[Observer] = [self._metrics, self._flow]

    async def run(self, listening: socket.socket, relay: Relay) -> None:
        """Run the relay, and serve its pages while it runs."""
        host, port = listening.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        logging.getLogger("relaybox.relay").info(
            "serving /metrics, /livez and /readyz at http://%s",
            address,
            extra={"relay": {"event": "listening", "address": address}},
        )
        async with self.serving(listening, relay):
            await relay.run(signals=False)

    @asynccontextmanager
    async def serving(self, listening: socket.socket, relay: Relay) -> AsyncIterator[None]:
        """Serve the relay's pages during the block, with one more connection to the database."""
        async with self._outbox.admin("relay", connections=1) as admin:
            pages: dict[str, Page] = {
                "/metrics": partial(self._exposed, admin),
                "/livez": _alive,
                "/readyz": partial(self._ready, admin, relay),
            }
            try:
                async with serving(listening, pages):
                    yield
            finally:
                await self._gauges.close()
                await self._health.close()

    async def _exposed(self, admin: Admin) -> Reply:
        await self._gauges.refresh(admin)
        return 200, CONTENT_TYPE, generate_latest(self._metrics.registry)

    async def _ready(self, admin: Admin, relay: Relay) -> Reply:
        problems = [problem async for problem in self._problems(admin, relay)]
        # Hide what follows the colon: addresses and texts of other systems, which not everybody may see.
        shown = [asdict(problem) | {"reason": problem.reason.partition(":")[0]} for problem in problems]
        document = {"ready": not problems, "problems": shown}
        return 503 if problems else 200, "application/json", json.encode(document) + b"\n"

    async def _problems(self, admin: Admin, relay: Relay) -> AsyncIterator[Problem]:
        health = await self._health.look(lambda: admin.health(STALLED))
        silent = health is None or self._health.age > SILENT
        if silent:
            yield Problem(None, "the database has not answered", None if health is None else self._health.age)
        known = health.problems if health else ()
        for problem in known:
            yield problem
        for problem in self._own(relay, circuits=silent):
            if problem.destination is None or problem.destination not in {one.destination for one in known}:
                yield problem

    def _own(self, relay: Relay, *, circuits: bool) -> Iterator[Problem]:
        """Yield the relay's own problems; ask for ``circuits`` only if the database does not answer."""
        yield from self._flow.stops(circuits=circuits)
        if (canary := relay.canary) is None:
            return
        if canary.refused is not None:
            reason = f"its test event was refused: {canary.refused}"
            yield Problem(canary.destination, reason, canary.unproven)
        elif (seconds := canary.overdue) is not None:
            yield Problem(canary.destination, "its test event was not acknowledged", seconds)


async def _alive() -> Reply:
    return 200, "application/json", b'{"alive":true}\n'
