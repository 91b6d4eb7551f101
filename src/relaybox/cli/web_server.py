"""The server of ``relaybox web``."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from relaybox.cli.signals import STOP, handling
from relaybox.errors import ConfigError, MissingExtra

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError:
    raise MissingExtra("uvicorn", "web") from None

if TYPE_CHECKING:
    from relaybox.web.app import Web

PATIENCE = 3
"""Seconds for open requests to end after a signal."""
SLOWEST_HEAD = 10.0
"""Seconds for a client to send the head of a request, from its first byte or from connecting."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at that address; raise ``ConfigError`` if it cannot."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server((str(address[0]), port), family=family)
    except OSError as error:
        fix = "choose another with --host and --port"
        raise ConfigError(f"{host} port {port} cannot be listened on: {error.strerror}; {fix}") from None


def serve(web: Web, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    # Trust a forwarded client address only from the proxies named here, as uvicorn does.
    proxies = os.environ.get("FORWARDED_ALLOW_IPS")
    config = uvicorn.Config(
        web,
        http=Protocol,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=proxies is not None,
        forwarded_allow_ips=proxies,
        lifespan="on",
        timeout_graceful_shutdown=PATIENCE,
    )
    server = _Server(config)
    server.web = web
    asyncio.run(server.serve([listener]))


class Protocol(H11Protocol):
    """Close connections whose request does not arrive in time; uvicorn would keep them forever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request."""
        # asyncio sets this only on sockets that name their protocol. Without it, the body waits until the
        # client acknowledges the head.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)
        self._watch(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._watch(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Keep the timer running until the head is complete."""
        super().data_received(data)
        self._watch(self._incomplete())

    def on_response_complete(self) -> None:
        """Start the timer if a part of the next request has arrived already."""
        super().on_response_complete()
        if self._incomplete() and self.conn.trailing_data[0]:
            self._watch(True)

    def _incomplete(self) -> bool:
        """True while a head is expected, or the rest of a body whose request is answered already."""
        answered = self.cycle is not None and self.cycle.response_complete
        return self.conn.their_state is h11.IDLE or (answered and self.conn.their_state is h11.SEND_BODY)

    def _watch(self, waits: bool) -> None:
        """Keep a timer running while a request is awaited, and none at other times."""
        if waits and self._timer is None:
            self._timer = self.loop.call_later(SLOWEST_HEAD, self.transport.close)
        elif not waits and self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    """End streams when the server stops, and exit with status 0 after a signal."""

    web: Web

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.web.end_streams()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Only the main thread can set signal handlers.
        listens = threading.current_thread() is threading.main_thread()
        with handling(STOP if listens else (), self.handle_exit):
            yield
