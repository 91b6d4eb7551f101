"""SQLAlchemy connections and sessions over any supported driver; asynchronous ones use ``run_sync``."""

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
    """A SQLAlchemy connection, and the session it came from.

    The session is flushed right before the first statement. The aggregate must be locked before ``position``
    is assigned, and a refused event must not write anything.
    """

    __slots__ = ("_flushed", "session")

    def __init__(
        self, driver: Driver, connection: sa.Connection, session: Session | None = None, names: Names = EMIT
    ) -> None:
        super().__init__(driver, connection, names)
        self.session = session
        self._flushed = session is None

    def check(self, autocommit: bool) -> bool:
        """Raise if the connection cannot be written to; return True if writes commit on their own."""
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
        """Raise if the database has no transaction although SQLAlchemy began one."""
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
        """True if a transaction is open, or opens on ``begin()``: engine events may begin one."""
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
            # asyncpg never begins on its own; SQLAlchemy begins before the first statement.
            adapted: Any = self.connection.connection.dbapi_connection
            return not adapted.autocommit
        return self.driver.begins(raw)


def may_autocommit(session: Session, insert: sa.Insert, under_way: bool) -> bool:
    """True if the session may be in autocommit, as far as its bind shows.

    Taking a connection would keep the caller from setting its options. If ``under_way``, it may have done so.
    """
    try:
        bind = session.get_bind(clause=insert)
    except UnboundExecutionError:
        return False
    level = bind.get_execution_options().get("isolation_level") or bind.dialect._on_connect_isolation_level
    return under_way or level == "AUTOCOMMIT"


def flush(session: Session) -> None:
    """Flush the session, unless a flush is running."""
    if not session._flushing:
        session.flush()


def connection_of(session: Session, insert: sa.Insert) -> sa.Connection:
    """Return the session's connection for ``insert``, and begin its transaction.

    With several binds it uses that of the table (``binds={outbox.tables.event: engine}``), else ``bind``. To
    choose one, pass ``session.connection(bind_arguments=...)`` to ``emit`` instead.
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
    """Return the driver's connection."""
    if connection.closed:
        raise closed("SQLAlchemy")
    try:
        return connection.connection.driver_connection
    except PendingRollbackError as error:
        raise failed("SQLAlchemy") from error
    except ResourceClosedError as error:
        raise closed("SQLAlchemy") from error


def _in_autocommit(driver: Driver, otherwise: str = "") -> NotInTransaction:
    """Return the error for autocommit: only another isolation level helps, not ``begin()``."""
    level = "SERIALIZABLE" if driver.dialect.name == "sqlite" else "READ COMMITTED"
    option = f'execution_options(isolation_level="{level}")'
    call = "await connection" if iscoroutinefunction(driver.execute) else "connection"
    return NotInTransaction(
        f"the SQLAlchemy {driver.name} connection has the isolation level AUTOCOMMIT, in which begin() begins"
        " no transaction: what this call writes would be committed without the change it belongs to;"
        f" call {call}.{option} before it begins, or make the session or connection of engine.{option}"
        f"{otherwise}"
    )


def _ended(error: InvalidRequestError) -> Exception:
    """Translate the error of a closed session, or of a transaction that ended inside its block."""
    if "permanently closed" in str(error):
        return closed("SQLAlchemy session's")
    return failed("SQLAlchemy") if "closed transaction inside" in str(error) else error


def _is_inactive(connection: sa.Connection) -> bool:
    """True if the transaction ended, or its savepoint failed, inside a block that is still open."""
    nested, root = connection.get_nested_transaction(), connection.get_transaction()
    return bool((root and not root.is_active) or (nested and not nested.is_active))
