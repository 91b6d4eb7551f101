"""What there is: destinations with their counts and states, relays, and consumers' marks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from functools import partial
from typing import Any

import sqlalchemy as sa

from relaybox.database.dialects import Dialect
from relaybox.database.statements.delivery import Statements
from relaybox.database.statements.ledger import next_names
from relaybox.database.steps import Row, Steps, ask
from relaybox.stores.ledger import BATCH, CAP, Counts, DestinationState, Relay
from relaybox.stores.sql.expressions import Expressions, Parts
from relaybox.stores.sql.rows import shown
from relaybox.stores.sql.store import Driver, Topic, driven, walk_names


class SqlOverview(Topic):
    """Lists and counts."""

    def __init__(self, driver: Driver, sql: Statements, expressions: Expressions) -> None:
        super().__init__(driver, sql)
        self._own = expressions
        self._parts = Parts(expressions)

    @driven
    def names(self) -> Steps[frozenset[str]]:
        """Return every destination with pending, failed or delivered rows, or with a state."""
        [rows, unrouted] = yield [self.sql("named"), self.sql("unrouted")]
        names = {row[0] for row in (*rows, *unrouted)}
        names.update((yield from walk_names(self.sql, *next_names(self.dialect.name))))
        return frozenset(name if isinstance(name, str) else str(shown(name)) for name in names)

    async def counts(self, names: Collection[str]) -> Mapping[str, Counts]:
        """Count the rows of each destination by state."""
        counts = {}
        for name in names:
            queries = self._parts.counts(name)
            *results, errors = await self.run(partial(ask, [*queries.values(), self._parts.next_error(name)]))
            parts = {part: rows[0] for part, rows in zip(queries, results, strict=True)}
            counts[name] = _counts(self.dialect, parts, shown(errors[0][0]) if errors else None)
        return counts

    @driven
    def states(self) -> Steps[Mapping[str, DestinationState]]:
        """Return the destinations that have a state."""
        [rows] = yield [self.sql("places")]
        return {row[0]: DestinationState(*_times(self.dialect, row, 1, 2, 6, 8)) for row in rows}

    @driven
    def relays(self) -> Steps[tuple[Relay, ...]]:
        """Return the relays, last seen first."""
        [rows] = yield [self.sql("relays")]
        return tuple(Relay(*_times(self.dialect, row, 4, 5, 6, 7)) for row in rows)

    @driven
    def marks(self, consumer: str, after: str) -> Steps[list[tuple[str, datetime]]]:
        """Return up to ``BATCH`` messages that a consumer has processed after this id, and when, by id."""
        inbox = self._own.inbox.c
        found = sa.select(inbox.message_id, inbox.processed_at).where(inbox.consumer == consumer)
        page = found.where(inbox.message_id > after).order_by(inbox.message_id).limit(BATCH)
        [rows] = yield [self._own.query(page)]
        return [(id_, self.dialect.from_time(at)) for id_, at in rows]


def _counts(dialect: Dialect, parts: Mapping[str, Row], retrying: str | None) -> Counts:
    leased = {part: row[1] for part, row in parts.items()}
    pending = [_times(dialect, parts[name], 2, 3, 4) for name in ("due", "scheduled", "parked")]
    born, seen = min(([*row[2:4]] for row in pending if row[2] is not None), default=(None, None))
    held = [(row[3] - row[4]).total_seconds() for row in pending if row[4] is not None]
    capped = {part for part, row in parts.items() if row[0] > CAP}
    numbers = {part: max(min(row[0], CAP) - leased[part], 0) for part, row in parts.items()}
    return Counts(
        **numbers,
        sending=sum(leased.values()),
        oldest_pending=born,
        oldest_seconds=None if born is None else max(0.0, (seen - born).total_seconds()),
        capped=frozenset(capped),
        retrying=retrying,
        sending_seconds=max(held, default=None),
    )


def _times(dialect: Dialect, row: Row, *indexes: int) -> list[Any]:
    values = list(row)
    for index in indexes:
        values[index] = None if values[index] is None else dialect.from_time(values[index])
    return values
