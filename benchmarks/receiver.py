"""A receiver that answers every request with 200 as fast as one process can.

It must not limit the measurement. It is a bare protocol, on uvloop if installed, and takes a fraction of the
time of any client for the same request.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeAlias, cast

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

Seen: TypeAlias = Any
"""Two numbers in shared memory: the answered requests, and the nanoseconds of CPU they took."""

_find_length = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE).search


class Receiver(asyncio.Protocol):
    """Reads requests with a content-length, pipelined or not."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start with an empty buffer."""
        self._transport = cast(asyncio.Transport, transport)
        self._read = b""

    def data_received(self, data: bytes) -> None:
        """Answer each complete request."""
        self._read = self._read + data if self._read else data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            length = _find_length(self._read, 0, end)
            assert length is not None
            whole = end + 4 + int(length[1])
            if len(self._read) < whole:
                return
            self._read = self._read[whole:]
            self._seen[0] += 1
            self._transport.write(ANSWER)


async def _serve(port: Connection, seen: Seen) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Receiver(seen), "127.0.0.1", 0, backlog=1024)
    port.send(server.sockets[0].getsockname()[1])
    while True:
        # Rarely enough to cost nothing.
        await asyncio.sleep(0.05)
        seen[1] = time.process_time_ns()


def _main(port: Connection, seen: Seen) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(port, seen))


@contextmanager
def counting_receiver() -> Iterator[tuple[str, Seen]]:
    """Yield the URL of a receiver in a process of its own, and its counters."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    seen = context.RawArray("Q", 2)
    process = context.Process(target=_main, args=(its, seen), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{mine.recv()}/events", seen
    finally:
        process.terminate()
        process.join()


@contextmanager
def receiver() -> Iterator[str]:
    """Yield the URL of a receiver in a process of its own."""
    with counting_receiver() as (url, _):
        yield url
