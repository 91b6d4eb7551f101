"""Windows of the event table by id, for what no index leads to, and the conditions of a filter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from relaybox.database.schema import now
from relaybox.database.statements.delivery import Query
from relaybox.stores.ledger import CAP, Filter
from relaybox.stores.sql.expressions import Expressions, equal

SKEW = timedelta(days=1)
"""The largest difference between the emitter's time in an id and the database's."""

EQUAL = ("destination", "event_type", "aggregate_type", "aggregate_id", "ordering_key")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The ids of a search: after ``above``, up to ``last``, before ``below``."""

    above: UUID | None = None
    last: UUID | None = None
    below: UUID | None = None
    ascending: bool = False


class Windows:
    """Reads windows of one database's event table."""

    def __init__(self, own: Expressions) -> None:
        self._own = own

    def rows(self, bounds: Bounds) -> sa.Select[Any]:
        """Select the first ``CAP`` rows within the bounds."""
        return self._in_order(sa.select(*self._own.columns()), bounds).limit(CAP)

    def end(self, bounds: Bounds) -> Query:
        """Return the query for the last id of that window, if there may be more rows."""
        last = self._in_order(sa.select(self._own.event.c.id), bounds)
        return self._own.query(last.offset(CAP - 1).limit(1))

    def found(self, window: sa.Select[Any], filter: Filter, limit: int, bounds: Bounds) -> Query:
        """Return the query for those of a window, or part, that match the filter."""
        columns = window.subquery("w")
        found = self._own.select(columns).where(*self.conditions(columns.c, filter))
        order = columns.c.id.asc() if bounds.ascending else columns.c.id.desc()
        return self._own.query(found.where(*self._within(columns.c, bounds)).order_by(order).limit(limit))

    def conditions(self, columns: Any, filter: Filter) -> Iterator[Any]:
        """Yield the conditions of a filter."""
        for name in EQUAL:
            if (value := getattr(filter, name)) is not None:
                yield columns[name] == value
        if filter.event_id is not None:
            yield columns.event_id == self._own.dialect.to_uuid(filter.event_id)
        if filter.since is not None:
            yield columns.created_at >= self._own.dialect.to_time(filter.since)
        if filter.until is not None:
            yield columns.created_at < self._own.dialect.to_time(filter.until)
        if filter.rules is not None:
            yield columns.error_message.is_not(None)
        elif filter.error is not None:
            message = sa.func.lower(columns.error_message, type_=sa.Text)
            yield message.contains(filter.error.lower(), autoescape=True)
        if filter.status is not None:
            yield _in_state(columns, filter.status)

    def _in_order(self, statement: sa.Select[Any], bounds: Bounds) -> sa.Select[Any]:
        event = self._own.event.c
        order = event.id.asc() if bounds.ascending else event.id.desc()
        return statement.where(*self._within(event, bounds)).order_by(order)

    def _within(self, columns: Any, bounds: Bounds) -> list[Any]:
        sides = [
            (bounds.above, columns.id.__gt__),
            (bounds.last, columns.id.__le__),
            (bounds.below, columns.id.__lt__),
        ]
        return [compare(self._own.dialect.to_uuid(side)) for side, compare in sides if side is not None]


def _in_state(columns: Any, state: str) -> Any:
    if state in ("delivered", "completed"):
        return equal(columns.status, "delivered")
    if state in ("failed", "discarded"):
        return equal(columns.status, state)
    pending = equal(columns.status, "pending")
    if state in ("sending", "processing"):
        return pending & (columns.leased_until > now())
    waiting = pending & (columns.leased_until.is_(None) | (columns.leased_until <= now()))
    due = columns.next_attempt_at
    moments = {"pending": sa.true(), "due": due <= now(), "scheduled": due > now(), "parked": due.is_(None)}
    return waiting & moments[state]


def in_time(filter: Filter, bounds: Bounds) -> Bounds:
    """Narrow the bounds to the ids that were made in the filter's time."""
    above, below = bounds.above, bounds.below
    if filter.since is not None:
        first = _first_id(filter.since, -SKEW)
        above = first if above is None else max(above, first)
    if filter.until is not None:
        first = _first_id(filter.until, SKEW)
        below = first if below is None else min(below, first)
    return replace(bounds, above=above, below=below)


def _first_id(moment: datetime, shift: timedelta) -> UUID:
    """Return the smallest possible id of the shifted moment's millisecond."""
    # In seconds, because a datetime cannot leave the calendar's first or last day.
    milliseconds = int((moment.timestamp() + shift.total_seconds()) * 1000)
    return UUID(int=min(max(0, milliseconds), 2**48 - 1) << 80)
