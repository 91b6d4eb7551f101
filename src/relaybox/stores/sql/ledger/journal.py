"""What operators did and do: audit rows, and operations in the background."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import msgspec

from relaybox.database.dialects import Dialect
from relaybox.database.steps import Row, Steps
from relaybox.stores.journal import STALLED, Audit, AuditRow, Counted, Operation, OperationState
from relaybox.stores.sql.rows import shown
from relaybox.stores.sql.store import Topic, driven

NEWEST_AUDIT = 2**63 - 1


class SqlJournal(Topic):
    """Writes and reads operators' records."""

    @driven
    def audits(self, limit: int, cursor: int | None = None) -> Steps[tuple[AuditRow, ...]]:
        """Return operators' actions, newest first, before the row ``cursor``."""
        before = NEWEST_AUDIT if cursor is None else max(0, min(cursor, NEWEST_AUDIT))
        [rows] = yield [self.sql("audits", before=before, limit=limit)]
        return tuple(
            AuditRow(id_, self.dialect.from_time(at), actor, action, _document(details), affected)
            for id_, at, actor, action, details, affected in rows
        )

    @driven
    def note(self, audit: Audit) -> Steps[None]:
        """Record an action that changes no row."""
        yield [self.sql("note", affected=0, **audited(audit))]

    @driven
    def begin(
        self, id_: UUID, action: str, actor: str, details: Mapping[str, Any], counted: Counted | None
    ) -> Steps[None]:
        """Record the start of an operation."""
        total, capped = (None, 0) if counted is None else (counted.count, int(counted.capped))
        words = {"action": action, "actor": actor, "details": msgspec.json.encode(details).decode()}
        yield [self.sql("begin", id=self.dialect.to_uuid(id_), total=total, capped=capped, **words)]

    @driven
    def advance(self, id_: UUID, done: int, skipped: int) -> Steps[bool]:
        """Record progress and a heartbeat; return False if the operation was cancelled."""
        own = self.dialect.to_uuid(id_)
        _, rows = yield [self.sql("advance", id=own, done=done, skipped=skipped), self.sql("state", id=own)]
        return [row[0] for row in rows] == ["running"]

    @driven
    def finish(
        self, id_: UUID, state: OperationState, done: int, skipped: int, error: str | None = None
    ) -> Steps[None]:
        """Record the end of an operation; a cancelled one stays cancelled."""
        words = {"state": state, "done": done, "skipped": skipped, "error": error}
        yield [self.sql("finish", id=self.dialect.to_uuid(id_), **words)]

    @driven
    def cancel(self, id_: UUID) -> Steps[bool]:
        """Cancel an operation after its current batch; return whether it was running."""
        own = self.dialect.to_uuid(id_)
        # An abandoned operation ends here; a live one ends itself.
        cancel = self.sql("cancel", id=own, seconds=-STALLED)
        if self.dialect.returning:
            [rows] = yield [cancel]
            return bool(rows)
        [rows] = yield [self.sql("running", id=own)]
        if rows:
            yield [cancel]
        return bool(rows)

    @driven
    def operations(self, limit: int) -> Steps[tuple[Operation, ...]]:
        """Return the operations, newest first."""
        [rows] = yield [self.sql("operations", limit=limit)]
        return tuple(_operation(self.dialect, row) for row in rows)

    @driven
    def operation(self, id_: UUID) -> Steps[Operation | None]:
        """Return one operation, or None."""
        [rows] = yield [self.sql("one_operation", id=self.dialect.to_uuid(id_))]
        return _operation(self.dialect, rows[0]) if rows else None


def audited(audit: Audit) -> dict[str, Any]:
    """Return the parameters of an audit row."""
    details = msgspec.json.encode(audit.details).decode()
    return {"actor": audit.actor, "action": audit.action, "details": details}


def _operation(dialect: Dialect, row: Row) -> Operation:
    id_, action, actor, details, state, total, capped, done, skipped, *moments, error, now = row
    started, updated, finished = (None if moment is None else dialect.from_time(moment) for moment in moments)
    assert started is not None
    assert updated is not None
    seen = dialect.from_time(now)
    if state == "running" and (seen - updated).total_seconds() > STALLED:
        state = "stalled"
    about = (dialect.from_uuid(id_), action, actor, _document(details), state)
    return Operation(*about, total, bool(capped), done, skipped, started, updated, finished, error, seen)


def _document(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str | bytes):
        try:
            value = json.loads(value)
        except ValueError:
            value = {"text": str(shown(value))}
    return value if isinstance(value, dict) else {"value": value}
