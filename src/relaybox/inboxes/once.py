"""``inbox.once`` and ``inbox.aonce``: blocks that say whether this is the first time."""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType
from typing import Any

from relaybox.errors import EmitError
from relaybox.inbox import Key
from relaybox.inboxes.mark import forget, mark
from relaybox.inboxes.write import Writer

PATIENCE = 10.0
"""Seconds that an asynchronous connection has to take a mark back: it may be one that hangs."""


class Once:
    """A block that begins with the mark. If it raises, the mark is taken back.

    Whoever rolls the transaction back needs none of that. It is for those who catch the exception and commit,
    and costs nothing where nothing is raised, as a savepoint would.
    """

    __slots__ = ("_connection", "_first", "_key", "_writer")

    def __init__(self, writer: Writer, connection: Any, key: Key) -> None:
        self._writer = writer
        self._connection = connection
        self._key = key
        self._first = False

    def __enter__(self) -> bool:
        self._first = self._writer.write(self._connection, partial(mark, key=self._key))
        return self._first

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not self._first:
            return
        try:
            self._writer.write(self._connection, partial(forget, key=self._key))
        except EmitError:
            # The transaction can only be rolled back, or is over.
            return
        except Exception as failure:
            note_left(error, self._key, failure)


class AsyncOnce:
    """``Once``, on an asynchronous connection or session."""

    __slots__ = ("_connection", "_first", "_key", "_writer")

    def __init__(self, writer: Writer, connection: Any, key: Key) -> None:
        self._writer = writer
        self._connection = connection
        self._key = key
        self._first = False

    async def __aenter__(self) -> bool:
        self._first = await self._writer.awrite(self._connection, partial(mark, key=self._key))
        return self._first

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not self._first:
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
