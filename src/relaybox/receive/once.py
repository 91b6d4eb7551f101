"""``inbox.once`` and ``inbox.aonce``: blocks that say whether this is the first time."""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType
from typing import Any

from relaybox.errors import EmitError, NotInTransaction
from relaybox.receive.key import Key
from relaybox.receive.mark import forget, mark
from relaybox.receive.write import Writer

PATIENCE = 10.0
"""Seconds that an asynchronous connection has to take a mark back: it may be one that hangs."""


ENDED = (
    "the transaction was committed or rolled back inside the block of once, and the mark with it; leave that "
    "to whoever began it, after the block"
)


class _Block:
    """What both kinds know: the mark, and the transaction that it was set in."""

    __slots__ = ("_connection", "_first", "_key", "_transaction", "_writer")

    def __init__(self, writer: Writer, connection: Any, key: Key) -> None:
        self._writer = writer
        self._connection = connection
        self._key = key
        self._first = False
        self._transaction: object | None = None

    def _began(self, first: bool) -> bool:
        self._first = first
        if first:
            self._transaction = self._writer.open_on(self._connection)
        return first

    def _is_over(self, error: BaseException | None) -> bool:
        """Whether nothing is left to do; raises where the block did not end in its transaction."""
        if not self._first:
            return True
        if self._writer.open_on(self._connection) is not self._transaction:
            if error is None:
                raise NotInTransaction(f"inbox: {self._key.consumer!r}, {self._key.message_id!r}: {ENDED}")
            error.add_note(f"inbox: {self._key.consumer!r}, {self._key.message_id!r}: {ENDED}")
            return True
        return error is None


class Once(_Block):
    """A block that begins with the mark. If it raises, the mark is taken back.

    Whoever rolls the transaction back needs none of that. It is for those who catch the exception and commit,
    and costs nothing where nothing is raised, as a savepoint would.
    """

    __slots__ = ()

    def __enter__(self) -> bool:
        return self._began(self._writer.write(self._connection, partial(mark, key=self._key)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_over(error) or error is None:
            return
        try:
            self._writer.write(self._connection, partial(forget, key=self._key))
        except EmitError:
            # The transaction can only be rolled back, or is over.
            return
        except Exception as failure:
            note_left(error, self._key, failure)


class AsyncOnce(_Block):
    """``Once``, on an asynchronous connection or session."""

    __slots__ = ()

    async def __aenter__(self) -> bool:
        return self._began(await self._writer.awrite(self._connection, partial(mark, key=self._key)))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_over(error) or error is None:
            return
        try:
            # Also where it is a cancellation: a time limit inside the transaction may be what catches that.
            async with asyncio.timeout(PATIENCE):
                await self._writer.awrite(self._connection, partial(forget, key=self._key))
        except EmitError:
            return
        except Exception as failure:
            note_left(error, self._key, failure)


def note_left(error: BaseException, key: Key, failure: Exception) -> None:
    """Say with the error that its transaction must not be committed."""
    problem = f"{type(failure).__name__} when the mark was to be taken back"
    error.add_note(f"inbox: {key.consumer!r}, {key.message_id!r}: {problem}; roll the transaction back")
