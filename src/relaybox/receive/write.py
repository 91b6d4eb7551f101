"""Marks on any connection or session that ``emit`` knows, in the transaction that is open there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from relaybox.database.drivers.driver import Channel, Driver, Names
from relaybox.database.drivers.find import async_channel, async_sqlalchemy, channel, find
from relaybox.database.schema import Tables
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.emit.committed import Blocks
from relaybox.emit.transaction import Transaction
from relaybox.receive.mark import inbox_statements

T = TypeVar("T")
Work: TypeAlias = Callable[[Statements], Steps[T]]

ONCE = Names("inbox", "once", "aonce", "once")


class Writer:
    """Executes what is to be written to one inbox's table."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._insert = tables.inbox.insert()
        self._statements: dict[Driver, Statements] = {}

    def write(self, connection: Any, work: Work[T]) -> T:
        """Through a synchronous connection or session; raises an ``EmitError`` where it may not be used."""
        # A session is not flushed: the mark decides whether there is anything to do.
        way = channel(connection, self._insert, ONCE, flush=False)
        return way.run(self._writing(way, work))

    async def awrite(self, connection: Any, work: Work[T]) -> T:
        """``write``, for asynchronous connections and sessions."""
        if (asynchronous := async_sqlalchemy(connection, ONCE)) is not None:
            written: T = await asynchronous.run_sync(self.write, work)
            return written
        way = async_channel(connection, ONCE)
        return await way.arun(self._writing(way, work))

    def open_on(self, connection: Any) -> object | None:
        """What tells the transaction that is open there from the next one; None where none is open.

        Of a driver's own connection no more is known than that one is open.
        """
        kind, driver = find(connection, ONCE)
        if driver is not None:
            return driver if not driver.is_closed(connection) and driver.is_open(connection) else None
        beneath = connection() if "scoped" in kind else connection
        beneath = getattr(beneath, "sync_session", None) or getattr(beneath, "sync_connection", beneath)
        return None if beneath is None else beneath.get_transaction()

    def transaction(self, connection: Any) -> Transaction:
        """A block that is a transaction, or a savepoint where one is open already."""
        return Transaction(connection, self._insert, Blocks(), None)

    def _writing(self, way: Channel, work: Work[T]) -> Steps[T]:
        way.check(autocommit=False)
        driver = way.driver
        statements = self._statements.get(driver)
        if statements is None:
            made = inbox_statements(self._tables, driver.dialect, driver.style)
            statements = self._statements.setdefault(driver, made)
        return work(statements)
