"""The store on Django's own connection: the same steps and statements as every other store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from django.db import Error, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.contrib.django.databases import connection_of, dialect_of, driver_error, execute, get_statements
from relaybox.contrib.django.private import is_of_testcase
from relaybox.contrib.django.sync import call
from relaybox.database.dialects import refusal
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Steps, drive
from relaybox.database.transactions import BEGIN_WRITING, TRANSACTION
from relaybox.stores.sql.steps import StoreSteps
from relaybox.stores.sql.store import SqlStore

T = TypeVar("T")

DEADLOCK = 1213
TRIES = 5


def open_store(using: str) -> SqlStore:
    """Return the store in the database of an alias, on the calling thread's connection to it."""
    statements = get_statements(dialect_of(connection_of(using)))
    return SqlStore(StoreSteps(statements), DjangoDriver(using, statements))


def is_busy(connection: BaseDatabaseWrapper) -> bool:
    """True if the application has a transaction open there; that of a ``TestCase`` does not count."""
    blocks = connection.atomic_blocks
    if blocks:
        return not is_of_testcase(blocks[-1])
    connected = connection.connection is not None
    return not (connection.get_autocommit() if connected else connection.settings_dict["AUTOCOMMIT"])


class DjangoDriver:
    """Runs steps on Django's connection, in the thread that entered.

    Each is a transaction of its own; inside a transaction that is open already, a savepoint.
    """

    def __init__(self, using: str, statements: Statements) -> None:
        self._using = using
        self._preamble = statements("pin_plan") if statements.dialect.one_statement else None

    async def run(self, begin: Callable[[], Steps[T]], *, checked: bool = False, lane: str = "") -> T:
        """Drive the steps to their end, again from the start when it was chosen to break a deadlock."""
        try:
            return await call(self._run, begin)
        except Error as error:
            raise refusal(driver_error(error)) from error

    async def close(self) -> None:
        """Do nothing: the connection is Django's."""

    def _run(self, begin: Callable[[], Steps[T]]) -> T:
        connection = connection_of(self._using)
        if connection.in_atomic_block or not connection.get_autocommit():
            with transaction.atomic(using=self._using):
                return self._drive(connection, begin())
        for _ in range(TRIES - 1):
            try:
                return self._transaction(connection, begin())
            except Error as error:
                if driver_error(error).args[:1] != (DEADLOCK,):
                    raise
        return self._transaction(connection, begin())

    def _transaction(self, connection: BaseDatabaseWrapper, steps: Steps[T]) -> T:
        try:
            for statement in BEGIN_WRITING[connection.vendor]:
                execute(connection, Query(statement, ()))
            if self._preamble is not None:
                execute(connection, self._preamble)
            result = self._drive(connection, steps)
            execute(connection, TRANSACTION.commit)
            return result
        except BaseException:
            # A connection that broke has rolled back by closing.
            with suppress(Error):
                execute(connection, TRANSACTION.rollback)
            connection.close_if_unusable_or_obsolete()
            raise

    def _drive(self, connection: BaseDatabaseWrapper, steps: Steps[T]) -> T:
        return drive(steps, lambda queries: [execute(connection, query) for query in queries])
