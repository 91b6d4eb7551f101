"""Run a handler once for each event, in one transaction with its mark in the outbox's database."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, QueuePool

from relaybox.core.event import Event
from relaybox.core.outcome import Reject, unfinished
from relaybox.core.settings import Destination
from relaybox.database.connect import BUSY
from relaybox.database.schema import Tables
from relaybox.errors import ConfigError
from relaybox.receive.inbox import Inbox
from relaybox.sinks.handler import is_async
from relaybox.sinks.threads import MOST_LEFT

DRIVERS = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite+pysqlite"}
ASYNC_DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+asyncmy", "sqlite": "sqlite+aiosqlite"}
MYSQL_DRIVERS = {"MySQLdb": "mysql+mysqldb", "pymysql": "mysql+pymysql"}
IDLE = 5
"""Connections that are kept open for the next event."""


class _Handler:
    def __init__(
        self, destination: Destination, function: Callable[..., Any], address: sa.URL, inbox: Inbox
    ) -> None:
        self._name = destination.name
        self._function = with_connection(function)
        self._inbox = inbox
        self._address = address
        self._options = _options(address, destination)
        self._making = threading.Lock()


class OnceHandler(_Handler):
    """Calls a synchronous function."""

    _engine: sa.Engine | None = None

    def __call__(self, event: Event) -> None:
        with (
            self._opened().begin() as connection,
            self._inbox.once(connection, event, consumer=self._name) as first,
        ):
            if first:
                check_done(self._function(event, connection))

    async def close(self) -> None:
        """Close the connections."""
        if self._engine is not None:
            self._engine.dispose()

    def _opened(self) -> sa.Engine:
        # Several threads may arrive with the first events.
        with self._making:
            if self._engine is None:
                self._engine = sa.create_engine(self._address, poolclass=QueuePool, **self._options)
            return self._engine


class AsyncOnceHandler(_Handler):
    """Calls an asynchronous function."""

    _engine: AsyncEngine | None = None

    async def __call__(self, event: Event) -> None:
        if self._engine is None:
            self._engine = create_async_engine(
                self._address, poolclass=AsyncAdaptedQueuePool, **self._options
            )
        async with (
            self._engine.begin() as connection,
            self._inbox.aonce(connection, event, consumer=self._name) as first,
        ):
            if first:
                await self._function(event, connection)

    async def close(self) -> None:
        """Close the connections."""
        if self._engine is not None:
            await self._engine.dispose()


def once_handler(
    destination: Destination, function: Callable[..., Any], url: str, tables: Tables
) -> OnceHandler | AsyncOnceHandler:
    """Return the function as one that runs once for each event; it connects with the first event."""
    address = sa.make_url(url)
    backend = address.get_backend_name()
    asynchronous = is_async(destination.name, function)
    driver = ASYNC_DRIVERS[backend] if asynchronous else _driver(destination, backend)
    kind = AsyncOnceHandler if asynchronous else OnceHandler
    return kind(destination, function, address.set(drivername=driver), Inbox(tables=tables))


def with_connection(function: Callable[..., Any]) -> Callable[[Event, Any], Any]:
    """Return the function as one of two arguments, even if it takes only the event."""
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError):
        return lambda event, _: function(event)
    return function


def check_done(result: Any) -> None:
    """Raise ``Reject`` if the result is work that would run after the commit."""
    if unfinished(result):
        reason = "the handler returned an awaitable, which would run after the commit; write async def"
        raise Reject(f"once: {reason}")


def _driver(destination: Destination, backend: str) -> str:
    if backend != "mysql":
        return DRIVERS[backend]
    for package, driver in MYSQL_DRIVERS.items():
        if find_spec(package):
            return driver
    fix = "install PyMySQL or mysqlclient, or make the function an async def"
    raise ConfigError(
        f"destination {destination.name!r}: once = true: a plain function needs a driver; {fix}"
    )


def _options(address: sa.URL, destination: Destination) -> dict[str, Any]:
    """Allow a connection for each handler that may run, including those in abandoned threads."""
    kept = min(IDLE, destination.concurrency)
    options: dict[str, Any] = {
        "pool_size": kept,
        "max_overflow": destination.concurrency - kept + MOST_LEFT,
        "pool_pre_ping": True,
    }
    if address.get_backend_name() == "sqlite" and "timeout" not in address.query:
        options["connect_args"] = {"timeout": BUSY}
    return options
