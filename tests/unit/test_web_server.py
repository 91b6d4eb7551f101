"""The server of ``relaybox web``: a client that does not finish a request loses its connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from relaybox.cli import web_server
from relaybox.cli.web_server import Protocol, listen
from tests.waiting import PATIENCE, await_for

SHORT = 0.1


class App:
    """Answers ``ok``; to ``/slow`` only when it may."""

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            self.asked.set()
            await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
async def server(app: App, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[uvicorn.Server]:
    monkeypatch.setattr(web_server, "SLOWEST_HEAD", SHORT)
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(app, http=Protocol, log_config=None, lifespan="off", timeout_keep_alive=60)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([listener]))
    await await_for(lambda: server.started)
    yield server
    server.should_exit = True
    await task


@pytest.fixture
def port(server: uvicorn.Server) -> int:
    return int(server.servers[0].sockets[0].getsockname()[1])


HALF = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: "
WHOLE = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def ended(port: int, *pieces: bytes, drip: bytes = b"") -> bytes:
    """Return everything that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    dripping = asyncio.create_task(_drip(writer, pieces, drip))
    said = b""
    try:
        async with asyncio.timeout(PATIENCE):
            while more := await reader.read(65_536):
                said += more
    except ConnectionResetError:
        # It was closed while more was on its way to it.
        pass
    finally:
        dripping.cancel()
        writer.close()
    return said


async def _drip(writer: asyncio.StreamWriter, pieces: tuple[bytes, ...], drip: bytes) -> None:
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.02)
    while drip:
        writer.write(drip)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("pieces", "drip", "answers"),
    [
        *(((), b"", 0), ((b"GET",), b"", 0), ((HALF,), b"a", 0), ((WHOLE, HALF), b"a", 1)),
        ((WHOLE + HALF,), b"a", 1),
        ((b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n",), b"a", 1),
    ],
)
async def test_a_request_that_does_not_arrive_is_not_waited_for(
    port: int, pieces: tuple[bytes, ...], drip: bytes, answers: int
) -> None:
    said = await ended(port, *pieces, drip=drip)
    assert said.count(b"HTTP/1.1 200 OK") == answers


async def test_who_asked_has_all_the_time_for_the_answer_and_for_the_next_question(
    app: App, server: uvicorn.Server, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "SLOWEST_HEAD", 3600.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = (await await_for(lambda: list(server.server_state.connections)))[0]
    async with asyncio.timeout(PATIENCE):
        for _ in range(2):
            writer.write(b"GET /slow HTTP/1.1\r\nhost: ")
            await await_for(lambda: connection._timer is not None)
            writer.write(b"localhost\r\n\r\n")
            await app.asked.wait()
            assert connection._timer is None
            app.go_on.set()
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK")
            assert connection._timer is None
            app.asked.clear()
            app.go_on.clear()
    writer.close()


async def test_an_answer_does_not_wait_for_the_receipt_of_its_head(server: uvicorn.Server, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(WHOLE)
    async with asyncio.timeout(PATIENCE):
        await reader.readuntil(b"ok")
    [connection] = server.server_state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()
