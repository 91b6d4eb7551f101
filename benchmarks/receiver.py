"""A receiver that answers every request with 200 as fast as one process can, and counts them."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Receiver(asyncio.Protocol):
    """Reads requests with a content-length, pipelined or not."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with nothing read."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._read = b""

    def data_received(self, data: bytes) -> None:
        """Answer each request that is complete."""
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            head = self._read[:end].lower()
            at = head.index(b"content-length:") + 15
            length = int(head[at:].split(b"\r\n", 1)[0])
            if len(self._read) < end + 4 + length:
                return
            self._read = self._read[end + 4 + length :]
            self._transport.write(ANSWER)


async def _serve(port: Connection) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Receiver, "127.0.0.1", 0)
    port.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _main(port: Connection) -> None:
    asyncio.run(_serve(port))


@contextmanager
def receiver() -> Iterator[str]:
    """The URL of a receiver in a process of its own."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=_main, args=(its,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{mine.recv()}/events"
    finally:
        process.terminate()
        process.join()
