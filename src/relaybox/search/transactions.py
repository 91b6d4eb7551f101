"""Run short transactions on the outbox's database that read and lock rows of the application.

Waiting while holding locks blocks other transactions or deadlocks with them; then the database may abort the
application's. So several rows are locked almost without waiting, and fewer if one is taken. Only a single row
is waited for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from relaybox.database.connect import BUSY
from relaybox.database.dialects import refusal
from relaybox.database.drivers.find import channel
from relaybox.database.statements.delivery import Statements
from relaybox.database.transactions import begin_on_sqlite, lock_wait
from relaybox.emit.row import Call
from relaybox.errors import StoreError
from relaybox.receive.once_handler import ASYNC_DRIVERS
from relaybox.search.source import Also, Calls, Item, Rows

if TYPE_CHECKING:
    from relaybox.outbox import Outbox

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
Kind: TypeAlias = Literal["read", "write", "fence"]
"""``write`` locks rows; ``fence`` also keeps others from creating rows between them."""

HURRIED = 0.2
"""Seconds to wait while holding other locks; shorter than PostgreSQL's deadlock check."""

PATIENT = 1.5
"""Seconds to wait while holding no lock; longer than PostgreSQL takes to cancel an autovacuum."""

TRIES = 5
PAUSE = 0.25
"""Seconds before the second patient try, doubled before each further one."""

DEADLOCK, LOCK_WAIT_TIMEOUT = 1213, 1205
_PASSING = {"40P01", "40001", "55P03", DEADLOCK, LOCK_WAIT_TIMEOUT, "database is locked"}


class Busy(StoreError):
    """Other transactions hold the locks; the text says what to do."""

    def __init__(self, what: str, error: Exception) -> None:
        reason = " ".join(str(error).split())
        fix = "end them, or start this again when they have ended"
        super().__init__(f"other transactions hold {what} for too long ({reason}); {fix}")


class Found(NamedTuple):
    """The number of emitted events, and the ids that no longer exist."""

    emitted: int
    gone: frozenset[str]


class Portion:
    """The number of rows to lock at once: it shrinks while others hold some, and grows again after that."""

    def __init__(self) -> None:
        self._most = sys.maxsize

    async def take(self, size: int, work: Callable[[int, float], Awaitable[T]]) -> T:
        """Call ``work`` with at most ``size`` rows and the seconds to wait for locks."""
        while True:
            part = min(size, self._most)
            try:
                done = await work(part, HURRIED if part > 1 else PATIENT)
            except Busy:
                if part <= 1:
                    raise
                self._most = max(1, part // 4)
                continue
            self._most = max(self._most, part * 2)
            return done


async def by_parts(ids: Sequence[str], work: Callable[[Sequence[str], float], Awaitable[Found]]) -> Found:
    """Do the work with these ids; in halves if others hold some of the rows."""
    if len(ids) > 1:
        try:
            return await work(ids, HURRIED)
        except Busy:
            half = len(ids) // 2
            one, other = await by_parts(ids[:half], work), await by_parts(ids[half:], work)
            return Found(one.emitted + other.emitted, one.gone | other.gone)
    return await work(ids, PATIENT) if ids else Found(0, frozenset())


async def emit_all(
    rows: Rows,
    ids: Sequence[str],
    emit_found: Callable[[Sequence[str], float], Awaitable[Found]],
    emit_missing: Callable[[Sequence[str]], Awaitable[int]],
) -> int:
    """Emit for the rows that exist, by parts, and then for those that are missing; return the number."""
    there = await rows.existing(ids)
    found = await by_parts([id_ for id_ in ids if id_ in there], emit_found)
    missing = [id_ for id_ in ids if id_ not in there or id_ in found.gone]
    return found.emitted + (await emit_missing(missing) if missing else 0)


async def patiently(
    what: str, wait: float, work: Callable[[], Awaitable[T]], kind: type[E], beneath: Callable[[E], Exception]
) -> T:
    """Do the work, again from the start if a lock on ``what`` was not free in time. Raise ``Busy``.

    With less patience it is not tried again. ``beneath`` returns the driver's error in one of ``kind``.
    """
    tries = TRIES if wait == PATIENT else 1
    for attempt in range(tries):
        try:
            return await work()
        except kind as error:
            if not is_passing(beneath(error)):
                raise
            if attempt == tries - 1:
                raise Busy(what, beneath(error)) from error
        await asyncio.sleep(PAUSE * 2**attempt)
    raise AssertionError("unreachable")


def is_passing(error: Any) -> bool:
    """True if a driver's error is a deadlock or a lock timeout."""
    # MySQL's error numbers are more specific than the SQLSTATE that some of its drivers also set.
    return getattr(error, "sqlstate", None) in _PASSING or (*error.args, None)[0] in _PASSING


class Transactions:
    """Runs each piece of work in a transaction of its own."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        url = sa.make_url(outbox.settings.database)
        self.backend = url.get_backend_name()
        self._url = outbox.settings.database
        self._engine = _open(url.set(drivername=ASYNC_DRIVERS[self.backend]))
        self._statements: Statements | None = None

    async def run(self, kind: Kind, work: Callable[[sa.Connection], T], *, wait: float = PATIENT) -> T:
        """Do the work patiently (see there)."""
        what, run = "the table" if kind == "fence" else "rows", partial(self._run, kind, work, wait)
        try:
            return await patiently(what, wait, run, sa.exc.DBAPIError, _beneath)
        except sa.exc.DBAPIError as error:
            raise refusal(_beneath(error), self._url) from error

    async def _run(self, kind: Kind, work: Callable[[sa.Connection], T], wait: float) -> T:
        options: dict[str, Any] = {"relaybox": kind}
        # MySQL locks gaps only under REPEATABLE READ, and holds them from the first row on.
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

    def emit(self, connection: sa.Connection, made: Sequence[Call]) -> int:
        """Emit the events in the connection's open transaction; return their number."""
        self._wait(connection, PATIENT)
        if made:
            self._outbox.emit_many(connection, made)
        return len(made)

    def emit_page(self, connection: sa.Connection, items: Sequence[Item], calls: Calls, also: Also) -> None:
        """Run ``also``, and emit the events of the items that it returns."""
        self._wait(connection, PATIENT)
        way = channel(connection, self._outbox.tables.event.insert())
        if self._statements is None:
            self._statements = Statements(self._outbox.tables, way.driver.dialect, way.driver.style)
        if made := calls(way.run(also(self._statements, items))):
            self._outbox.emit_many(connection, made)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._engine.dispose()


def _open(url: sa.URL) -> AsyncEngine:
    options: dict[str, Any] = {"poolclass": AsyncAdaptedQueuePool, "pool_size": 2, "pool_pre_ping": True}
    if url.get_backend_name() != "sqlite":
        return create_async_engine(url, **options)
    if "timeout" not in url.query:
        options["connect_args"] = {"timeout": BUSY}
    engine = create_async_engine(url, **options)

    # The driver would begin a transaction too late: not before a read, and not as a writer.
    @sa.event.listens_for(engine.sync_engine, "connect")
    def connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(engine.sync_engine, "begin")
    def began(connection: sa.Connection) -> None:
        reads = connection.get_execution_options().get("relaybox") == "read"
        connection.exec_driver_sql(begin_on_sqlite(reads=reads))

    return engine


def _beneath(error: sa.exc.DBAPIError) -> Exception:
    causes = (getattr(error.orig, "__cause__", None), error.orig, error)
    return next(one for one in causes if isinstance(one, Exception))
