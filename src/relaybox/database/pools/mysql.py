"""MariaDB and MySQL through asyncmy: each operation is one short READ COMMITTED transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import asyncmy
from asyncmy.errors import MySQLError
from sqlalchemy import make_url

from relaybox.database.dialects import LOCK_WAIT_TIMEOUT, refusal
from relaybox.database.drivers.asyncmy import Asyncmy as Driver
from relaybox.database.pools.places import ConnectionPlaces
from relaybox.database.statements.delivery import LOCK_SECONDS, STATEMENT_SECONDS, Query
from relaybox.database.steps import Rows, Steps, adrive

T = TypeVar("T")

DEADLOCK, CHECK_FAILED = 1213, 4025
LET_GO = (DEADLOCK, LOCK_WAIT_TIMEOUT)
"""After these errors the connection is usable once it has rolled back."""
TRIES = 5
ANSWER_SECONDS = 60.0
"""Seconds until a silent server counts as gone, unless the URL sets ``read_timeout``."""
CLOSING_SECONDS = 1.0
"""Extra seconds for the driver to close a connection, which waits until all output is sent."""

# Wait only briefly for a lock; end a statement before the client hangs up.
_WAITS = f"SESSION innodb_lock_wait_timeout = {LOCK_SECONDS}, SESSION lock_wait_timeout = {LOCK_SECONDS}"
MYSQL_SESSION = f"SET SESSION transaction_isolation = 'READ-COMMITTED', {_WAITS}"
# End the transaction of a stopped process, and release its locks.
MARIADB_SESSION = f"""SET SESSION tx_isolation = 'READ-COMMITTED', SESSION idle_transaction_timeout = 5,
{_WAITS}, SESSION max_statement_time = {STATEMENT_SECONDS}"""


class Asyncmy:
    """A pool of asyncmy connections. It closes a connection after a failure or a cancelled call."""

    def __init__(self, url: str, connections: int, mariadb: bool) -> None:
        self._mariadb = mariadb
        self._url = make_url(url).set(drivername="mysql+asyncmy")
        self._connections = connections
        self._places = ConnectionPlaces(connections, chained=True)
        self._pool: Any = None
        self._patience = ANSWER_SECONDS

    async def run(self, begin: Callable[[], Steps[T]], *, checked: bool = False, lane: str = "") -> T:
        """Drive the steps in one transaction; start again after a deadlock."""
        before = _cancellations()
        try:
            async with self._places.take(lane):
                return await self._run(begin, checked)
        finally:
            # A cancellation that arrives with an answer still counts: before Python 3.12 the driver's
            # ``wait_for`` loses it, and the relay could not stop.
            if _cancellations() > before:
                raise asyncio.CancelledError

    async def _run(self, begin: Callable[[], Steps[T]], checked: bool) -> T:
        checks, tries = True, 0
        while True:
            try:
                return await self._transaction(begin(), checks)
            except MySQLError as error:
                if self._mariadb and checks and not checked and error.args[:1] == (CHECK_FAILED,):
                    # A row edited by hand violates the constraint; it must not hold up the others.
                    checks = False
                    continue
                tries += 1
                if tries == TRIES or _number(error) != DEADLOCK:
                    raise refusal(error, self._url.render_as_string(hide_password=False)) from error

    async def close(self) -> None:
        """Close every connection."""
        if self._pool is not None:
            self._pool.close()
            await self._pool.wait_closed()
            self._pool = None

    async def _transaction(self, steps: Steps[T], checks: bool) -> T:
        async with (await self._open()).acquire() as connection:
            timer = asyncio.get_running_loop().call_later(self._patience, _hang_up, connection)
            try:
                if not checks:
                    await _fetch(connection, Query("SET SESSION check_constraint_checks = 0", ()))
                await connection.begin()
                result = await adrive(steps, partial(_fetch_all, connection))
                await connection.commit()
                if not checks:
                    await _fetch(connection, Query("SET SESSION check_constraint_checks = 1", ()))
                return result
            except BaseException as error:
                if checks and _number(error) in LET_GO:
                    with suppress(MySQLError):
                        await connection.rollback()
                else:
                    # No rollback: the server may not answer. Not reused: after a failover the server may be
                    # read-only, and a new connection reaches the right one.
                    connection.close()
                raise
            finally:
                timer.cancel()

    async def _open(self) -> Any:
        if self._pool is None:
            _, options = self._url.get_dialect()().create_connect_args(self._url)
            options = {"charset": "utf8mb4", "read_timeout": ANSWER_SECONDS, **options}
            self._patience = float(options["read_timeout"]) + CLOSING_SECONDS
            self._pool = await asyncmy.create_pool(
                **options,
                minsize=0,
                maxsize=self._connections,
                init_command=MARIADB_SESSION if self._mariadb else MYSQL_SESSION,
            )
        return self._pool


def _cancellations() -> int:
    """Return how often the task was cancelled; it may still be cleaning up."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _hang_up(connection: Any) -> None:
    if connection._transport is not None:
        connection._transport.abort()


def _number(error: BaseException) -> Any:
    return error.args[0] if isinstance(error, MySQLError) and error.args else None


_fetch = Driver().execute


async def _fetch_all(connection: Any, queries: Sequence[Query]) -> list[Rows]:
    return [await _fetch(connection, query) for query in queries]
