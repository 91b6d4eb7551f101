"""A dashboard over data that is there already, and its pages by name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from playwright.sync_api import Page

from relaybox.web.live import live_of

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


@contextmanager
def served(app: Any, web: Any = None) -> Iterator[str]:
    """The application's address, until the end of the block; ``web`` is what it has mounted."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server._serve()), daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        live_of(web or app).close()
        server.should_exit = True
        thread.join(10)


def go(page: Page, address: str, name: str) -> None:
    """To the page of that name."""
    page.goto(address + PAGES.get(name, f"/{name}"))
    if name == "event":
        page.locator("#events tbody a").first.click()
        page.locator("summary", has_text="Row").first.wait_for()
    if name == "confirm":
        page.get_by_role("link", name="Retry").first.click()
