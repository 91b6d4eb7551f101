"""A shop as operators meet it, all real, in one thread; and a dashboard alone, with its pages by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa
import uvicorn
from aiohttp import web as http
from playwright.sync_api import Locator, Page

from relaybox import Destination, Outbox, Route
from relaybox.web import dashboard
from tests.databases import engine
from tests.waiting import PATIENCE, await_for

OPERATOR = "an-operators-token"
VIEWER = "a-viewers-own-token"
LOCAL = "a-token-without-users"
USERS = {"ada": {"token": OPERATOR, "role": "operator"}, "vic": {"token": VIEWER, "role": "viewer"}}
QUICK: dict[str, Any] = {"allow": ["127.0.0.0/8"], "backoff": {"base": "50ms", "cap": "100ms"}}
T = TypeVar("T")
PAGES = {
    "overview": "/?period=24h",
    "destination": "/destinations/warehouse?period=24h",
    "event": "/events?status=failed&destination=analytics",
    "confirm": "/failures",
    **{name: f"/{name}" for name in ("destinations", "events", "failures", "dead-letters", "operations")},
    **{name: f"/{name}" for name in ("relays", "audit", "system")},
}


class Loop:
    """An event loop in a thread of its own, and what is open in it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._opened = AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def enter(self, opening: AbstractAsyncContextManager[T]) -> T:
        """Open something that is closed with the loop."""
        return self._run(self._opened.enter_async_context(opening))

    def close(self) -> None:
        try:
            self._run(self._opened.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the loop does not end"
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)


@contextmanager
def looping() -> Iterator[Loop]:
    loop = Loop()
    try:
        yield loop
    finally:
        loop.close()


def let_in(app: Any) -> Any:
    """Return the application for a browser that sends the token of an outbox without users."""

    async def asked(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            sent = (b"authorization", f"Bearer {LOCAL}".encode())
            scope = {**scope, "headers": [*scope["headers"], sent]}
        await app(scope, receive, send)

    return asked


@asynccontextmanager
async def serving(app: Any, web: Any = None) -> AsyncIterator[str]:
    """Serve the application at this address, without a login if it has no users.

    ``web`` is what it has mounted.
    """
    web = web or app
    app = app if web.gate.link is None else let_in(app)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    # Without its signal handlers: the thread is not the main one.
    task = asyncio.create_task(server._serve())
    await await_for(lambda: server.started or task.done(), "the server is up")
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    web.live.close()
    server.should_exit = True
    await task
    # A mounted application gets no shutdown event.
    await web.close()


@contextmanager
def served(app: Any, web: Any = None) -> Iterator[str]:
    """Serve the same for tests that are not asynchronous."""
    with looping() as loop:
        yield loop.enter(serving(app, web))


def go(page: Page, address: str, name: str) -> None:
    """Open the page of that name."""
    page.goto(address + PAGES.get(name, f"/{name}"))
    if name == "event":
        follow(page, page.locator("#events tbody a").first)
    if name == "confirm":
        follow(page, page.get_by_role("link", name="Retry").first)


def follow(page: Page, control: Locator) -> None:
    """Click a link or a button, and wait until the page that it leads to is loaded.

    A click alone returns as soon as the browser has left the old page; the new one may have no content yet.
    """
    with page.expect_navigation():
        control.click()


class Receiver:
    """Takes webhooks, and answers each with ``status``."""

    def __init__(self) -> None:
        self.status = 200
        self.text = ""
        self.bodies: list[bytes] = []

    async def receive(self, request: http.Request) -> http.Response:
        """Answer one."""
        self.bodies.append(await request.read())
        return http.Response(status=self.status, text=self.text)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Listen at this URL."""
        application = http.Application()
        application.router.add_post("/events", self.receive)
        runner = http.AppRunner(application, access_log=None)
        await runner.setup()
        await http.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/events"
        await runner.cleanup()


class Site:
    """What a test has in its hands."""

    def __init__(self, database: str, users: dict[str, Any], loop: Loop) -> None:
        self.billing, self.search = Receiver(), Receiver()
        self.search_url = loop.enter(self.search.listening())
        billing = Destination(
            "billing", loop.enter(self.billing.listening()), max_attempts=2, dead_letter="graveyard", **QUICK
        )
        search = Destination("search", self.search_url, ordered=True, **QUICK)
        self.outbox = Outbox(
            database,
            destinations=[billing, search, Destination("graveyard", "memory:")],
            routes=[Route("order.*", to=["billing", "search"]), Route("invoice.*", to="billing")],
        )
        self.app: Any = dashboard(self.outbox, **({"users": users} if users else {}))
        self.address = loop.enter(serving(self.app))
        self._loop = loop
        self._engine = engine(database)

    def emit(self, event_type: str, payload: Any, number: int = 1, **options: Any) -> None:
        """Emit some events, each of an order of its own, and commit."""
        with self._engine.begin() as connection:
            for index in range(number):
                self.outbox.emit(connection, "Order", index + 1, event_type, payload, **options)
        self.outbox.wake()

    def rows(self, statement: str) -> list[Any]:
        """Return what a query finds."""
        with self._engine.connect() as connection:
            return list(connection.execute(sa.text(statement)))

    def start_relay(self) -> None:
        """Have a relay run from now on."""
        self._loop.enter(self._relaying())

    @asynccontextmanager
    async def _relaying(self) -> AsyncIterator[None]:
        relay = asyncio.create_task(self.outbox.relay(patience=1.0).run())
        yield
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)


@contextmanager
def running(database: str, users: dict[str, Any] | None = None) -> Iterator[Site]:
    """Run a site until the end of the block, on a database that has Relaybox's tables."""
    with looping() as loop:
        yield Site(database, users or {}, loop)
