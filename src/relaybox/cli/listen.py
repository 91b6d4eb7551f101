"""Serve metrics and health of a relay, for ``relay --listen``, one answer a connection."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from relaybox.errors import ConfigError, MissingExtra
from relaybox.operate.admin import Admin
from relaybox.operate.documents import health
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
try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    from relaybox.cli.web_server import Protocol
except ImportError:
    raise MissingExtra("uvicorn", "metrics") from None

LOOPBACK = "127.0.0.1"
AT_ONCE = 50
"""Connections at the same time; the oldest is closed for a further one."""
PATIENCE = 1
"""Seconds for open requests to end when the relay stops."""
HEADERS = [("cache-control", "no-store"), ("x-content-type-options", "nosniff"), ("connection", "close")]
SILENT = 30.0
"""Seconds without an answer from the database until a relay is not ready."""
STALLED = 45.0
"""Seconds of due work without a settlement; with the time between checks, under a minute."""

_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]\s]*):)?(?P<port>[0-9]{1,5})")

Page: TypeAlias = Callable[[], Awaitable[Response]]


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
    config = uvicorn.Config(
        _application(pages, is_loopback(str(listening.getsockname()[0]))),
        http=_Protocol,
        log_level="error",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=HEADERS,
        proxy_headers=False,
        lifespan="off",
        timeout_graceful_shutdown=PATIENCE,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


class _Protocol(Protocol):
    """Close the oldest connection when there are too many, so that idle ones block nobody."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for this connection."""
        super().connection_made(transport)
        self.began = self.loop.time()
        if len(self.connections) > AT_ONCE:
            oldest: Any = min(self.connections, key=attrgetter("began"))
            oldest.transport.abort()


class _Server(uvicorn.Server):
    """Leave signals to the relay."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _application(pages: Mapping[str, Page], local: bool) -> Starlette:
    def endpoint(page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if local and not _names_this_host(request):
                # DNS rebinding: a foreign page whose name resolves to this host could read the answer.
                raise HTTPException(421, "only names of this host, such as localhost, are answered\n")
            return await page()

        return answer

    async def unknown(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"there are {', '.join(pages)}\n", 404)

    routes = [Route(path, endpoint(page)) for path, page in pages.items()]
    return Starlette(routes=routes, exception_handlers={404: unknown})


def _names_this_host(request: Request) -> bool:
    """True if the Host header names this host, or is missing, which no browser does."""
    try:
        names = [urlsplit(f"//{host.strip()}").hostname for host in request.headers.getlist("host")]
    except ValueError:
        return False
    return all(is_loopback(name or "") for name in names)


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

    async def _exposed(self, admin: Admin) -> Response:
        await self._gauges.refresh(admin)
        return Response(generate_latest(self._metrics.registry), headers={"content-type": CONTENT_TYPE})

    async def _ready(self, admin: Admin, relay: Relay) -> Response:
        problems = tuple([problem async for problem in self._problems(admin, relay)])
        return JSONResponse(health(Health(not problems, problems)), 503 if problems else 200)

    async def _problems(self, admin: Admin, relay: Relay) -> AsyncIterator[Problem]:
        latest = await self._health.look(lambda: admin.health(STALLED))
        silent = latest is None or self._health.age > SILENT
        if silent:
            yield Problem(None, "the database has not answered", None if latest is None else self._health.age)
        known = latest.problems if latest else ()
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


async def _alive() -> Response:
    return JSONResponse({"alive": True})
