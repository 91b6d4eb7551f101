"""Parts of the event table that an index leads to, each read up to a limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import sqlalchemy as sa

from relaybox.database.schema import now
from relaybox.database.statements.delivery import Query
from relaybox.stores.ledger import CAP, Filter
from relaybox.stores.sql.expressions import Expressions, equal


class Part(NamedTuple):
    """Rows that an index leads to; ``hint`` names the index if the planner would use less of it."""

    condition: Any
    order: tuple[Any, ...]
    hint: str = ""


class Parts:
    """Finds the parts of one database's event table."""

    def __init__(self, own: Expressions) -> None:
        self._own = own

    def of(self, filter: Filter) -> Iterator[Part]:
        """Yield the parts that hold all rows that match the filter."""
        event = self._own.event.c
        if filter.aggregate_type is not None and filter.aggregate_id is not None:
            same = (event.aggregate_type == filter.aggregate_type, event.aggregate_id == filter.aggregate_id)
            yield Part(sa.and_(*same), ())
        if filter.status == "failed":
            yield self._failed(filter.destination)
        elif filter.status in ("pending", "due", "scheduled", "parked", "sending", "processing"):
            yield self._pending(filter.destination)
        elif filter.status in ("delivered", "completed") and filter.destination is not None:
            yield self._delivered(filter.destination)

    def rows(self, part: Part, *columns: Any) -> sa.Select[Any]:
        """Select the rows of a part, up to one more than ``CAP``."""
        # In index order, so that the planner uses the index.
        chosen = columns or self._own.columns()
        statement = sa.select(*chosen).where(part.condition).order_by(*part.order).limit(CAP + 1)
        return statement.with_hint(self._own.event, part.hint, "mysql") if part.hint else statement

    def counts(self, name: str) -> dict[str, Query]:
        """Return a query per range: count, leased count, oldest row, now, and time of the oldest claim."""
        event = self._own.event.c
        pending = self._pending(name)
        parked = _only(pending, event.next_attempt_at.is_(None))
        if self._own.split:
            # MariaDB would sort by a time that is null in every row.
            parked = parked._replace(order=(event.position,))
        parts = {
            "due": _only(pending, event.next_attempt_at <= self._own.now),
            "scheduled": _only(pending, event.next_attempt_at > self._own.now),
            "parked": parked,
        }
        final = {"failed": self._failed(name), "delivered": self._delivered(name)}
        counts = {state: self._count(part) for state, part in parts.items()}
        counts |= {state: self._count_final(part) for state, part in final.items()}
        return {state: self._own.query(count) for state, count in counts.items()}

    def next_error(self, name: str) -> Query:
        """Return the query for the error of the destination's next scheduled row."""
        event = self._own.event.c
        scheduled = _only(self._pending(name), event.next_attempt_at > self._own.now)
        return self._own.query(self.rows(scheduled, event.error_message).limit(1))

    def _count_final(self, part: Part) -> sa.Select[Any]:
        window = self.rows(part, sa.literal_column("1").label("one")).subquery("w")
        columns: list[Any] = [sa.func.count(), sa.literal_column("0"), sa.null(), now(), sa.null()]
        return sa.select(*columns).select_from(window)

    def _count(self, part: Part) -> sa.Select[Any]:
        event = self._own.event.c
        asked = (event.leased_until, event.created_at, event.last_attempt_at)
        window = self.rows(part, *asked).subquery("w")
        leased = sa.case((window.c.leased_until > self._own.now, 1))
        claimed = sa.case((window.c.leased_until > self._own.now, window.c.last_attempt_at))
        columns: list[Any] = [sa.func.count(), sa.func.count(leased), sa.func.min(window.c.created_at)]
        return sa.select(*columns, now(), sa.func.min(claimed)).select_from(window)

    def _failed(self, destination: str | None) -> Part:
        event = self._own.event.c
        column = event.failed_destination if self._own.split else event.destination
        first = (column,) if destination is None else ()
        return Part(self._open(column, destination, "failed"), (*first, event.position))

    def _pending(self, destination: str | None) -> Part:
        event = self._own.event.c
        column = event.due_destination if self._own.split else event.destination
        # MariaDB would sort by the name even if it is the same in every row.
        first = (column,) if destination is None else ()
        order = (*first, event.next_attempt_at, event.position)
        hint = self._own.statements.by_due if destination is not None else ""
        return Part(self._open(column, destination, "pending"), order, hint)

    def _delivered(self, name: str) -> Part:
        event = self._own.event.c
        delivered = equal(event.status, "delivered") & (event.destination == name)
        return Part(delivered & event.delivered_at.is_not(None), (event.delivered_at,))

    def _open(self, column: Any, destination: str | None, status: str) -> Any:
        name = column.is_not(None) if destination is None else column == destination
        return equal(self._own.event.c.status, status) & name


def _only(part: Part, condition: Any) -> Part:
    return part._replace(condition=part.condition & condition)
