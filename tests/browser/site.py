"""A shop as operators meet it: a database, receivers, a relay and the dashboard, all real, in one thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import sqlalchemy as sa
from aiohttp import web as http

from relaybox import Destination, Outbox, Route
from relaybox.web import dashboard
from tests.browser.served import Loop, looping, serving
from tests.databases import engine

OPERATOR = "an-operators-token"
VIEWER = "a-viewers-own-token"
USERS = {"ada": {"token": OPERATOR, "role": "operator"}, "vic": {"token": VIEWER, "role": "viewer"}}
QUICK: dict[str, Any] = {"allow": ["127.0.0.0/8"], "backoff": {"base": "50ms", "cap": "100ms"}}


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
