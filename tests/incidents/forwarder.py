"""The address of a database: where new connections are led can change, while old ones stay where they are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa


class Forwarder:
    """Listens at one port, in a thread of its own, and leads whoever connects to ``target``."""

    def __init__(self, target: sa.URL) -> None:
        self.target = target
        self._loop = asyncio.new_event_loop()
        self._talks: set[asyncio.Task[None]] = set()

    @contextmanager
    def listening(self) -> Iterator[sa.URL]:
        """Until the block ends; the URL of the address."""
        thread = threading.Thread(target=self._loop.run_forever, name="forwarder")
        thread.start()
        start = asyncio.start_server(self._connected, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        try:
            yield self.target.set(port=server.sockets[0].getsockname()[1])
        finally:
            asyncio.run_coroutine_threadsafe(self._end(server), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    async def _end(self, server: asyncio.Server) -> None:
        server.close()
        talks = list(self._talks)
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = self._loop.create_task(self._talk(reader, writer))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, up = await asyncio.open_connection(self.target.host, self.target.port)
        ways = {asyncio.create_task(_carry(reader, up)), asyncio.create_task(_carry(above, writer))}
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            up.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
