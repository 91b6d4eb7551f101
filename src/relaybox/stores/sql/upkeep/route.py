"""Give events without a route to their destinations, for ``relay/upkeep/route.py``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

from relaybox.core.event import beside
from relaybox.database.pools.places import UPKEEP
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Row, Steps
from relaybox.errors import RowRefused
from relaybox.stores.sql.rows import addressable, listed, number, to_json
from relaybox.stores.sql.store import Driver, Topic, driven
from relaybox.stores.sql.upkeep.term import under_term
from relaybox.stores.upkeep import Router, Slice, StoredEvent, Turn

ROUTED = 100
"""Events routed per transaction; all are read with their payloads."""
log = logging.getLogger(__name__)


class SqlRoute(Topic):
    """Replaces unrouted rows by one row for each of their destinations."""

    def __init__(self, driver: Driver, sql: Statements) -> None:
        super().__init__(driver, sql, UPKEEP)
        self._refused: set[Any] = set()
        """Ids of unrouted rows that violate a constraint and were logged."""

    @driven
    def current_term(self) -> Steps[int | None]:
        """Return the term of the current leader, or None."""
        [rows] = yield [self.sql("current_term")]
        return rows[0][0] if rows else None

    async def route(self, term: int, router: Router, after: Turn | None, limit: int) -> Slice[Turn] | None:
        """Check the next ``limit`` unrouted events, and route those that a route takes, by position.

        If one is locked, raise and route none of its batch: a later event of its key must not overtake it.
        """
        # Ask the routes between two transactions: a route may be the application's function.
        seen = await self._unrouted(term, after, limit)
        if seen is None:
            return None
        wanted = [
            (number(position), id_)
            for id_, _, position, event_type in seen
            # A row that cannot be addressed would be removed without a copy: leave it.
            if addressable(self.dialect, id_) and isinstance(event_type, str) and router.takes(event_type)
        ]
        ids = [id_ for _, id_ in sorted(wanted, key=itemgetter(0))]
        parts = [ids[start : start + ROUTED] for start in range(0, len(ids), ROUTED)]
        changed = await self._route_parts(term, router, parts)
        if changed is None:
            return None
        if len(seen) < limit:
            return Slice(changed, None)
        _, due, position, _ = seen[-1]
        return Slice(changed, (self.dialect.from_time(due), position))

    async def _route_parts(self, term: int, router: Router, parts: Iterable[Sequence[Any]]) -> int | None:
        changed = 0
        for part in parts:
            routed = await self._route_part(term, router, part)
            if routed is None:
                return None
            changed += routed
        return changed

    async def _route_part(self, term: int, router: Router, ids: Sequence[Any]) -> int | None:
        """Route these together; if the database refuses a row, one by one, so that only that row stays."""
        targets = _targets(await self._read(ids), router)
        try:
            return await self.run(lambda: self._write(term, targets), checked=True)
        except RowRefused as error:
            if len(ids) == 1:
                if ids[0] not in self._refused:
                    # PostgreSQL appends the row with its payload.
                    problem = str(error).partition(" DETAIL:")[0]
                    log.warning("row %s stays unrouted, because it breaks a constraint: %s", ids[0], problem)
                self._refused.update(ids)
                return 0
        return await self._route_parts(term, router, ([id_] for id_ in ids))

    @driven
    def _unrouted(self, term: int, after: Turn | None, limit: int) -> Steps[list[Row] | None]:
        if after is None:
            page = self.sql("unrouted", limit=limit)
        else:
            since, position = self.dialect.to_time(after[0]), after[1]
            page = self.sql("unrouted_after", since=since, position=position, limit=limit)
        led, rows = yield [self.sql("fence", term=term), page]
        return rows if led else None

    @driven
    def _read(self, ids: Sequence[Any]) -> Steps[list[tuple[Any, StoredEvent]]]:
        [rows] = yield [self.sql("waiting", ids=listed(self.dialect, ids))]
        events = []
        for id_, event_id, *rest in rows:
            # A row edited by hand stays unrouted, without holding up the others.
            with suppress(ValueError, TypeError, AttributeError):
                events.append((id_, StoredEvent(self.dialect.from_uuid(event_id), *rest)))
        return events

    def _write(self, term: int, targets: Sequence[dict[str, Any]]) -> Steps[int | None]:
        """Check again under the locks, because an operator may have changed rows meanwhile."""
        if not targets:
            return 0
        if self.dialect.one_statement:
            gone = yield from under_term(self.sql, term, "route", targets=to_json(targets))
            return None if gone is None else len(gone)
        wanted = list({target["id"]: None for target in targets})
        found = yield from under_term(self.sql, term, "lock_unrouted", ids=wanted)
        if found is None:
            return None
        ids = [row[0] for row in found]
        if ids:
            route = self.sql("route", targets=to_json([one for one in targets if one["id"] in ids]))
            yield [route, self.sql("forget_attempts", ids=ids), self.sql("remove", ids=ids)]
        return len(ids)


def _targets(events: Iterable[tuple[Any, StoredEvent]], router: Router) -> list[dict[str, Any]]:
    """Return a record per new row; ``line`` keeps the order of an event's targets."""
    return [
        {
            "id": id_,
            "copy": beside(event.event_id, line + 1),
            "line": line,
            "destination": target.destination,
            "max_attempts": target.max_attempts,
            "final": target.final,
            # Leave it out if it is None: some JSON functions read null as text.
            **({} if target.ordering_key is None else {"ordering_key": target.ordering_key}),
        }
        for id_, event in events
        for line, target in enumerate(router.targets(event))
    ]
