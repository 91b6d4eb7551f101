"""The inbox in an SQL database: ``inbox_message``, on whatever connection or session the work is done."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypeVar

import sqlalchemy as sa

from relaybox.core.values import Duration, duration_from, parse_name
from relaybox.database.schema import Tables, make_tables
from relaybox.emit.transaction import Transaction
from relaybox.receive.key import WINDOW, key_of
from relaybox.receive.mark import BATCH, mark, prune
from relaybox.receive.once import AsyncOnce, Once
from relaybox.receive.write import Work, Writer

Function = TypeVar("Function", bound=Callable[..., Any])


class Inbox:
    """Remembers which messages were processed, in the transaction that processes them.

    ``consumer`` is the name under which it remembers, where a call gives none. ``window`` is how long it
    does. ``schema`` and ``prefix`` are those of the tables, which ``relaybox migrate`` makes; ``tables`` are
    some that exist already, such as ``outbox.tables``.
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

        ``connection`` is what ``Outbox.emit`` takes, ``message_id`` text, an integer or a UUID, or the
        ``Event`` whose id it is. ``first`` is False where this consumer has processed the message before; do
        nothing then. Where another transaction is processing it, this one waits for it to end. A block that
        raises leaves no mark.

        Raises an ``EmitError`` before anything reaches the database: ``InvalidField``,
        ``UnsupportedConnection``, ``NotInTransaction``, ``TransactionFailed`` or ``ConnectionClosed``.
        ``SchemaError`` where the tables are missing; other errors of the database arrive as they are.
        """
        return Once(self._writer, connection, key_of(consumer or self.consumer, message_id))

    def aonce(
        self, connection: Any, message_id: Any, *, consumer: str | None = None
    ) -> AbstractAsyncContextManager[bool]:
        """``once`` on what ``Outbox.aemit`` takes: ``async with inbox.aonce(…) as first:``."""
        return AsyncOnce(self._writer, connection, key_of(consumer or self.consumer, message_id))

    def only_once(
        self, *, consumer: str | None = None, id_of: Callable[[Any], Any] | None = None
    ) -> Callable[[Function], Function]:
        """Make a function do nothing, and return None, for a message that it has processed before.

        Its first argument is the connection or session, its second the message; it may be asynchronous. A
        message is an ``Event`` or an id, or ``id_of`` says which it has. ``consumer`` is ``module.function``
        unless it is given: two functions that shared a name would each do half of the work.
        """

        def decorate(function: Function) -> Function:
            name = parse_name(consumer or f"{function.__module__}.{function.__qualname__}", "consumer")
            return self._decorated(function, name, id_of or _itself)

        return decorate

    def _decorated(self, function: Function, name: str, id_of: Callable[[Any], Any]) -> Function:
        @functools.wraps(function)
        def synchronous(connection: Any, message: Any, *args: Any, **options: Any) -> Any:
            with self.once(connection, id_of(message), consumer=name) as first:
                return function(connection, message, *args, **options) if first else None

        @functools.wraps(function)
        async def asynchronous(connection: Any, message: Any, *args: Any, **options: Any) -> Any:
            async with self.aonce(connection, id_of(message), consumer=name) as first:
                return await function(connection, message, *args, **options) if first else None

        return asynchronous if inspect.iscoroutinefunction(function) else synchronous  # type: ignore[return-value]

    def mark(self, connection: Any, message_id: Any, *, consumer: str | None = None) -> bool:
        """``once`` without a block, for those who roll back themselves when the work fails."""
        key = key_of(consumer or self.consumer, message_id)
        return self._writer.write(connection, functools.partial(mark, key=key))

    async def amark(self, connection: Any, message_id: Any, *, consumer: str | None = None) -> bool:
        """``mark``, for asynchronous connections and sessions."""
        key = key_of(consumer or self.consumer, message_id)
        return await self._writer.awrite(connection, functools.partial(mark, key=key))

    def prune(self, connection: Any) -> int:
        """Remove the marks that are older than the window, batch by batch; how many it were.

        Each batch is a transaction; inside an open one, a savepoint. ``relaybox prune`` and relays do the
        same for the database of their outbox.
        """
        removed = BATCH
        total = 0
        while removed == BATCH:
            with self.transaction(connection):
                removed = self._writer.write(connection, self._old)
            total += removed
        return total

    async def aprune(self, connection: Any) -> int:
        """``prune``, for asynchronous connections and sessions."""
        removed = BATCH
        total = 0
        while removed == BATCH:
            async with self.transaction(connection):
                removed = await self._writer.awrite(connection, self._old)
            total += removed
        return total

    def transaction(self, connection: Any) -> Transaction:
        """A transaction on any connection or session, or a savepoint where one is open already.

        ``with`` on a synchronous one, ``async with`` on an asynchronous one; as ``Outbox.transaction``.
        """
        return self._writer.transaction(connection)

    @property
    def _old(self) -> Work[int]:
        return functools.partial(prune, window=self.window)


def _itself(message: Any) -> Any:
    return message
