"""Operators' searches and counts.

A query reads at most one window: of an index that leads to few rows, else of the primary key, by time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from relaybox.core.fingerprint import LOOKED_AT, fingerprint
from relaybox.core.redact import Rules
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Steps
from relaybox.stores.ledger import BATCH, CAP, Counted, Entry, Filter, Page
from relaybox.stores.sql.expressions import Expressions, Part, Parts
from relaybox.stores.sql.rows import shown
from relaybox.stores.sql.windows import Bounds, Windows, in_time

NEAR = 2_000
"""Rows of one event are created together: the last one is within this many rows of the first."""

WINDOWS = 20
"""Windows that a count reads if no index leads to the rows."""


class Search:
    """Runs searches on one database."""

    def __init__(self, own: Expressions) -> None:
        self._own = own
        self._parts = Parts(own)
        self._windows = Windows(own)

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
            ids = self._own.ids(entry.id for entry in entries)
            narrow: Part | None = Part(self._own.event.c.id.in_(ids), ())
        else:
            bounds = in_time(filter, bounds)
            narrow = yield from self._narrow(filter)
        if narrow is not None:
            [rows] = yield [self._windows.found(self._parts.rows(narrow), filter, limit, bounds)]
            # The part may have grown since it was counted, and would be cut off.
            if filter.event_id is not None or (yield from self._length(narrow)) <= CAP:
                return _page(tuple(map(self._own.entry, rows)), limit, None)
        [rows] = yield [self._windows.found(self._windows.rows(bounds), filter, limit, bounds)]
        ends = [] if len(rows) == limit else (yield [self._windows.end(bounds)])[0]
        end = self._own.shown_id(ends[0][0]) if ends else None
        return _page(tuple(map(self._own.entry, rows)), limit, end)

    def find(self, id_: UUID, *, whole: bool = False, exact: bool = False) -> Steps[tuple[Entry, ...]]:
        """Return the delivery with that id (``exact``: only), or (``whole``: only) all of that event.

        An event's other rows follow its first at once; later copies share the aggregate, or are very new.
        """
        event, own = self._own.event.c, self._own.dialect.to_uuid(id_)
        [[*rows]] = yield [self._own.query(self._own.select(self._own.event).where(event.id == own))]
        if exact or (rows and not whole and self._own.entry(rows[0]).event_id != id_):
            return tuple(map(self._own.entry, rows))
        near = sa.select(*self._own.columns()).where(event.id >= own).order_by(event.id).limit(NEAR)
        [[*rows]] = yield [self._of_event(near, own)]
        if not rows:
            [[*rows]] = yield [self._of_event(self._windows.rows(Bounds()), own)]
        if rows:
            first = self._own.entry(rows[0])
            same = Filter(aggregate_type=first.aggregate_type, aggregate_id=first.aggregate_id)
            [part] = self._parts.of(same)
            [[*others]] = yield [self._of_event(self._parts.rows(part), own)]
            rows += others
        entries = {entry.id: entry for entry in map(self._own.entry, rows)}
        return tuple(sorted(entries.values(), key=lambda entry: entry.position))

    def tally(self, filter: Filter) -> Steps[Counted]:
        """Count matching rows; if no index leads to few rows, only in the first windows."""
        if filter.event_id is not None:
            page = yield from self.page(filter, CAP, Bounds())
            return Counted(len(page.entries), page.cursor is not None)
        broad: Part | None = None
        for part in self._parts.of(filter):
            if (yield from self._length(part)) <= CAP:
                return Counted((yield from self._matching(self._parts.rows(part), filter)), False)
            broad = broad or part
        if broad is not None:
            return Counted(min(CAP, (yield from self._matching(self._parts.rows(broad), filter))), True)
        return (yield from self._tally_windows(filter))

    def _tally_windows(self, filter: Filter) -> Steps[Counted]:
        bounds, count = in_time(filter, Bounds()), 0
        for _ in range(WINDOWS):
            count += yield from self._matching(self._windows.rows(bounds), filter)
            if count >= CAP:
                return Counted(CAP, True)
            [ends] = yield [self._windows.end(bounds)]
            if not ends:
                return Counted(count, False)
            bounds = replace(bounds, below=self._own.shown_id(ends[0][0]))
        return Counted(count, True)

    def _matching(self, window: sa.Select[Any], filter: Filter) -> Steps[int]:
        rows = window.subquery("w")
        conditions = self._windows.conditions(rows.c, filter)
        if filter.fingerprint is None and filter.rules is None:
            counted = sa.select(sa.func.count()).select_from(rows).where(*conditions)
            [[[count]]] = yield [self._own.query(counted)]
            return int(count)
        error: Any = rows.c.error_message
        error = error if filter.rules is not None else sa.func.substr(error, 1, LOOKED_AT)
        [errors] = yield [self._own.query(sa.select(rows.c.destination, error).where(*conditions))]
        return sum(_fits(filter, destination, error) for destination, error in errors)

    def _narrow(self, filter: Filter) -> Steps[Part | None]:
        for part in self._parts.of(filter):
            if (yield from self._length(part)) <= CAP:
                return part
        return None

    def _length(self, part: Part) -> Steps[int]:
        window = self._parts.rows(part, self._own.event.c.id).subquery("w")
        [[row]] = yield [self._own.query(sa.select(sa.func.count()).select_from(window))]
        return int(row[0])

    def _of_event(self, window: sa.Select[Any], own: Any) -> Query:
        columns = window.subquery("w")
        return self._own.query(self._own.select(columns).where(columns.c.event_id == own))


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
