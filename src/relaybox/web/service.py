"""The operators' service behind the web: opened by the first request that needs it, closed at the end.

An application that mounts the web need not run its lifespan, and a database that is down when the server
starts need not stay so: whatever could not be opened is tried again by the next request.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from relaybox.operate.admin import Admin
from relaybox.operate.bulk import Bulk
from relaybox.outbox import Outbox
from relaybox.web.auth import LOCAL

CONNECTIONS = 4


class Service:
    """One pool of connections for all requests of a process, and the bulk actions that it runs."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock, self._alone = asyncio.Lock(), asyncio.Lock()
        self._open = AsyncExitStack()
        self._admin: Admin | None = None
        self._bulk: Bulk | None = None

    def alone(self) -> asyncio.Lock:
        """For what no two requests do at a time."""
        self._follow_loop()
        return self._alone

    async def admin(self, actor: str) -> Admin:
        """The service, acting as this user."""
        self._follow_loop()
        async with self._lock:
            if self._admin is None:
                opened = self.outbox.admin(LOCAL, connections=CONNECTIONS)
                self._admin = await self._open.enter_async_context(opened)
        return self._admin.acting_as(actor)

    def bulk(self) -> Bulk:
        """What runs bulk actions in the background."""
        self._follow_loop()
        if self._bulk is None:
            self._bulk = Bulk(lambda actor: self.outbox.admin(actor, connections=1))
            self._open.push_async_callback(self._bulk.close)
        return self._bulk

    async def close(self) -> None:
        """Stop what runs, and let go of the connections; a later request opens them anew."""
        opened, self._open = self._open, AsyncExitStack()
        self._admin = self._bulk = None
        await opened.aclose()

    def _follow_loop(self) -> None:
        """What was opened in another event loop, which has ended, cannot be used in this one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._lock, self._alone = loop, asyncio.Lock(), asyncio.Lock()
            self._open, self._admin, self._bulk = AsyncExitStack(), None, None
