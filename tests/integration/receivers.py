"""HTTP receivers written by hand, so that they can do what no HTTP library would."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Request(NamedTuple):
    """A request as it arrived."""

    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """A port, the requests that arrived there, and how many connections were made."""

    port: int = 0
    connections: int = 0
    open: int = 0
    most_open: int = 0
    requests: list[Request] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/events"


async def read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *rest = head.rstrip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (header.partition(": ") for header in rest)}
    return Request(line, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


@asynccontextmanager
async def listening(
    talk: Callable[[Receiver, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    *,
    host: str | list[str] = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Receiver]:
    """Run a receiver that does ``talk`` on every connection."""
    receiver = Receiver()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        receiver.connections += 1
        receiver.open += 1
        receiver.most_open = max(receiver.most_open, receiver.open)
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await talk(receiver, reader, writer)
        finally:
            receiver.open -= 1
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await server.wait_closed()


@asynccontextmanager
async def answering(*answers: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """Answer the requests with these bytes, one after the other, and with the last ones from then on."""
    left = list(answers)

    async def talk(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            receiver.requests.append(await read_request(reader))
            writer.write(left.pop(0) if len(left) > 1 else left[0])
            await writer.drain()

    async with listening(talk, tls=tls) as receiver:
        yield receiver


@asynccontextmanager
async def doing(act: Talk) -> AsyncIterator[Receiver]:
    """Reads one request of each connection, then does ``act`` and closes."""

    async def talk(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        receiver.requests.append(await read_request(reader))
        await act(reader, writer)

    async with listening(talk) as receiver:
        yield receiver


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    """Return a whole answer: ``answer("503 Service Unavailable", b"come back", "Retry-After: 3")``."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body
