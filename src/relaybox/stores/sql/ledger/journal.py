"""What relays and operators recorded: roll-ups, samples and failures, audit rows and operations."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import msgspec

from relaybox.database.dialects import Dialect
from relaybox.database.steps import Row, Steps, ask
from relaybox.stores.journal import (
    STALLED,
    Audit,
    AuditRow,
    Counted,
    Failure,
    Flow,
    Level,
    Operation,
    OperationState,
    Settled,
)
from relaybox.stores.sql.rows import shown
from relaybox.stores.sql.store import Topic, driven, walk_names

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


LEAST = 500
"""Failed rows to read per destination, however many destinations there are."""


class SqlHistory(Topic):
    """Reads what relays recorded, each time a bounded part of it."""

    @driven
    def steps(
        self, seconds: float, step: int, destination: str | None
    ) -> Steps[tuple[datetime, dict[int, Settled], dict[int, Level]]]:
        """Return the database's time, and what was settled and sampled in the last ``seconds``.

        Both are counted in steps of ``step`` seconds since 1970.
        """
        # One more step, as the base of the first difference.
        words: dict[str, Any] = {"seconds": -(seconds + 2 * step), "step": step}
        words |= {"anywhere": destination is None, "destination": destination or ""}
        names = ("moment", "settled", "lags", "levels")
        [[[now]], settled, lags, levels] = yield [self.sql(name, **words) for name in names]
        buckets: dict[int, dict[int, int]] = defaultdict(dict)
        for number, bucket, times in lags:
            buckets[int(number)][int(bucket)] = int(times)
        return (
            self.dialect.from_time(now),
            {
                int(number): Settled(int(delivered), int(retried), int(failed), buckets[int(number)])
                for number, delivered, retried, failed in settled
            },
            {int(number): self._level(row) for number, *row in levels},
        )

    async def flows(self, seconds: Mapping[str, float]) -> Mapping[str, Flow]:
        """Return what is due at these destinations, and whether anything settled in the given seconds."""
        # A minute counts from its start, and is written a little later.
        lately = sorted({time + 60.0 for time in seconds.values()})
        results = await self.run(partial(ask, [self.sql("settling", seconds=-time) for time in lately]))
        settling = {time: {row[0] for row in rows} for time, rows in zip(lately, results, strict=True)}
        return {name: await self._flow(name, name in settling[time + 60.0]) for name, time in seconds.items()}

    @driven
    def _flow(self, name: str, settles: bool) -> Steps[Flow]:
        [[[pending, since, now]]] = yield [self.sql("flow", destination=name)]
        due = None if since is None else self.dialect.from_time(now) - self.dialect.from_time(since)
        return Flow(bool(pending), None if due is None else max(0.0, due.total_seconds()), settles)

    async def failed_rows(self, destination: str | None, limit: int) -> tuple[list[Failure], bool]:
        """Return the newest failed rows by error, at most ``limit``, and whether there may be more."""
        every = partial(walk_names, self.sql, "next_failed")
        names = [destination] if destination is not None else await self.run(every)
        share = max(LEAST, limit // max(1, len(names)))
        failures: list[Failure] = []
        capped = False
        for name in names:
            rows = await self._failed(name, share)
            failures += [self._failure(name, row) for row in rows]
            capped |= sum(row[2] for row in rows) >= share
        return failures, capped

    @driven
    def _failed(self, name: Any, limit: int) -> Steps[list[Row]]:
        [rows] = yield [self.sql("failed_rows", destination=name, limit=limit)]
        return rows

    def _failure(self, destination: Any, row: Row) -> Failure:
        event_type, error, count, first, last, example = row
        return Failure(
            destination=shown(destination) or "",
            event_type=shown(event_type) or "",
            error=shown(error) or "",
            count=count,
            first_at=self.dialect.from_time(first),
            last_at=self.dialect.from_time(last),
            example=_uuid(example),
        )

    def _level(self, row: Row) -> Level:
        pending, oldest, position, at = row
        return Level(
            int(pending),
            None if oldest is None else float(oldest),
            None if position is None else int(position),
            self.dialect.from_time(at),
        )


def _uuid(value: Any) -> UUID:
    try:
        return UUID(shown(value))
    except (ValueError, TypeError):
        return UUID(int=0)
