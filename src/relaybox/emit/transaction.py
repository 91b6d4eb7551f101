"""Open transaction blocks on every kind of connection and session that ``emit`` accepts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from types import TracebackType
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from relaybox.database.drivers.driver import Driver, check_usable
from relaybox.database.drivers.find import async_channel, async_sqlalchemy, channel, find, name_of
from relaybox.database.drivers.sqlalchemy import SqlalchemyChannel, may_autocommit
from relaybox.database.transactions import TRANSACTION, Block, savepoint
from relaybox.emit.committed import AfterCommit
from relaybox.errors import UnsupportedConnection


class Transaction:
    """A block that commits at its end, and rolls back if it raises; ``with`` or ``async with``.

    The block gets the connection. In an open transaction it is a savepoint, and the code that began the
    transaction must commit it. ``after_commit`` learns when the block begins and ends.
    """

    def __init__(self, connection: Any, insert: sa.Insert, after_commit: AfterCommit) -> None:
        self._connection = connection
        self._insert = insert
        self._after_commit = after_commit
        self._commits = False
        self._emitting = connection
        self._block: Any = None

    def __enter__(self) -> Any:
        self._block, self._commits = _block(self._connection, self._insert)
        self._block.__enter__()
        self._after_commit.enter(self._emitting)
        return self._connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        kept = False
        try:
            swallowed: bool | None = self._block.__exit__(kind, error, trace)
            kept = kind is None
        finally:
            self._after_commit.leave(self._emitting, kept=kept, committed=self._commits)
        return swallowed

    async def __aenter__(self) -> Any:
        self._block, self._commits = await _async_block(self._connection, self._insert)
        await self._block.__aenter__()
        # SQLAlchemy's asynchronous connection emits through the synchronous one inside it.
        self._emitting = getattr(self._connection, "sync_connection", None) or self._connection
        self._after_commit.enter(self._emitting)
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        kept = False
        try:
            swallowed: bool | None = await self._block.__aexit__(kind, error, trace)
            kept = kind is None
        finally:
            self._after_commit.leave(self._emitting, kept=kept, committed=self._commits)
        return swallowed


def _block(connection: Any, insert: sa.Insert) -> tuple[AbstractContextManager[Any], bool]:
    """Return a block, and True if it ends with a commit, not with the release of a savepoint."""
    kind, driver = find(connection)
    if kind in ("connection", "session", "scoped session"):
        connection = connection() if kind == "scoped session" else connection
        begins = not connection.in_transaction()
        return _sqlalchemy_block(connection, insert, begins), begins
    if kind != "driver" or driver is None:
        raise UnsupportedConnection(f"{name_of(type(connection))} is asynchronous: write `async with`")
    check_usable(driver, connection)
    if block := _own_block(driver, connection):
        return block, not driver.is_open(connection)
    words = _words(driver, connection)
    return _words_block(driver, connection, words), words is TRANSACTION


async def _async_block(connection: Any, insert: sa.Insert) -> tuple[AbstractAsyncContextManager[Any], bool]:
    if (asynchronous := async_sqlalchemy(connection)) is not None:
        begins = not asynchronous.in_transaction()
        return _async_sqlalchemy_block(asynchronous, insert, begins), begins
    if find(connection).kind != "async driver":
        raise UnsupportedConnection(f"{name_of(type(connection))} is synchronous: write `with`")
    driver = async_channel(connection).driver
    check_usable(driver, connection)
    if block := _own_block(driver, connection):
        return block, not driver.is_open(connection)
    if refresh := getattr(driver, "refresh", None):
        await refresh(connection)
    words = _words(driver, connection)
    return _async_words_block(driver, connection, words), words is TRANSACTION


def _own_block(driver: Driver, connection: Any) -> Any:
    make = getattr(driver, "transaction", None)
    return make(connection) if make else None


@contextmanager
def _sqlalchemy_block(connection: Any, insert: sa.Insert, begins: bool) -> Iterator[None]:
    if begins:
        with connection.begin():
            # Check after begin(), because an event of the engine may send the BEGIN.
            _check_begun(connection, insert, under_way=False)
            yield
    else:
        # Check before the savepoint, which some databases refuse in autocommit with their own error.
        _check_begun(connection, insert, under_way=True)
        with connection.begin_nested():
            yield


@asynccontextmanager
async def _async_sqlalchemy_block(connection: Any, insert: sa.Insert, begins: bool) -> AsyncIterator[None]:
    if begins:
        async with connection.begin():
            await connection.run_sync(_check_begun, insert, under_way=False)
            yield
    else:
        await connection.run_sync(_check_begun, insert, under_way=True)
        async with connection.begin_nested():
            yield


def _check_begun(connection: Any, insert: sa.Insert, *, under_way: bool) -> None:
    if isinstance(connection, Session) and not may_autocommit(connection, insert, under_way):
        return
    way = channel(connection, insert)
    assert isinstance(way, SqlalchemyChannel)
    way.check_begun()


@contextmanager
def _words_block(driver: Any, connection: Any, words: Block) -> Iterator[None]:
    control = getattr(driver, "control", driver.execute)
    try:
        # Inside the try: an interrupted BEGIN may have run nevertheless.
        control(connection, words.begin)
        yield
        control(connection, words.commit)
    except BaseException:
        # A broken connection has rolled back already; the first error is the one to show.
        with suppress(Exception):
            control(connection, words.rollback)
        raise


@asynccontextmanager
async def _async_words_block(driver: Any, connection: Any, words: Block) -> AsyncIterator[None]:
    try:
        await driver.execute(connection, words.begin)
        yield
        await driver.execute(connection, words.commit)
    except BaseException:
        with suppress(Exception):
            await driver.execute(connection, words.rollback)
        raise


def _words(driver: Driver, connection: Any) -> Block:
    if getattr(connection, "autocommit", None) is False and driver.dialect.name == "sqlite":
        fix = "commit and roll it back yourself, or leave autocommit out of sqlite3.connect"
        raise UnsupportedConnection(f"sqlite3 with autocommit=False is always in a transaction; {fix}")
    return savepoint() if driver.is_open(connection) else TRANSACTION
