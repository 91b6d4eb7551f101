"""A dashboard over data that is there already, and its pages by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import uvicorn
from playwright.sync_api import Page

from relaybox.web.live import live_of
from tests.waiting import PATIENCE, await_for

T = TypeVar("T")
PAGES = {
    "overview": "/?period=24h",
    "destinations": "/destinations",
    "destination": "/destinations/warehouse?period=24h",
    "events": "/events",
    "event": "/events?status=failed&destination=analytics",
    "failures": "/failures",
    "confirm": "/failures",
    "dead-letters": "/dead-letters",
    "operations": "/operations",
    "relays": "/relays",
    "audit": "/audit",
    "system": "/system",
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


@asynccontextmanager
async def serving(app: Any, web: Any = None) -> AsyncIterator[str]:
    """Serve the application at this address; ``web`` is what it has mounted."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    # Without its signal handlers: the thread is not the main one.
    task = asyncio.create_task(server._serve())
    await await_for(lambda: server.started or task.done(), "the server is up")
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    live_of(web or app).close()
    server.should_exit = True
    await task


@contextmanager
def served(app: Any, web: Any = None) -> Iterator[str]:
    """The same, for tests that are not asynchronous."""
    with looping() as loop:
        yield loop.enter(serving(app, web))


def go(page: Page, address: str, name: str) -> None:
    """To the page of that name."""
    page.goto(address + PAGES.get(name, f"/{name}"))
    if name == "event":
        page.locator("#events tbody a").first.click()
        page.locator("summary", has_text="Row").first.wait_for()
    if name == "confirm":
        page.get_by_role("link", name="Retry").first.click()
