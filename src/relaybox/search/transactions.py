"""Short transactions on the outbox's own database, for reads and for events, with SQLAlchemy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from relaybox.database.connect import BUSY
from relaybox.database.dialects import refusal
from relaybox.database.drivers.find import channel
from relaybox.database.statements.delivery import Statements
from relaybox.database.transactions import begin_on_sqlite, lock_wait
from relaybox.receive.once_handler import ASYNC_DRIVERS
from relaybox.search.locks import HURRIED, PATIENT, PAUSE, TRIES, Busy, is_passing
from relaybox.search.rows import Also, Calls, Item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from relaybox.outbox import Outbox

T = TypeVar("T")
Kind: TypeAlias = Literal["read", "write", "fence"]
"""``write`` takes rows, ``fence`` also what may be between them."""


class Transactions:
    """Runs work on a connection, each time in a transaction of its own."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        url = sa.make_url(outbox.settings.database)
        self.backend = url.get_backend_name()
        self._url = outbox.settings.database
        self._engine = _open(url.set(drivername=ASYNC_DRIVERS[self.backend]))
        self._statements: Statements | None = None

    async def run(self, kind: Kind, work: Callable[[sa.Connection], T], *, wait: float = PATIENT) -> T:
        """Do the work, again from the start where a lock could not be had in time; raises ``Busy``.

        With less patience it is not tried again.
        """
        tries = TRIES if wait == PATIENT else 1
        for attempt in range(tries):
            try:
                return await self._run(kind, work, wait)
            except sa.exc.DBAPIError as error:
                beneath = _beneath(error)
                if not is_passing(beneath):
                    raise refusal(beneath, self._url) from error
                if attempt == tries - 1:
                    raise Busy("the table" if kind == "fence" else "rows", beneath) from error
            await asyncio.sleep(PAUSE * 2**attempt)
        raise AssertionError("unreachable")

    async def _run(self, kind: Kind, work: Callable[[sa.Connection], T], wait: float) -> T:
        options: dict[str, Any] = {"relaybox": kind}
        # MySQL locks what is between rows under no other level, and holds it from the first row on.
        fences = kind == "fence" and self.backend == "mysql"
        if self.backend != "sqlite":
            options["isolation_level"] = "REPEATABLE READ" if fences else "READ COMMITTED"
        async with self._engine.connect() as connection:
            await connection.execution_options(**options)
            async with connection.begin():
                if kind != "read":
                    await connection.run_sync(self._wait, HURRIED if fences else wait)
                return await connection.run_sync(work)

    def _wait(self, connection: sa.Connection, seconds: float) -> None:
        if text := lock_wait(self.backend, seconds):
            connection.exec_driver_sql(text)

    def emit(self, connection: sa.Connection, items: Sequence[Item], calls: Calls, also: Also | None) -> None:
        """The events of a page, in the transaction that the connection has open."""
        self._wait(connection, PATIENT)
        if also is not None:
            way = channel(connection, self._outbox.tables.event.insert())
            if self._statements is None:
                self._statements = Statements(self._outbox.tables, way.driver.dialect, way.driver.style)
            items = way.run(also(self._statements, items))
        if made := calls(items):
            self._outbox.emit_many(connection, made)

    async def close(self) -> None:
        """Give up the connections."""
        await self._engine.dispose()


def _open(url: sa.URL) -> AsyncEngine:
    options: dict[str, Any] = {"poolclass": AsyncAdaptedQueuePool, "pool_size": 2, "pool_pre_ping": True}
    if url.get_backend_name() == "sqlite" and "timeout" not in url.query:
        options["connect_args"] = {"timeout": BUSY}
    engine = create_async_engine(url, **options)
    if url.get_backend_name() == "sqlite":
        _begin_by_ourselves(engine.sync_engine)
    return engine


def _begin_by_ourselves(engine: sa.Engine) -> None:
    """The driver's own transactions would begin too late: not before a read, and not as a writer."""

    @sa.event.listens_for(engine, "connect")
    def connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(engine, "begin")
    def began(connection: sa.Connection) -> None:
        reads = connection.get_execution_options().get("relaybox") == "read"
        connection.exec_driver_sql(begin_on_sqlite(reads=reads))


def _beneath(error: sa.exc.DBAPIError) -> Exception:
    """What the driver raised."""
    orig = error.orig
    cause = None if orig is None else orig.__cause__
    return cause if isinstance(cause, Exception) else orig if isinstance(orig, Exception) else error
