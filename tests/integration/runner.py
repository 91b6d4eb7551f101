"""An endpoint that can be down in several ways, and keeps what arrived, when and by which path."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from tests.integration.receivers import answer, read_request

OK = answer("200 OK")


class Arrival(NamedTuple):
    """A request that was answered with 200, or is about to be."""

    at: float
    n: int
    path: str


class Runner:
    """Listens at ``url``. A request that it does not answer waits without end."""

    def __init__(self) -> None:
        self.down: str | None = None
        self.token: str | None = None
        self.poison: frozenset[int] = frozenset()
        self.throttle: Callable[[], bytes | None] = lambda: None
        """What it answers whom it does not take at the moment."""
        self.go_on = asyncio.Event()
        self.go_on.set()
        """While it is not set, answers are held back."""
        self.on_request: Callable[[int], None] = lambda n: None
        self.tries: Counter[int] = Counter()
        self.taken: list[Arrival] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/events"

    async def listen(self) -> None:
        """Begin, or begin again at the same port."""
        self._server = await asyncio.start_server(self._talk, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Stop listening: new connections are refused."""
        assert self._server is not None
        self._server.close()
        talks = list(self._talks)
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        await self._server.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            while True:
                request = await read_request(reader)
                n = json.loads(request.body)["data"]["n"]
                self.tries[n] += 1
                self.on_request(n)
                writer.write(await self._reply(n, request.line.split()[1], request.headers))
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._talks.discard(task)

    async def _reply(self, n: int, path: str, headers: dict[str, str]) -> bytes:
        if self.down == "timeout" or n in self.poison:
            await asyncio.Event().wait()
        if self.down == "503":
            return answer("503 Service Unavailable")
        if self.down == "429":
            return answer("429 Too Many Requests", b"", "Retry-After: 1")
        if self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
            return answer("401 Unauthorized")
        if throttled := self.throttle():
            return throttled
        self.taken.append(Arrival(time.monotonic(), n, path))
        await self.go_on.wait()
        return OK

    def in_last_second(self) -> int:
        """Return how many requests it took in the last second."""
        since = time.monotonic() - 1
        return sum(arrival.at > since for arrival in self.taken)


@asynccontextmanager
async def running() -> AsyncIterator[Runner]:
    """Run a runner that listens until the block ends."""
    runner = Runner()
    await runner.listen()
    try:
        yield runner
    finally:
        await runner.refuse()
