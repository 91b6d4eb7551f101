"""Builds operators' searches and counts as Core expressions.

A query reads at most one window: of an index that leads to few rows, else of the primary key, by time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from relaybox.core.fingerprint import LOOKED_AT, fingerprint
from relaybox.core.ordering import ALONE
from relaybox.core.redact import Rules
from relaybox.core.shadow import HEADER
from relaybox.database.schema import MYSQL, now
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Row, Steps
from relaybox.stores.ledger import BATCH, CAP, Counted, Entry, Filter, Page

NEAR = 2_000
"""Rows of one event are created together: the last one is within this many rows of the first."""

WINDOWS = 20
"""Windows that a count reads if no index leads to the rows."""

SKEW = timedelta(days=1)
"""The largest difference between the emitter's time in an id and the database's."""

COLUMNS = tuple(name for name in Entry.__dataclass_fields__ if name != "seen_at")
IDS = ("id", "event_id")
TIMES = (
    *("next_attempt_at", "leased_until", "created_at", "updated_at"),
    *("last_attempt_at", "delivered_at", "seen_at"),
)
NUMBERS = ("position", "attempts", "max_attempts", "crashes")
TEXTS = tuple(name for name in COLUMNS if name not in (*IDS, *TIMES, *NUMBERS))
NIL = UUID(int=0)
EQUAL = ("destination", "event_type", "aggregate_type", "aggregate_id", "ordering_key")

_COMPILERS: dict[str, Any] = {
    "postgresql": postgresql.dialect,
    "mysql": mysql.dialect,
    "mariadb": mysql.dialect,
    "sqlite": sqlite.dialect,
}
_STYLES = {"format": "format", "qmark": "qmark", "numeric": "numeric_dollar"}


class Part(NamedTuple):
    """Rows that an index leads to; ``hint`` names the index if the planner would use less of it."""

    condition: Any
    order: tuple[Any, ...]
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The ids of a search: after ``above``, up to ``last``, before ``below``."""

    above: UUID | None = None
    last: UUID | None = None
    below: UUID | None = None
    ascending: bool = False


class Search:
    """Builds and runs searches on one database."""

    def __init__(self, statements: Statements) -> None:
        self.dialect = statements.dialect
        self._event = statements.tables.event
        self._inbox = statements.tables.inbox
        self._sql = _COMPILERS[self.dialect.name](paramstyle=_STYLES[statements.style])
        self._split = self.dialect.name in MYSQL
        self._by_due = statements.by_due
        # A volatile function cannot bound an index; a subquery can.
        self._now = sa.select(now()).scalar_subquery()

    def query(self, statement: sa.Select[Any]) -> Query:
        """Compile the statement for this database's driver."""
        compiled = statement.compile(dialect=self._sql, compile_kwargs={"render_postcompile": True})
        return Query(str(compiled), tuple(compiled.params[name] for name in compiled.positiontup or ()))

    def entry(self, row: Row) -> Entry:
        """Convert a row of ``COLUMNS`` and the database's time."""
        values = dict(zip((*COLUMNS, "seen_at"), row, strict=True))
        for name in IDS:
            values[name] = self._shown_id(values[name])
        for name in TIMES:
            values[name] = None if values[name] is None else self.dialect.from_time(values[name])
        if not self.dialect.typed:
            values |= {name: shown(values[name]) for name in TEXTS}
            values |= {name: values[name] if isinstance(values[name], int) else 0 for name in NUMBERS}
        values["crashes"] %= ALONE
        return Entry(**values)

    def _shown_id(self, value: Any) -> UUID:
        """Return the id, or NIL if the row was edited by hand and its id is not a UUID."""
        try:
            return self.dialect.from_uuid(value)
        except (ValueError, TypeError, AttributeError):
            return NIL

    def page(self, filter: Filter, limit: int, bounds: Bounds) -> Steps[Page]:
        """Return the matching entries within the bounds."""
        if filter.fingerprint is None and filter.rules is None:
            return (yield from self._page(filter, limit, bounds))
        # No database can compute a fingerprint or hide a secret: filter the result here.
        page = yield from self._page(filter, max(limit, BATCH), bounds)
        found = [e for e in page.entries if _fits(filter, e.destination, e.error_message)]
        cursor = found[limit - 1].id if len(found) > limit else page.cursor
        return Page(tuple(found[:limit]), cursor)

    def _page(self, filter: Filter, limit: int, bounds: Bounds) -> Steps[Page]:
        if filter.event_id is not None:
            entries = yield from self.find(filter.event_id, whole=True)
            narrow: Part | None = Part(self._event.c.id.in_([self._id(e.id) for e in entries]), ())
        else:
            bounds = _in_time(filter, bounds)
            narrow = yield from self._narrow(filter)
        if narrow is not None:
            [rows] = yield [self._found(self._part(narrow), filter, limit, bounds)]
            # The part may have grown since it was counted, and would be cut off.
            if filter.event_id is not None or (yield from self._length(narrow)) <= CAP:
                return _page(tuple(map(self.entry, rows)), limit, None)
        [rows] = yield [self._found(self._window(bounds), filter, limit, bounds)]
        ends = [] if len(rows) == limit else (yield [self.query(self._end(bounds))])[0]
        return _page(tuple(map(self.entry, rows)), limit, self._shown_id(ends[0][0]) if ends else None)

    def _found(self, window: sa.Select[Any], filter: Filter, limit: int, bounds: Bounds) -> Query:
        columns = window.subquery("w")
        found = self._select(columns).where(*self._conditions(columns.c, filter))
        order = columns.c.id.asc() if bounds.ascending else columns.c.id.desc()
        return self.query(found.where(*self._within(columns.c, bounds)).order_by(order).limit(limit))

    def find(self, id_: UUID, *, whole: bool = False, exact: bool = False) -> Steps[tuple[Entry, ...]]:
        """Return the delivery with that id (``exact``: only), or (``whole``: only) all of that event.

        An event's other rows follow its first at once; later copies share the aggregate, or are very new.
        """
        event, own = self._event.c, self._id(id_)
        [[*rows]] = yield [self.query(self._select(self._event).where(event.id == own))]
        if exact or (rows and not whole and self.entry(rows[0]).event_id != id_):
            return tuple(map(self.entry, rows))
        near = sa.select(*self._columns()).where(event.id >= own).order_by(event.id).limit(NEAR)
        [[*rows]] = yield [self._of_event(near, own)]
        if not rows:
            [[*rows]] = yield [self._of_event(self._window(Bounds()), own)]
        if rows:
            first = self.entry(rows[0])
            same = Filter(aggregate_type=first.aggregate_type, aggregate_id=first.aggregate_id)
            [part] = self._parts(same)
            [[*others]] = yield [self._of_event(self._part(part), own)]
            rows += others
        entries = {entry.id: entry for entry in map(self.entry, rows)}
        return tuple(sorted(entries.values(), key=lambda entry: entry.position))

    def tally(self, filter: Filter) -> Steps[Counted]:
        """Count matching rows; if no index leads to few rows, only in the first windows."""
        if filter.event_id is not None:
            page = yield from self.page(filter, CAP, Bounds())
            return Counted(len(page.entries), page.cursor is not None)
        broad: Part | None = None
        for part in self._parts(filter):
            if (yield from self._length(part)) <= CAP:
                return Counted((yield from self._matching(self._part(part), filter)), False)
            broad = broad or part
        if broad is not None:
            return Counted(min(CAP, (yield from self._matching(self._part(broad), filter))), True)
        return (yield from self._tally_windows(filter))

    def _tally_windows(self, filter: Filter) -> Steps[Counted]:
        bounds, count = _in_time(filter, Bounds()), 0
        for _ in range(WINDOWS):
            count += yield from self._matching(self._window(bounds), filter)
            if count >= CAP:
                return Counted(CAP, True)
            [ends] = yield [self.query(self._end(bounds))]
            if not ends:
                return Counted(count, False)
            bounds = replace(bounds, below=self._shown_id(ends[0][0]))
        return Counted(count, True)

    def _matching(self, window: sa.Select[Any], filter: Filter) -> Steps[int]:
        rows = window.subquery("w")
        conditions = self._conditions(rows.c, filter)
        if filter.fingerprint is None and filter.rules is None:
            [[[count]]] = yield [self.query(sa.select(sa.func.count()).select_from(rows).where(*conditions))]
            return int(count)
        error: Any = rows.c.error_message
        error = error if filter.rules is not None else sa.func.substr(error, 1, LOOKED_AT)
        [errors] = yield [self.query(sa.select(rows.c.destination, error).where(*conditions))]
        return sum(_fits(filter, destination, error) for destination, error in errors)

    def newest(self) -> Query:
        """Return the query for the newest row's id."""
        return self.query(sa.select(self._event.c.id).order_by(self._event.c.id.desc()).limit(1))

    def contents(self, ids: Collection[UUID]) -> Query:
        """Return the query for the contents of deliveries, with their ids."""
        event = self._event.c
        columns = (event.id, event.payload, event.payload_data, event.payload_encoding, event.headers)
        return self.query(sa.select(*columns).where(event.id.in_([self._id(id_) for id_ in ids])))

    def shadowed(self, ids: Collection[UUID]) -> Query:
        """Return the query for ids and headers of rows that may be in shadow."""
        event = self._event.c
        marked = sa.cast(event.headers, sa.String).like(f"%{HEADER}%")
        return self.query(
            sa.select(event.id, event.headers).where(event.id.in_([self._id(id_) for id_ in ids]), marked)
        )

    def marks(self, consumer: str, after: str, limit: int) -> Query:
        """Return the query for a consumer's messages after this id, by the primary key."""
        inbox = self._inbox.c
        found = sa.select(inbox.message_id, inbox.processed_at).where(inbox.consumer == consumer)
        return self.query(found.where(inbox.message_id > after).order_by(inbox.message_id).limit(limit))

    def count(self, name: str) -> dict[str, Query]:
        """Return a query per range: count, leased count, oldest row, now, and time of the oldest claim."""
        event = self._event.c
        pending = self._pending(name)
        parked = _only(pending, event.next_attempt_at.is_(None))
        if self._split:
            # MariaDB would sort by a time that is null in every row.
            parked = parked._replace(order=(event.position,))
        parts = {
            "due": _only(pending, event.next_attempt_at <= self._now),
            "scheduled": _only(pending, event.next_attempt_at > self._now),
            "parked": parked,
        }
        final = {"failed": self._failed(name), "delivered": self._delivered(name)}
        counts = {state: self._count(part) for state, part in parts.items()}
        counts |= {state: self._count_final(part) for state, part in final.items()}
        return {state: self.query(count) for state, count in counts.items()}

    def next_error(self, name: str) -> Query:
        """Return the query for the error of the destination's next scheduled row."""
        event = self._event.c
        scheduled = _only(self._pending(name), event.next_attempt_at > self._now)
        return self.query(self._part(scheduled, event.error_message).limit(1))

    def _count_final(self, part: Part) -> sa.Select[Any]:
        window = self._part(part, sa.literal_column("1").label("one")).subquery("w")
        columns: list[Any] = [sa.func.count(), sa.literal_column("0"), sa.null(), now(), sa.null()]
        return sa.select(*columns).select_from(window)

    def _count(self, part: Part) -> sa.Select[Any]:
        event = self._event.c
        asked = (event.leased_until, event.created_at, event.last_attempt_at)
        window = self._part(part, *asked).subquery("w")
        leased = sa.case((window.c.leased_until > self._now, 1))
        claimed = sa.case((window.c.leased_until > self._now, window.c.last_attempt_at))
        columns: list[Any] = [sa.func.count(), sa.func.count(leased), sa.func.min(window.c.created_at)]
        return sa.select(*columns, now(), sa.func.min(claimed)).select_from(window)

    def _narrow(self, filter: Filter) -> Steps[Part | None]:
        for part in self._parts(filter):
            if (yield from self._length(part)) <= CAP:
                return part
        return None

    def _length(self, part: Part) -> Steps[int]:
        window = self._part(part, self._event.c.id).subquery("w")
        [[row]] = yield [self.query(sa.select(sa.func.count()).select_from(window))]
        return int(row[0])

    def _parts(self, filter: Filter) -> Iterator[Part]:
        event = self._event.c
        if filter.aggregate_type is not None and filter.aggregate_id is not None:
            same = (event.aggregate_type == filter.aggregate_type, event.aggregate_id == filter.aggregate_id)
            yield Part(sa.and_(*same), ())
        if filter.status == "failed":
            yield self._failed(filter.destination)
        elif filter.status in ("pending", "due", "scheduled", "parked", "sending", "processing"):
            yield self._pending(filter.destination)
        elif filter.status in ("delivered", "completed") and filter.destination is not None:
            yield self._delivered(filter.destination)

    def _failed(self, destination: str | None) -> Part:
        event = self._event.c
        column = event.failed_destination if self._split else event.destination
        first = (column,) if destination is None else ()
        return Part(self._open(column, destination, "failed"), (*first, event.position))

    def _pending(self, destination: str | None) -> Part:
        event = self._event.c
        column = event.due_destination if self._split else event.destination
        # MariaDB would sort by the name even if it is the same in every row.
        first = (column,) if destination is None else ()
        order = (*first, event.next_attempt_at, event.position)
        hint = self._by_due if destination is not None else ""
        return Part(self._open(column, destination, "pending"), order, hint)

    def _delivered(self, name: str) -> Part:
        event = self._event.c
        delivered = self._equal(event.status, "delivered") & (event.destination == name)
        return Part(delivered & event.delivered_at.is_not(None), (event.delivered_at,))

    def _open(self, column: Any, destination: str | None, status: str) -> Any:
        name = column.is_not(None) if destination is None else column == destination
        return self._equal(self._event.c.status, status) & name

    def _part(self, part: Part, *columns: Any) -> sa.Select[Any]:
        # In index order, so that the planner uses the index.
        chosen = columns or self._columns()
        statement = sa.select(*chosen).where(part.condition).order_by(*part.order).limit(CAP + 1)
        return statement.with_hint(self._event, part.hint, "mysql") if part.hint else statement

    def _window(self, bounds: Bounds) -> sa.Select[Any]:
        return self._in_order(sa.select(*self._columns()), bounds).limit(CAP)

    def _end(self, bounds: Bounds) -> sa.Select[Any]:
        return self._in_order(sa.select(self._event.c.id), bounds).offset(CAP - 1).limit(1)

    def _in_order(self, statement: sa.Select[Any], bounds: Bounds) -> sa.Select[Any]:
        event = self._event.c
        order = event.id.asc() if bounds.ascending else event.id.desc()
        return statement.where(*self._within(event, bounds)).order_by(order)

    def _within(self, columns: Any, bounds: Bounds) -> list[Any]:
        sides = [
            (bounds.above, columns.id.__gt__),
            (bounds.last, columns.id.__le__),
            (bounds.below, columns.id.__lt__),
        ]
        return [compare(self._id(side)) for side, compare in sides if side is not None]

    def _conditions(self, columns: Any, filter: Filter) -> Iterator[Any]:
        for name in EQUAL:
            if (value := getattr(filter, name)) is not None:
                yield columns[name] == value
        if filter.event_id is not None:
            yield columns.event_id == self._id(filter.event_id)
        if filter.since is not None:
            yield columns.created_at >= self.dialect.to_time(filter.since)
        if filter.until is not None:
            yield columns.created_at < self.dialect.to_time(filter.until)
        if filter.rules is not None:
            yield columns.error_message.is_not(None)
        elif filter.error is not None:
            message = sa.func.lower(columns.error_message, type_=sa.Text)
            yield message.contains(filter.error.lower(), autoescape=True)
        if filter.status is not None:
            yield self._in_state(columns, filter.status)

    def _in_state(self, columns: Any, state: str) -> Any:
        if state in ("delivered", "completed"):
            return self._equal(columns.status, "delivered")
        if state in ("failed", "discarded"):
            return self._equal(columns.status, state)
        pending = self._equal(columns.status, "pending")
        if state in ("sending", "processing"):
            return pending & (columns.leased_until > now())
        waiting = pending & (columns.leased_until.is_(None) | (columns.leased_until <= now()))
        due = columns.next_attempt_at
        moments = {
            "pending": sa.true(),
            "due": due <= now(),
            "scheduled": due > now(),
            "parked": due.is_(None),
        }
        return waiting & moments[state]

    def _equal(self, column: Any, status: str) -> Any:
        # Literal: a partial index serves only conditions known before values are bound.
        return column == sa.literal(status, literal_execute=True)

    def _of_event(self, window: sa.Select[Any], own: Any) -> Query:
        columns = window.subquery("w")
        return self.query(self._select(columns).where(columns.c.event_id == own))

    def _select(self, source: Any) -> sa.Select[Any]:
        return sa.select(*self._columns(source), now())

    def _columns(self, source: Any = None) -> Sequence[Any]:
        return [(self._event if source is None else source).c[name] for name in COLUMNS]

    def _id(self, id_: UUID) -> Any:
        return self.dialect.to_uuid(id_)


def _only(part: Part, condition: Any) -> Part:
    return part._replace(condition=part.condition & condition)


def shown(value: Any) -> str | None:
    """Return the value as ``str``, whatever the column holds."""
    if value is None or isinstance(value, str):
        return value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _fits(filter: Filter, destination: Any, error: Any) -> bool:
    """True if the error has the filter's fingerprint, and its text where the filter's rules show it."""
    name, text = shown(destination) or "", shown(error) or ""
    if filter.fingerprint not in (None, fingerprint(name, text).hash):
        return False
    return filter.rules is None or (filter.error or "").lower() in _seen(filter.rules, text).lower()


@lru_cache(maxsize=1_024)
def _seen(rules: Rules, error: str) -> str:
    return rules.scrub(error)


def _page(entries: tuple[Entry, ...], limit: int, end: UUID | None) -> Page:
    """Continue after the last entry, or after the window if the page is not full."""
    return Page(entries, entries[-1].id if len(entries) == limit else end)


def _in_time(filter: Filter, bounds: Bounds) -> Bounds:
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
