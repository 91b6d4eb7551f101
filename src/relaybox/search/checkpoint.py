"""Record how far a backfill is, in ``outbox_operation``, in the transaction of every page.

Only one process can run a backfill, even if two start at once or one that seemed dead returns. It takes the
operation under the lock of the destination's row, and every page checks that it still owns the operation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar, TypeVarTuple
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from relaybox.database.statements.delivery import Statements
from relaybox.database.statements.journal import backfill_texts
from relaybox.database.steps import Steps
from relaybox.errors import ConfigError, NoTables, StoreError
from relaybox.operate.runner import is_abandoned
from relaybox.relay.process import this_process
from relaybox.stores.journal import OperationState
from relaybox.stores.sql.store import SqlStore

T = TypeVar("T")
Given = TypeVarTuple("Given")

ACTION = "backfill"
MARK = "relaybox-backfill"
"""The header of an event that a backfill emitted."""

TRIES = 4
PAUSE = 0.5
"""Seconds after the first failure of the database, doubled after each further one."""

LOOKED_AT = 1_000
"""Newest operations that are searched for an earlier backfill."""


class Lost(ConfigError):
    """Another process has taken over the backfill."""


class Cancelled(Lost):
    """The backfill was cancelled."""


@dataclass(frozen=True, slots=True)
class Position:
    """A backfill and how far it is; ``since`` is when it began, as the database stores it."""

    id: UUID
    details: Mapping[str, Any]
    done: int
    skipped: int
    since: Any
    resumed: bool = False

    @property
    def key(self) -> Any:
        """Return the key that the next page starts after."""
        return self.details.get("key")


class Checkpoint:
    """The operation of one backfill, as steps that ``run`` executes in the outbox's database."""

    def __init__(self, store: SqlStore, destination: str, source: str, index: str | None, actor: str) -> None:
        self._driver = store.driver
        self._own = store.steps.statements
        self.dialect = self._own.dialect
        self._notes = notes_of(self._own)
        self._identity = {"destination": destination, "source": source, "index": index}
        self._actor = actor
        self._process = this_process().name

    async def run(self, steps: Callable[[*Given], Steps[T]], *given: *Given, persist: bool = False) -> T:
        """Execute the steps; ``persist`` repeats them if the database fails, so they must be idempotent."""
        begin = partial(steps, *given)
        for attempt in range(TRIES - 1 if persist else 0):
            try:
                return await self._driver.run(begin)
            except NoTables:
                raise
            except StoreError:
                await asyncio.sleep(PAUSE * 2**attempt)
        return await self._driver.run(begin)

    def earlier(self) -> Steps[Position | None]:
        """Return the position that ``take`` would resume. Raise the same errors."""
        last = yield from self._last()
        self._check_idle(last)
        return None if last is None or last[1] == "done" else self._position(last)

    def take(self, total: int | None, resume: bool) -> Steps[Position]:
        """Resume an interrupted backfill, or begin one. Raise ``ConfigError`` if another process runs it."""
        name = self._identity["destination"]
        yield [self._own("ensure_destination", destination=name)]
        yield [self._notes("lock_destination", destination=name)]
        last = yield from self._last()
        if last is not None:
            # Read it again under a lock: its process may be about to commit a page.
            [held] = yield [self._notes("held", id=last[0])]
            last = next(iter(held), None)
        self._check_idle(last)
        if last is not None and resume and last[1] != "done":
            before = self._position(last)
            position = replace(before, details={**before.details, "process": self._process}, resumed=True)
            words = {"details": _text(position.details), "total": total, "actor": self._actor}
            yield [self._notes("take_over", id=last[0], **words)]
            return position
        if last is not None and last[1] == "running":
            yield [self._notes("end", id=last[0], state="cancelled", error="another one was begun instead")]
        details = {**self._identity, "key": None, "process": self._process}
        own = self.dialect.to_uuid(uuid7())
        words = {"action": ACTION, "actor": self._actor, "details": _text(details), "total": total}
        yield [self._notes("begin", id=own, **words)]
        [[row]] = yield [self._notes("held", id=own)]
        return self._position(row)

    def advance(self, statements: Statements, position: Position) -> Steps[None]:
        """Write the position after a page, in the page's transaction. Raise ``Lost``."""
        notes = notes_of(statements)
        own = statements.dialect.to_uuid(position.id)
        [rows] = yield [notes("held", id=own)]
        self._check(rows)
        words = {"details": _text(position.details), "done": position.done, "skipped": position.skipped}
        yield [notes("advance", id=own, **words)]

    def changed(
        self, statements: Statements, position: Position, aggregate_type: str, ids: Sequence[str]
    ) -> Steps[set[str]]:
        """Return the ids for which the application has emitted events since the backfill began."""
        words = {"aggregate_type": aggregate_type, "ids": list(ids), "since": position.since}
        [rows] = yield [notes_of(statements)("changed", **words)]
        return {str(id_) for id_, headers in rows if MARK not in headers}

    def look(self, position: Position) -> Steps[Position]:
        """Update the heartbeat; return the recorded position. Raise ``Lost``."""
        own = self.dialect.to_uuid(position.id)
        [rows] = yield [self._notes("held", id=own)]
        self._check(rows)
        yield [self._notes("live", id=own)]
        return replace(self._position(rows[0]), resumed=position.resumed)

    def end(self, position: Position, state: OperationState, error: str | None) -> Steps[None]:
        """Record how the backfill ended, if this process still owns it."""
        own = self.dialect.to_uuid(position.id)
        [rows] = yield [self._notes("held", id=own)]
        if rows and rows[0][1] in ("running", "cancelled") and self._is_ours(rows[0]):
            ended = state if rows[0][1] == "running" else "cancelled"
            yield [self._notes("end", id=own, state=ended, error=error)]

    def pending(self, destination: str, limit: int) -> Steps[int]:
        """Return how many deliveries are pending for the destination, at most ``limit``."""
        [[[count]]] = yield [self._notes("pending", destination=destination, limit=limit)]
        return int(count)

    def _last(self) -> Steps[Sequence[Any] | None]:
        """Return the newest backfill of the same source, destination and index."""

        def is_same(row: Sequence[Any]) -> bool:
            details = _document(row[2])
            return all(details.get(name) == value for name, value in self._identity.items())

        [rows] = yield [self._notes("backfills", action=ACTION, limit=LOOKED_AT)]
        return next(filter(is_same, rows), None)

    def _position(self, row: Sequence[Any]) -> Position:
        id_, _, details, done, skipped, since, *_ = row
        return Position(self.dialect.from_uuid(id_), _document(details), done, skipped, since)

    def _check(self, rows: Sequence[Sequence[Any]]) -> None:
        if not rows or not self._is_ours(rows[0]):
            raise Lost("another process has taken the backfill up, and goes on with it")
        if rows[0][1] != "running":
            raise Cancelled("the backfill was cancelled")

    def _is_ours(self, row: Sequence[Any]) -> bool:
        return _document(row[2]).get("process") == self._process

    def _check_idle(self, row: Sequence[Any] | None) -> None:
        """Raise ``ConfigError`` if a live process is running it."""
        if row is None or row[1] != "running":
            return
        from_time = self.dialect.from_time
        silent = (from_time(row[7]) - from_time(row[6])).total_seconds()
        process = str(_document(row[2]).get("process"))
        # It may be ours, taken by a commit whose answer was lost.
        if process != self._process and not is_abandoned(silent, process):
            what = f"a backfill of {self._identity['source']!r} to {self._identity['destination']!r}"
            id_ = self.dialect.from_uuid(row[0])
            fix = "wait for its end, or cancel it"
            raise ConfigError(f"{what} is running (operation {id_}, process {process}); {fix}")


@lru_cache(maxsize=16)
def notes_of(statements: Statements) -> Statements:
    """Return the statements of this module, for the same tables, database and driver."""
    return statements.others(backfill_texts(statements.dialect.name))


def _text(details: Mapping[str, Any]) -> str:
    return msgspec.json.encode(details).decode()


def _document(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str | bytes) else value
    return dict(found) if isinstance(found, Mapping) else {}
