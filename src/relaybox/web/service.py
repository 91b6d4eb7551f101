"""The ``Admin`` behind the web, opened by the first request that needs it.

It needs no lifespan, which mounted applications may lack. If the database is down, the next request
tries again.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import AsyncExitStack

from relaybox.errors import StoreError
from relaybox.operate.admin import Admin
from relaybox.operate.bulk import Bulk
from relaybox.operate.health import Health, Problem
from relaybox.outbox import Outbox
from relaybox.web.settings import LOCAL

CONNECTIONS = 4
PATIENCE = 5.0
"""Seconds for the database to answer a health check."""
FRESH = 1.0
"""Seconds for which a health check is cached."""


class Service:
    """One connection pool for all requests of a process, and its bulk actions."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock, self._looking = asyncio.Lock(), asyncio.Lock()
        self._looked, self._health = -math.inf, Health(False, ())
        self._open = AsyncExitStack()
        self._admin: Admin | None = None
        self._bulk: Bulk | None = None

    async def admin(self, actor: str) -> Admin:
        """Return an ``Admin`` that acts as this user."""
        self._follow_loop()
        async with self._lock:
            if self._admin is None:
                opened = self.outbox.admin(LOCAL, connections=CONNECTIONS)
                self._admin = await self._open.enter_async_context(opened)
        return self._admin.acting_as(actor)

    def bulk(self) -> Bulk:
        """Return the runner of bulk actions in the background."""
        self._follow_loop()
        if self._bulk is None:
            self._bulk = Bulk(lambda actor: self.outbox.admin(actor, connections=1))
            self._open.push_async_callback(self._bulk.close)
        return self._bulk

    async def health(self) -> Health:
        """Return the health, at most ``FRESH`` seconds old; concurrent requests share one check."""
        self._follow_loop()
        async with self._looking:
            if time.monotonic() - self._looked > FRESH:
                try:
                    async with asyncio.timeout(PATIENCE):
                        self._health = await (await self.admin("health")).health()
                except (StoreError, TimeoutError) as error:
                    reason = f"the database does not answer: {' '.join(str(error).split())}"
                    self._health = Health(False, (Problem(None, reason, None),))
                self._looked = time.monotonic()
        return self._health

    async def close(self) -> None:
        """Stop bulk actions and close the connections; a later request opens them again."""
        opened, self._open = self._open, AsyncExitStack()
        self._admin = self._bulk = None
        await opened.aclose()

    def _follow_loop(self) -> None:
        """Forget what an earlier event loop opened: it cannot be used in this one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._lock, self._looking = loop, asyncio.Lock(), asyncio.Lock()
            self._open, self._admin, self._bulk = AsyncExitStack(), None, None
