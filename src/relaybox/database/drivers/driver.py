"""The interface of a database driver for ``emit``, and the checks before a write."""

from __future__ import annotations

from collections.abc import Awaitable, Hashable
from inspect import iscoroutinefunction
from typing import Any, NamedTuple, Protocol, TypeVar

from relaybox.database.dialects import Dialect, missing_tables
from relaybox.database.statements.delivery import ParamStyle, Query
from relaybox.database.steps import Rows, Steps, adrive, drive
from relaybox.errors import ConnectionClosed, NotInTransaction, SchemaError, TransactionFailed

T = TypeVar("T")

_FAILED_TRANSACTION = "25P02"


class Driver(Hashable, Protocol):
    """One kind of connection. Its checks avoid a round trip where possible."""

    name: str
    dialect: Dialect
    style: ParamStyle

    def is_closed(self, connection: Any) -> bool:
        """True if the connection is closed."""

    def is_failed(self, connection: Any) -> bool:
        """True if the open transaction can only be rolled back; False if the driver cannot know."""

    def is_open(self, connection: Any) -> bool:
        """True if a transaction is open."""

    def begins(self, connection: Any) -> bool:
        """True if the connection begins a transaction automatically before an INSERT."""

    def execute(self, connection: Any, query: Query) -> Rows | Awaitable[Rows]:
        """Execute one statement and return its rows as sequences, whatever the row factory."""


class Names(NamedTuple):
    """The names that errors use for the call, its counterparts, and the alternative."""

    owner: str
    sync: str
    asynchronous: str
    django: str
    otherwise: str = ""


EMIT = Names(
    "outbox", "emit", "aemit", "emit_event", ", or pass autocommit=True to emit if that is what you want"
)


class Channel:
    """A connection and its driver."""

    __slots__ = ("connection", "driver", "names")

    def __init__(self, driver: Driver, connection: Any, names: Names = EMIT) -> None:
        self.driver = driver
        self.connection = connection
        self.names = names

    def check(self, autocommit: bool) -> bool:
        """Raise if the connection cannot be written to; return True if each write commits by itself."""
        driver, connection = self.driver, self.connection
        check_usable(driver, connection)
        if driver.begins(connection) or driver.is_open(connection):
            return False
        if not autocommit:
            raise not_in_transaction(driver, self.names)
        return True

    def execute(self, query: Query) -> Any:
        """Execute one statement and return its rows, or an awaitable of them for an asynchronous driver."""
        return self.driver.execute(self.connection, query)

    def run(self, steps: Steps[T]) -> T:
        """Drive the steps in the connection's open transaction."""
        return drive(steps, self._execute_all)

    async def arun(self, steps: Steps[T]) -> T:
        """Drive the steps on an asynchronous connection."""
        return await adrive(steps, self._aexecute_all)

    def _execute_all(self, queries: list[Query]) -> list[Rows]:
        try:
            return [self.execute(query) for query in queries]
        except BaseException as error:
            raise translated(error)  # noqa: B904

    async def _aexecute_all(self, queries: list[Query]) -> list[Rows]:
        try:
            return [await self.execute(query) for query in queries]
        except BaseException as error:
            raise translated(error)  # noqa: B904


def check_usable(driver: Driver, connection: Any, over: str = "") -> None:
    """Raise if the connection is closed, or its transaction can only be rolled back."""
    if driver.is_closed(connection):
        raise closed(f"{over}{driver.name}")
    if driver.is_failed(connection):
        raise failed(f"{over}{driver.name}")


def closed(name: str) -> ConnectionClosed:
    """Return the error for a closed connection."""
    return ConnectionClosed(f"the {name} connection is closed; open a new one")


def not_in_transaction(driver: Driver, names: Names) -> NotInTransaction:
    """Return the error for an INSERT that would commit by itself."""
    block = "async with" if iscoroutinefunction(driver.execute) else "with"
    return NotInTransaction(
        f"the {driver.name} connection is in autocommit and no transaction is open: what this call"
        " writes would be committed without the change it belongs to; put the change and this call into"
        f" `{block} {names.owner}.transaction(connection):`{names.otherwise}"
    )


def translated(error: BaseException) -> BaseException:
    """Return our error if there is one, else the driver's, which callers know how to retry."""
    beneath: Any = getattr(error, "orig", None) or error
    if _FAILED_TRANSACTION in (getattr(beneath, "sqlstate", None), getattr(beneath, "pgcode", None)):
        return _caused(failed("PostgreSQL"), error)
    if missing := missing_tables(beneath):
        return _caused(SchemaError(missing), error)
    return error


def failed(name: str) -> TransactionFailed:
    """Return the error for a transaction that can only be rolled back."""
    return TransactionFailed(
        f"an earlier statement failed, so the {name} transaction can only be rolled back;"
        " roll it back and begin again"
    )


def _caused(ours: Exception, error: BaseException) -> Exception:
    ours.__cause__ = error
    return ours
