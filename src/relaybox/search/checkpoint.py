"""How far a backfill is: a row of ``outbox_operation``, written in the transaction of every page.

Of two that begin at once, or where one comes back that was taken for dead, only one goes on: they take the
operation under the lock of the destination's row, and every page looks whether it is still its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from relaybox.database.statements.delivery import Statements
from relaybox.database.statements.journal import backfill_texts
from relaybox.database.steps import Steps
from relaybox.errors import ConfigError, NoTables, StoreError
from relaybox.relay.process import died, this_process
from relaybox.stores.journal import STALLED, OperationState
from relaybox.stores.sql.store import SqlStore

T = TypeVar("T")

ACTION = "backfill"
MARK = "relaybox-backfill"
"""The header of an event that a backfill emitted."""

TRIES = 4
PAUSE = 0.5
"""Seconds after the first of several failures of the database, and twice as many after each other."""

LOOKED_AT = 1_000
"""Operations among which an earlier backfill is looked for."""


class Lost(ConfigError):
    """The backfill is no longer this process's: another one has taken it up."""


class Cancelled(Lost):
    """Somebody has cancelled it."""


@dataclass(frozen=True, slots=True)
class Position:
    """Whose backfill it is, and how far it has come. ``since``: when it began, as the database has it."""

    id: UUID
    details: Mapping[str, Any]
    done: int = 0
    skipped: int = 0
    resumed: bool = False
    since: Any = field(default=None, compare=False)

    @property
    def key(self) -> Any:
        """What the next page starts after."""
        return self.details.get("key")


class Checkpoint:
    """The operation of one backfill, on the outbox's own database."""

    def __init__(self, store: SqlStore, destination: str, source: str, index: str | None, actor: str) -> None:
        self._driver = store.driver
        self._own = store.steps.statements
        self._notes = notes_of(self._own)
        self._identity = {"destination": destination, "source": source, "index": index}
        self._actor = actor
        self._process = this_process().name

    async def take(self, total: int | None, *, resume: bool) -> Position:
        """Take over a backfill that was interrupted, else begin a new one: the position to go on from.

        Raises ``ConfigError`` where another process is at it.
        """
        return await self._persistently(lambda: self._take(total, resume))

    async def earlier(self) -> Position | None:
        """The position that one which goes on would take; raises ``ConfigError`` as ``take`` does."""
        return await self._persistently(self._earlier)

    def advance(self, statements: Statements, position: Position) -> Steps[None]:
        """In the transaction of a page: how far it is with that; raises ``Lost``."""
        notes = notes_of(statements)
        own = statements.dialect.to_uuid(position.id)
        [rows] = yield [notes("held", id=own)]
        self._check(rows)
        words = {"details": _text(position.details), "done": position.done, "skipped": position.skipped}
        yield [notes("advance", id=own, **words)]

    def changed(
        self, statements: Statements, position: Position, aggregate_type: str, ids: Sequence[str]
    ) -> Steps[set[str]]:
        """Those of the ids that the application has emitted an event of since the backfill began."""
        words = {"aggregate_type": aggregate_type, "ids": list(ids), "since": position.since}
        [rows] = yield [notes_of(statements)("changed", **words)]
        return {str(id_) for id_, headers in rows if MARK not in headers}

    async def look(self, position: Position) -> Position:
        """Give a sign of life; how far it is on record; raises ``Lost``."""
        return await self._driver.run(lambda: self._look(position))

    async def end(self, position: Position, state: OperationState, error: str | None = None) -> None:
        """Put on record how it ended, if it is this process's still."""
        await self._persistently(lambda: self._end(position, state, error))

    async def pending(self, destination: str, limit: int) -> int:
        """How many deliveries wait there, no more than ``limit``."""

        def steps() -> Steps[int]:
            [[[count]]] = yield [self._notes("pending", destination=destination, limit=limit)]
            return int(count)

        return await self._driver.run(steps)

    async def _persistently(self, begin: Callable[[], Steps[T]]) -> T:
        """Where the database refuses, try some more times; done twice, it is as done once."""
        for attempt in range(TRIES - 1):
            try:
                return await self._driver.run(begin)
            except NoTables:
                raise
            except StoreError:
                await asyncio.sleep(PAUSE * 2**attempt)
        return await self._driver.run(begin)

    def _take(self, total: int | None, resume: bool) -> Steps[Position]:
        name = self._identity["destination"]
        yield [self._own("ensure_destination", destination=name)]
        yield [self._notes("lock_destination", destination=name)]
        last = yield from self._last()
        if last is not None:
            # Once more, and locked: a page of whoever is at it may be about to commit.
            [held] = yield [self._notes("held", id=last[0])]
            last = next(iter(held), None)
        if last is not None and self._is_alive(last):
            raise ConfigError(self._busy(last))
        if last is not None and resume and last[1] != "done":
            before = self._position(last)
            position = replace(before, details={**before.details, "process": self._process}, resumed=True)
            words = {"details": _text(position.details), "total": total, "actor": self._actor}
            yield [self._notes("take_over", id=last[0], **words)]
            return position
        if last is not None and last[1] == "running":
            yield [self._notes("end", id=last[0], state="cancelled", error="another one was begun instead")]
        return (yield from self._begin(total))

    def _earlier(self) -> Steps[Position | None]:
        last = yield from self._last()
        if last is not None and self._is_alive(last):
            raise ConfigError(self._busy(last))
        return None if last is None or last[1] == "done" else self._position(last)

    def _last(self) -> Steps[Sequence[Any] | None]:
        """The newest backfill of the same source, destination and index."""
        [rows] = yield [self._notes("backfills", action=ACTION, limit=LOOKED_AT)]
        return next((row for row in rows if self._is_same(_document(row[2]))), None)

    def _begin(self, total: int | None) -> Steps[Position]:
        details = {**self._identity, "key": None, "process": self._process}
        id_ = uuid7()
        own = self._own.dialect.to_uuid(id_)
        words = {"action": ACTION, "actor": self._actor, "details": _text(details), "total": total}
        yield [self._notes("begin", id=own, **words)]
        [[row]] = yield [self._notes("held", id=own)]
        return self._position(row)

    def _look(self, position: Position) -> Steps[Position]:
        own = self._own.dialect.to_uuid(position.id)
        [rows] = yield [self._notes("held", id=own)]
        self._check(rows)
        yield [self._notes("live", id=own)]
        return replace(self._position(rows[0]), resumed=position.resumed)

    def _end(self, position: Position, state: OperationState, error: str | None) -> Steps[None]:
        own = self._own.dialect.to_uuid(position.id)
        [rows] = yield [self._notes("held", id=own)]
        if rows and rows[0][1] in ("running", "cancelled") and self._is_ours(rows[0]):
            ended = state if rows[0][1] == "running" else "cancelled"
            yield [self._notes("end", id=own, state=ended, error=error)]

    def _position(self, row: Sequence[Any]) -> Position:
        id_, _, details, done, skipped, since, *_ = row
        return Position(self._own.dialect.from_uuid(id_), _document(details), done, skipped, since=since)

    def _check(self, rows: Sequence[Sequence[Any]]) -> None:
        if not rows or not self._is_ours(rows[0]):
            raise Lost("another process has taken the backfill up, and goes on with it")
        if rows[0][1] != "running":
            raise Cancelled("the backfill was cancelled")

    def _is_ours(self, row: Sequence[Any]) -> bool:
        return _document(row[2]).get("process") == self._process

    def _is_same(self, details: Mapping[str, Any]) -> bool:
        return all(details.get(name) == value for name, value in self._identity.items())

    def _is_alive(self, row: Sequence[Any]) -> bool:
        from_time = self._own.dialect.from_time
        silent = (from_time(row[7]) - from_time(row[6])).total_seconds()
        process = str(_document(row[2]).get("process"))
        # Our own: taken by a commit whose answer was lost.
        others = process != self._process and not died(process)
        return row[1] == "running" and silent <= STALLED and others

    def _busy(self, row: Sequence[Any]) -> str:
        process = _document(row[2]).get("process")
        what = f"a backfill of {self._identity['source']!r} to {self._identity['destination']!r} is running"
        id_ = self._own.dialect.from_uuid(row[0])
        return f"{what} (operation {id_}, process {process}); wait for its end, or cancel it"


@lru_cache(maxsize=16)
def notes_of(statements: Statements) -> Statements:
    """The statements of this module, for the same tables, database and driver."""
    return statements.others(backfill_texts(statements.dialect.name))


def _text(details: Mapping[str, Any]) -> str:
    return msgspec.json.encode(details).decode()


def _document(value: Any) -> dict[str, Any]:
    """A JSON object, as the driver gives it."""
    found = json.loads(value) if isinstance(value, str | bytes) else value
    return dict(found) if isinstance(found, Mapping) else {}
