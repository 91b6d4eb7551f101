"""The server of ``relaybox web``: whoever does not finish a request does not keep its connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from relaybox.cli import serving
from relaybox.cli.serving import Protocol, listen

SHORT = 0.3


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[uvicorn.Server]:
    monkeypatch.setattr(serving, "SLOWEST_HEAD", SHORT)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await asyncio.sleep(3 * SHORT)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(app, http=Protocol, log_config=None, lifespan="off", timeout_keep_alive=60)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([listener]))
    async with asyncio.timeout(10):
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    yield server
    server.should_exit = True
    await task


@pytest.fixture
def port(server: uvicorn.Server) -> int:
    return int(server.servers[0].sockets[0].getsockname()[1])


HALF = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: "
WHOLE = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def ended(port: int, *pieces: bytes, drip: bytes = b"") -> bytes:
    """Everything that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    dripping = asyncio.create_task(_drip(writer, pieces, drip))
    said = b""
    try:
        async with asyncio.timeout(10):
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
        await asyncio.sleep(0.05)
    while drip:
        writer.write(drip)
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("pieces", "drip", "answers"),
    [
        ((), b"", 0),
        ((b"GET",), b"", 0),
        ((HALF,), b"a", 0),
        ((WHOLE, HALF), b"a", 1),
        ((WHOLE + HALF,), b"a", 1),
        ((b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n",), b"a", 1),
    ],
)
async def test_a_request_that_does_not_arrive_is_not_waited_for(
    port: int, pieces: tuple[bytes, ...], drip: bytes, answers: int
) -> None:
    said = await ended(port, *pieces, drip=drip)
    assert said.count(b"HTTP/1.1 200 OK") == answers


async def test_who_asked_has_all_the_time_for_the_answer(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for path in (b"/slow", b"/", b"/slow"):
        writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: ")
        await asyncio.sleep(SHORT / 3)
        writer.write(b"localhost\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK")
        await asyncio.sleep(2 * SHORT)
    writer.close()


async def test_an_answer_does_not_wait_for_the_receipt_of_its_head(server: uvicorn.Server, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(WHOLE)
    async with asyncio.timeout(10):
        await reader.readuntil(b"ok")
    [connection] = server.server_state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()
