"""The journal in any SQL database: roll-ups, samples, failures and operations."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any
from uuid import UUID

import msgspec

from relaybox.database.statements.delivery import Query
from relaybox.database.statements.journal import texts
from relaybox.database.steps import Row, Steps, ask
from relaybox.stores.journal import (
    STALLED,
    Audit,
    AuditRow,
    Counted,
    FailedRows,
    Failure,
    Flow,
    History,
    Level,
    Operation,
    OperationState,
    Settled,
)
from relaybox.stores.sql.search import shown
from relaybox.stores.sql.store import SqlStore, walk_names

LEAST = 500
"""Failed rows to read per destination, however many destinations there are."""

NEWEST_AUDIT = 2**63 - 1


class SqlJournal:
    """The journal in the database of a store."""

    def __init__(self, store: SqlStore) -> None:
        self._driver = store.driver
        self._own = store.steps.statements
        self._dialect = self._own.dialect
        self._notes = self._own.others(texts(self._dialect.name))

    async def history(self, seconds: float, step: int, destination: str | None) -> History:
        """Return what was settled and sampled in the last ``seconds``, in steps of ``step`` seconds."""
        # One more step, as the base of the first difference.
        words: dict[str, Any] = {"seconds": -(seconds + 2 * step), "step": step}
        words |= {"anywhere": destination is None, "destination": destination or ""}
        names = ("moment", "settled", "lags", "levels")
        [[[now]], settled, lags, levels] = await self._ask([self._notes(name, **words) for name in names])
        buckets: dict[int, dict[int, int]] = defaultdict(dict)
        for number, bucket, times in lags:
            buckets[int(number)][int(bucket)] = int(times)
        return History(
            self._dialect.from_time(now),
            tuple(
                Settled(int(number), int(delivered), int(retried), int(failed), buckets[int(number)])
                for number, delivered, retried, failed in settled
            ),
            tuple(self._level(row) for row in levels),
        )

    async def flows(self, seconds: Mapping[str, float]) -> Mapping[str, Flow]:
        """Return what is due at these destinations, and whether anything settled in the given seconds."""
        # A minute counts from its start, and is written a little later.
        lately = sorted({time + 60.0 for time in seconds.values()})
        results = await self._ask([self._notes("settling", seconds=-time) for time in lately])
        settling = {time: {row[0] for row in rows} for time, rows in zip(lately, results, strict=True)}
        flows = {}
        for name, time in seconds.items():
            [[[pending, since, now]]] = await self._ask([self._notes("flow", destination=name)])
            due = None if since is None else self._dialect.from_time(now) - self._dialect.from_time(since)
            seconds_due = None if due is None else max(0.0, due.total_seconds())
            flows[name] = Flow(bool(pending), seconds_due, name in settling[time + 60.0])
        return flows

    async def failed_rows(self, destination: str | None, limit: int) -> FailedRows:
        """Return the newest failed rows, at most ``limit``, grouped by error."""
        every = partial(walk_names, self._notes, "next_failed")
        names = [destination] if destination is not None else await self._driver.run(every)
        share = max(LEAST, limit // max(1, len(names)))
        failures: list[Failure] = []
        capped = False
        for name in names:
            [rows] = await self._ask([self._notes("failed_rows", destination=name, limit=share)])
            failures += [self._failure(name, row) for row in rows]
            capped |= sum(row[2] for row in rows) >= share
        return FailedRows(tuple(failures), capped)

    async def audits(self, limit: int, cursor: int | None = None) -> tuple[AuditRow, ...]:
        """Return operators' actions, newest first, before the row ``cursor``."""
        before = NEWEST_AUDIT if cursor is None else max(0, min(cursor, NEWEST_AUDIT))
        [rows] = await self._ask([self._notes("audits", before=before, limit=limit)])
        return tuple(
            AuditRow(id_, self._dialect.from_time(at), actor, action, _document(details), affected)
            for id_, at, actor, action, details, affected in rows
        )

    async def note(self, audit: Audit) -> None:
        """Record an action that changes no row."""
        await self._ask([self._note(audit, 0)])

    async def begin(
        self, id_: UUID, action: str, actor: str, details: Mapping[str, Any], counted: Counted | None
    ) -> None:
        """Record the start of an operation."""
        total, capped = (None, 0) if counted is None else (counted.count, int(counted.capped))
        words = {"action": action, "actor": actor, "details": msgspec.json.encode(details).decode()}
        await self._ask([self._notes("begin", id=self._id(id_), total=total, capped=capped, **words)])

    async def advance(self, id_: UUID, done: int, skipped: int) -> bool:
        """Record progress and a heartbeat; return False if the operation was cancelled."""
        own = self._id(id_)
        queries = [self._notes("advance", id=own, done=done, skipped=skipped), self._notes("state", id=own)]
        _, rows = await self._ask(queries)
        return [row[0] for row in rows] == ["running"]

    async def finish(
        self, id_: UUID, state: OperationState, done: int, skipped: int, error: str | None = None
    ) -> None:
        """Record the end of an operation; a cancelled one stays cancelled."""
        words = {"state": state, "done": done, "skipped": skipped, "error": error}
        await self._ask([self._notes("finish", id=self._id(id_), **words)])

    async def cancel(self, id_: UUID) -> bool:
        """Cancel an operation after its current batch; return whether it was running."""
        return await self._driver.run(lambda: self._cancel(self._id(id_)))

    async def operations(self, limit: int) -> tuple[Operation, ...]:
        """Return the operations, newest first."""
        [rows] = await self._ask([self._notes("operations", limit=limit)])
        return tuple(map(self._operation, rows))

    async def operation(self, id_: UUID) -> Operation | None:
        """Return one operation, or None."""
        [rows] = await self._ask([self._notes("one_operation", id=self._id(id_))])
        return self._operation(rows[0]) if rows else None

    async def _ask(self, queries: list[Query]) -> list[list[Row]]:
        return await self._driver.run(partial(ask, queries))

    def _note(self, audit: Audit, affected: int) -> Query:
        return self._notes("note", affected=affected, **audited(audit))

    def _cancel(self, id_: Any) -> Steps[bool]:
        # An abandoned operation ends here; a live one ends itself.
        cancel = self._notes("cancel", id=id_, seconds=-STALLED)
        if self._dialect.returning:
            [rows] = yield [cancel]
            return bool(rows)
        [rows] = yield [self._notes("running", id=id_)]
        if rows:
            yield [cancel]
        return bool(rows)

    def _failure(self, destination: Any, row: Row) -> Failure:
        event_type, error, count, first, last, example = row
        return Failure(
            destination=shown(destination) or "",
            event_type=shown(event_type) or "",
            error=shown(error) or "",
            count=count,
            first_at=self._dialect.from_time(first),
            last_at=self._dialect.from_time(last),
            example=_uuid(example),
        )

    def _level(self, row: Row) -> Level:
        number, pending, oldest, position, at = row
        return Level(
            int(number),
            int(pending),
            None if oldest is None else float(oldest),
            None if position is None else int(position),
            self._dialect.from_time(at),
        )

    def _operation(self, row: Row) -> Operation:
        id_, action, actor, details, state, total, capped, done, skipped, *moments, error, now = row
        started, updated, finished = (
            None if moment is None else self._dialect.from_time(moment) for moment in moments
        )
        assert started is not None
        assert updated is not None
        seen = self._dialect.from_time(now)
        if state == "running" and (seen - updated).total_seconds() > STALLED:
            state = "stalled"
        own = self._dialect.from_uuid(id_)
        counts = (total, bool(capped), done, skipped)
        return Operation(
            own, action, actor, _document(details), state, *counts, started, updated, finished, error, seen
        )

    def _id(self, id_: UUID) -> Any:
        return self._dialect.to_uuid(id_)


def audited(audit: Audit) -> dict[str, Any]:
    """Return the parameters of an audit row."""
    details = msgspec.json.encode(audit.details).decode()
    return {"actor": audit.actor, "action": audit.action, "details": details}


def _document(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str | bytes):
        try:
            value = json.loads(value)
        except ValueError:
            value = {"text": str(shown(value))}
    return value if isinstance(value, dict) else {"value": value}


def _uuid(value: Any) -> UUID:
    try:
        return UUID(shown(value))
    except (ValueError, TypeError):
        return UUID(int=0)
