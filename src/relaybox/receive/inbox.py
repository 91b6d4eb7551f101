"""Mark messages as processed, on the connection or session that does the work (see docs/how-to/inbox.md).

The mark comes first: one INSERT that reports whether it was the first, because a SELECT before it would race.
A second transaction with the same message waits for the first, and does the work if that rolls back. A
database that cannot wait raises its own retryable error. ``database/drivers`` execute the statements.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from functools import cache, partial, wraps
from typing import Any, NamedTuple, TypeAlias, TypeVar

import sqlalchemy as sa

from relaybox.core.event import Event
from relaybox.core.text import id_field, text_field
from relaybox.core.values import Duration, duration_from, parse_name
from relaybox.database.dialects import Dialect
from relaybox.database.drivers.driver import Driver, Names
from relaybox.database.drivers.find import async_channel, async_sqlalchemy, channel, find
from relaybox.database.schema import Tables, make_tables
from relaybox.database.statements.delivery import ParamStyle, Statements
from relaybox.database.statements.inbox import texts
from relaybox.database.steps import Steps
from relaybox.emit.committed import AfterCommit
from relaybox.emit.transaction import Transaction
from relaybox.errors import EmitError, InvalidField, NotInTransaction

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])
Work: TypeAlias = Callable[[Statements], Steps[T]]

ONCE = Names("inbox", "once", "aonce", "once")

PATIENCE = 10.0
"""Seconds for an asynchronous connection, which may hang, to remove a mark."""

ENDED = (
    "the transaction was committed or rolled back inside the block of once, and the mark with it; leave that "
    "to the code that began it, after the block"
)

WINDOW = 7 * 86_400.0
"""Seconds for which marks are kept by default."""

BATCH = 1000


class Key(NamedTuple):
    """The key of a mark: each consumer has its own marks."""

    consumer: str
    message_id: str


def key_of(consumer: Any, message: Any) -> Key:
    """Return the key of an event or a message id; raise ``InvalidField``."""
    if consumer is None:
        raise InvalidField("consumer", None, "pass consumer=, or set it for all calls with Inbox(consumer=…)")
    given = message.id if isinstance(message, Event) else message
    return Key(text_field("consumer", consumer, 100), id_field("message_id", given))


def inbox_statements(tables: Tables, dialect: Dialect, style: ParamStyle) -> Statements:
    """Return the statements of an inbox for one kind of connection."""
    return Statements(tables, dialect, style, texts(dialect.name))


def mark(statements: Statements, key: Key) -> Steps[bool]:
    """Mark the message; return True if this is the first time."""
    if statements.dialect.returning:
        [marked] = yield [statements("mark", **key._asdict())]
        return bool(marked)
    number = secrets.randbits(62) | 1 << 62
    yield [statements("mark", **key._asdict(), number=number)]
    [[[was_there]]] = yield [statements("was_there", number=number)]
    return not was_there


def forget(statements: Statements, key: Key) -> Steps[None]:
    """Remove the mark."""
    yield [statements("forget", consumer=key.consumer, ids=[key.message_id])]


def prune(statements: Statements, window: float) -> Steps[int]:
    """Remove a batch of marks older than ``window`` seconds; return their number."""
    [rows] = yield [statements("old", seconds=-window, limit=BATCH)]
    ids: dict[str, list[str]] = defaultdict(list)
    for consumer, message_id in rows:
        ids[consumer].append(message_id)
    for consumer, of in ids.items():
        yield [statements("forget", consumer=consumer, ids=of)]
    return len(rows)


def note_left(error: BaseException, key: Key, failure: Exception) -> None:
    """Add a note to the error: its transaction must be rolled back, because the mark could not be removed."""
    if isinstance(failure, EmitError):
        return  # the transaction is over, or can only be rolled back
    problem = f"{type(failure).__name__} when the mark was to be taken back"
    error.add_note(f"inbox: {key.consumer!r}, {key.message_id!r}: {problem}; roll the transaction back")


class Inbox:
    """Remembers which messages a consumer has processed, in the transaction that processes them.

    ``consumer`` is the default name under which it remembers, and ``window`` how long. ``relaybox migrate``
    creates the tables of ``schema`` and ``prefix``; or pass existing ``tables``, such as ``outbox.tables``.
    """

    def __init__(
        self,
        *,
        consumer: str | None = None,
        window: Duration = WINDOW,
        schema: str | None = None,
        prefix: str = "",
        tables: Tables | None = None,
    ) -> None:
        self.consumer = None if consumer is None else parse_name(consumer, "consumer")
        self.window = duration_from(1)(window, "window")
        self.tables = tables or make_tables(sa.MetaData(), schema=schema, prefix=prefix)
        self._writer = Writer(self.tables)

    def once(
        self, connection: Any, message_id: Any, *, consumer: str | None = None
    ) -> AbstractContextManager[bool]:
        """Mark a message as processed in the open transaction: ``with inbox.once(…) as first:``.

        ``connection`` is what ``Outbox.emit`` takes; ``message_id`` is text, an integer, a UUID or an
        ``Event``. If ``first`` is False, this consumer has processed the message before: do nothing. If
        another transaction is processing it, this one waits. A block that raises leaves no mark.

        Raises an ``EmitError`` before anything reaches the database, and ``SchemaError`` if the tables are
        missing. Other database errors are not wrapped.
        """
        return self._writer.once(connection, key_of(consumer or self.consumer, message_id))

    def aonce(
        self, connection: Any, message_id: Any, *, consumer: str | None = None
    ) -> AbstractAsyncContextManager[bool]:
        """Like ``once``, on what ``Outbox.aemit`` takes: ``async with inbox.aonce(…) as first:``."""
        return self._writer.aonce(connection, key_of(consumer or self.consumer, message_id))

    def only_once(
        self, *, consumer: str | None = None, id_of: Callable[[Any], Any] | None = None
    ) -> Callable[[Function], Function]:
        """Make a function, sync or async, skip a message that it has processed before and return None.

        It takes a connection, then the message: an ``Event``, an id, or what ``id_of`` turns into one.
        ``consumer`` defaults to ``module.function``; two functions with one name would share the work.
        """

        def decorate(function: Function) -> Function:
            name = parse_name(consumer or f"{function.__module__}.{function.__qualname__}", "consumer")
            return self._decorated(function, name, id_of or (lambda message: message))

        return decorate

    def _decorated(self, function: Function, name: str, id_of: Callable[[Any], Any]) -> Function:
        @wraps(function)
        def synchronous(connection: Any, message: Any, *args: Any, **options: Any) -> Any:
            with self.once(connection, id_of(message), consumer=name) as first:
                return function(connection, message, *args, **options) if first else None

        @wraps(function)
        async def asynchronous(connection: Any, message: Any, *args: Any, **options: Any) -> Any:
            async with self.aonce(connection, id_of(message), consumer=name) as first:
                return await function(connection, message, *args, **options) if first else None

        return asynchronous if inspect.iscoroutinefunction(function) else synchronous  # type: ignore[return-value]

    def mark(self, connection: Any, message_id: Any, *, consumer: str | None = None) -> bool:
        """Like ``once`` without a block, for callers that roll back if the work fails."""
        key = key_of(consumer or self.consumer, message_id)
        return self._writer.write(connection, partial(mark, key=key))

    async def amark(self, connection: Any, message_id: Any, *, consumer: str | None = None) -> bool:
        """Like ``mark``, for asynchronous connections and sessions."""
        key = key_of(consumer or self.consumer, message_id)
        return await self._writer.awrite(connection, partial(mark, key=key))

    def prune(self, connection: Any) -> int:
        """Remove the marks older than the window, in one transaction for each batch; return their number."""
        total, removed = 0, BATCH
        while removed == BATCH:
            with self.transaction(connection):
                removed = self._writer.write(connection, partial(prune, window=self.window))
            total += removed
        return total

    async def aprune(self, connection: Any) -> int:
        """Like ``prune``, for asynchronous connections and sessions."""
        total, removed = 0, BATCH
        while removed == BATCH:
            async with self.transaction(connection):
                removed = await self._writer.awrite(connection, partial(prune, window=self.window))
            total += removed
        return total

    def transaction(self, connection: Any) -> Transaction:
        """Return a block that is a transaction, or a savepoint in an open one."""
        return Transaction(connection, self._writer.insert, AfterCommit())


class Writer:
    """Writes to the table of one inbox."""

    def __init__(self, tables: Tables) -> None:
        self.insert = tables.inbox.insert()
        # Not a method: the cache would keep this object alive until the garbage collector runs.
        self._statements = cache(partial(_statements_of, tables))

    def write(self, connection: Any, work: Work[T]) -> T:
        """Write on a synchronous connection or session; raise ``EmitError`` if it cannot be used."""
        # Do not flush the session: the mark decides whether there is any work to do.
        way = channel(connection, self.insert, ONCE, flush=False)
        way.check(autocommit=False)
        return way.run(work(self._statements(way.driver)))

    async def awrite(self, connection: Any, work: Work[T]) -> T:
        """Like ``write``, for asynchronous connections and sessions."""
        if (asynchronous := async_sqlalchemy(connection, ONCE)) is not None:
            written: T = await asynchronous.run_sync(self.write, work)
            return written
        way = async_channel(connection, ONCE)
        way.check(autocommit=False)
        return await way.arun(work(self._statements(way.driver)))

    @contextmanager
    def once(self, connection: Any, key: Key) -> Iterator[bool]:
        """Mark, and remove the mark if the block raises, for callers that then commit.

        A savepoint would also cost where nothing raises.
        """
        first = self.write(connection, partial(mark, key=key))
        began = self._open_on(connection) if first else None
        try:
            yield first
        except BaseException as error:
            if first and self._is_open(connection, began, key, error):
                try:
                    self.write(connection, partial(forget, key=key))
                except Exception as failure:
                    note_left(error, key, failure)
            raise
        if first:
            self._is_open(connection, began, key)

    @asynccontextmanager
    async def aonce(self, connection: Any, key: Key) -> AsyncIterator[bool]:
        """Like ``once``, for asynchronous connections and sessions."""
        first = await self.awrite(connection, partial(mark, key=key))
        began = self._open_on(connection) if first else None
        try:
            yield first
        except BaseException as error:
            if first and self._is_open(connection, began, key, error):
                try:
                    # Also after a cancellation: a time limit inside the transaction may catch it.
                    async with asyncio.timeout(PATIENCE):
                        await self.awrite(connection, partial(forget, key=key))
                except Exception as failure:
                    note_left(error, key, failure)
            raise
        if first:
            self._is_open(connection, began, key)

    def _is_open(
        self, connection: Any, began: object | None, key: Key, error: BaseException | None = None
    ) -> bool:
        """True if the transaction in which the block began is open; raise, or add a note to ``error``."""
        if self._open_on(connection) is began:
            return True
        problem = f"inbox: {key.consumer!r}, {key.message_id!r}: {ENDED}"
        if error is None:
            raise NotInTransaction(problem)
        error.add_note(problem)
        return False

    def _open_on(self, connection: Any) -> object | None:
        """Return what identifies the open transaction, or None; for a raw connection it is its driver."""
        kind, driver = find(connection, ONCE)
        if driver is not None:
            return driver if not driver.is_closed(connection) and driver.is_open(connection) else None
        beneath = connection() if "scoped" in kind else connection
        beneath = getattr(beneath, "sync_session", None) or getattr(beneath, "sync_connection", beneath)
        return None if beneath is None else beneath.get_transaction()


def _statements_of(tables: Tables, driver: Driver) -> Statements:
    return inbox_statements(tables, driver.dialect, driver.style)
