"""A shop as operators meet it: a database, receivers, a relay and the dashboard, all real, in one thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import sqlalchemy as sa
import uvicorn
from aiohttp import web as http

from relaybox import Destination, Outbox, Route
from relaybox.web import dashboard
from relaybox.web.live import live_of

OPERATOR = "an-operators-token"
VIEWER = "a-viewers-own-token"
USERS = {"ada": {"token": OPERATOR, "role": "operator"}, "vic": {"token": VIEWER, "role": "viewer"}}
PATIENCE = 60.0

QUICK = {"base": "50ms", "cap": "100ms"}


class Receiver:
    """Takes webhooks, and answers each with ``status``."""

    def __init__(self) -> None:
        self.status = 200
        self.text = ""
        self.bodies: list[bytes] = []
        self.port = 0

    async def receive(self, request: http.Request) -> http.Response:
        """Answer one."""
        self.bodies.append(await request.read())
        return http.Response(status=self.status, text=self.text)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}/events"


class Site:
    """What a test has in its hands."""

    def __init__(self, database: str, users: dict[str, Any] | None = None) -> None:
        self.billing, self.search = Receiver(), Receiver()
        self.database = database
        self.users = users or {}
        self.address = ""
        self.outbox: Outbox
        self.app: Any = None
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event
        self._ready: Future[None] = Future()
        self._relays: set[asyncio.Task[None]] = set()
        self._engine = sa.create_engine(database.replace("postgresql://", "postgresql+psycopg://"))

    def emit(self, event_type: str, payload: Any, number: int = 1, **options: Any) -> None:
        """Emit some events, each of an order of its own, and commit."""
        with self._engine.begin() as connection:
            for index in range(number):
                self.outbox.emit(connection, "Order", index + 1, event_type, payload, **options)
        self.outbox.wake()

    def sql(self, statement: Any, *parameters: Any) -> Any:
        """Run a statement and commit."""
        with self._engine.begin() as connection:
            return connection.execute(statement, *parameters)

    def rows(self, statement: str) -> list[Any]:
        """What a query finds."""
        with self._engine.connect() as connection:
            return list(connection.execute(sa.text(statement)))

    def start_relay(self) -> None:
        """Have a relay run from now on."""

        async def start() -> None:
            self._relays.add(asyncio.create_task(self.outbox.relay(patience=1.0).run()))

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(PATIENCE)

    def run(self) -> None:
        """Serve until it is told to stop."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise
        finally:
            self._loop.close()

    def wait(self) -> None:
        """Until it is there."""
        self._ready.result(PATIENCE)

    def stop(self) -> None:
        """Tell it to end."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def dispose(self) -> None:
        """Let go of the test's own connections."""
        self._engine.dispose()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with AsyncExitStack() as stack:
            for receiver in (self.billing, self.search):
                receiver.port = await _listen(receiver, stack)
            self.outbox = await asyncio.to_thread(self._configured)
            self.app = dashboard(self.outbox, **({"users": self.users} if self.users else {}))
            config = uvicorn.Config(self.app, port=0, log_level="warning", lifespan="on")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(_quietly(server))
            while not server.started:  # noqa: ASYNC110 - the server has no signal for it
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            self.address = f"http://127.0.0.1:{port}"
            self._ready.set_result(None)
            await self._stop.wait()
            live_of(self.app).close()
            server.should_exit = True
            for relay in self._relays:
                relay.cancel()
            await asyncio.gather(*self._relays, return_exceptions=True)
            await serving

    def _configured(self) -> Outbox:
        outbox = Outbox(
            self.database,
            destinations=[
                Destination(
                    "billing",
                    self.billing.url,
                    allow=["127.0.0.0/8"],
                    max_attempts=2,
                    backoff=QUICK,
                    dead_letter="graveyard",
                ),
                Destination("search", self.search.url, allow=["127.0.0.0/8"], ordered=True, backoff=QUICK),
                Destination("graveyard", "memory:"),
            ],
            routes=[Route("order.*", to=["billing", "search"]), Route("invoice.*", to="billing")],
        )
        outbox.migrate()
        return outbox


async def _quietly(server: uvicorn.Server) -> None:
    """Without the server's signal handlers: the thread is not the main one."""
    await server._serve()


async def _listen(receiver: Receiver, stack: AsyncExitStack) -> int:
    application = http.Application()
    application.router.add_post("/events", receiver.receive)
    runner = http.AppRunner(application, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = http.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port: int = runner.addresses[0][1]
    return port


@contextmanager
def running(database: str, users: dict[str, Any] | None = None) -> Iterator[Site]:
    """A site, until the end of the block."""
    site = Site(database, users)
    thread = threading.Thread(target=site.run, name="site", daemon=True)
    thread.start()
    try:
        site.wait()
        yield site
    finally:
        site.stop()
        thread.join(PATIENCE)
        site.dispose()
    assert not thread.is_alive(), "the site does not end"


Sites = Callable[..., Site]
