"""SQLAlchemy: connections and sessions, over any driver that ``emit`` knows.

The asynchronous ones run this same code through their ``run_sync``.
"""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import (
    InvalidRequestError,
    PendingRollbackError,
    ResourceClosedError,
    UnboundExecutionError,
)
from sqlalchemy.orm import Session

from relaybox.database.drivers.driver import EMIT, Channel, Driver, Names, check_usable, closed, failed
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Rows
from relaybox.errors import NotInTransaction


class SqlalchemyChannel(Channel):
    """A SQLAlchemy connection, and the session it was taken from.

    The driver answers for the connection beneath; statements go through SQLAlchemy, which begins the
    transaction, logs, and runs its events. The session is flushed before the first statement, so that the
    aggregate is locked before ``position`` is taken, and not sooner, so that nothing reaches the database
    when the event is refused.
    """

    __slots__ = ("_flushed", "session")

    def __init__(
        self, driver: Driver, connection: sa.Connection, session: Session | None = None, names: Names = EMIT
    ) -> None:
        super().__init__(driver, connection, names)
        self.session = session
        self._flushed = session is None

    def check(self, autocommit: bool) -> bool:
        """Raise unless it can be written to; True where what is written will commit by itself."""
        if _is_inactive(self.connection):
            raise failed("SQLAlchemy")
        driver, raw = self.driver, self.connection.connection.driver_connection
        check_usable(driver, raw, "SQLAlchemy ")
        if self._is_or_gets_open(raw):
            return False
        if not autocommit:
            raise _in_autocommit(driver, self.names.otherwise)
        return True

    def check_begun(self) -> None:
        """Raise where the transaction that SQLAlchemy began is none to the database."""
        raw = self.connection.connection.driver_connection
        if not self._begins(raw) and not self.driver.is_open(raw):
            raise _in_autocommit(self.driver)

    def execute(self, query: Query) -> Rows:
        """Execute one statement through SQLAlchemy."""
        if self.session is not None and not self._flushed:
            self._flushed = True
            flush(self.session)
        try:
            result = self.connection.exec_driver_sql(query.sql, query.params or None)
        except InvalidRequestError as error:
            raise _ended(error) from error
        return result.fetchall() if result.returns_rows else []

    def _is_or_gets_open(self, raw: Any) -> bool:
        """Applications may begin transactions in an event of the engine: try it before refusing."""
        if self._begins(raw) or self.driver.is_open(raw):
            return True
        if self.connection.in_transaction():
            return False
        transaction = self.connection.begin()
        if self.driver.is_open(raw):
            return True
        transaction.rollback()
        return False

    def _begins(self, raw: Any) -> bool:
        if self.driver.name == "asyncpg":
            # The driver itself never does; SQLAlchemy makes it begin before the first statement.
            adapted: Any = self.connection.connection.dbapi_connection
            return not adapted.autocommit
        return self.driver.begins(raw)


def may_autocommit(session: Session, insert: sa.Insert, under_way: bool) -> bool:
    """Whether the session may be in autocommit, said without taking a connection while it has none.

    The first use in a transaction may still set options of its connection, and must find it untaken; in a
    transaction that is under way they may be set already.
    """
    try:
        bind = session.get_bind(clause=insert)
    except UnboundExecutionError:
        return False
    level = bind.get_execution_options().get("isolation_level") or bind.dialect._on_connect_isolation_level
    return under_way or level == "AUTOCOMMIT"


def flush(session: Session) -> None:
    """Flush, unless this is called from within a flush."""
    if not session._flushing:
        session.flush()


def connection_of(session: Session, insert: sa.Insert) -> sa.Connection:
    """The connection on which the session would execute ``insert``; begins the session's transaction.

    A session with several binds takes that of the table (``binds={outbox.tables.event: engine}``), else its
    ``bind``; or give ``emit`` the connection itself, as in ``session.connection(bind_arguments=...)``.
    """
    if not session.is_active:
        raise failed("SQLAlchemy session's")
    try:
        return session.connection(bind_arguments={"clause": insert})
    except PendingRollbackError as error:
        raise failed("SQLAlchemy session's") from error
    except InvalidRequestError as error:
        if not session.in_transaction() and not session.autobegin:
            fix = "call session.begin() first"
            raise NotInTransaction(
                f"the session does not begin by itself (autobegin=False); {fix}"
            ) from error
        raise _ended(error) from error


def driver_connection(connection: sa.Connection) -> Any:
    """The driver's own connection beneath."""
    if connection.closed:
        raise closed("SQLAlchemy")
    try:
        return connection.connection.driver_connection
    except PendingRollbackError as error:
        raise failed("SQLAlchemy") from error
    except ResourceClosedError as error:
        raise closed("SQLAlchemy") from error


def _in_autocommit(driver: Driver, otherwise: str = "") -> NotInTransaction:
    """``begin()`` does not help here, and so neither does a block: only another isolation level does."""
    level = "SERIALIZABLE" if driver.dialect.name == "sqlite" else "READ COMMITTED"
    option = f'execution_options(isolation_level="{level}")'
    call = "await connection" if iscoroutinefunction(driver.execute) else "connection"
    return NotInTransaction(
        f"the SQLAlchemy {driver.name} connection has the isolation level AUTOCOMMIT, in which begin() begins"
        " no transaction, so that what is written would commit apart from the change it belongs to;"
        f" call {call}.{option} before it begins, or make the session or connection of engine.{option}"
        f"{otherwise}"
    )


def _ended(error: InvalidRequestError) -> Exception:
    """Our error for a session that was closed, or for a transaction that ended inside its own block."""
    if "permanently closed" in str(error):
        return closed("SQLAlchemy session's")
    return failed("SQLAlchemy") if "closed transaction inside" in str(error) else error


def _is_inactive(connection: sa.Connection) -> bool:
    """Whether the connection's transaction ended, or its savepoint failed, inside a block that goes on."""
    nested, root = connection.get_nested_transaction(), connection.get_transaction()
    return bool((root and not root.is_active) or (nested and not nested.is_active))
