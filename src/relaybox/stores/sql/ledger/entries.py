"""Deliveries as operators see them: searches, contents and attempts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from relaybox.core.rollout import HEADER, is_shadow
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Row, Steps
from relaybox.stores.ledger import BATCH, Attempt, Content, Counted, Entry, Filter, Page
from relaybox.stores.sql.expressions import Expressions
from relaybox.stores.sql.rows import shown
from relaybox.stores.sql.search import Search
from relaybox.stores.sql.store import Driver, Topic, driven
from relaybox.stores.sql.windows import Bounds


class SqlEntries(Topic):
    """Finds deliveries, and what belongs to them."""

    def __init__(self, driver: Driver, sql: Statements, expressions: Expressions) -> None:
        super().__init__(driver, sql)
        self._own = expressions
        self._search = Search(expressions)

    @driven
    def search(self, filter: Filter, limit: int, cursor: UUID | None = None) -> Steps[Page]:
        """Return entries, newest first. A short page with a cursor has more to come."""
        return self._search.page(filter, limit, Bounds(below=cursor))

    @driven
    def walk(self, filter: Filter, cursor: UUID | None, last: UUID, limit: int = BATCH) -> Steps[Page]:
        """Return entries, oldest first, up to ``last``."""
        return self._search.page(filter, limit, Bounds(above=cursor, last=last, ascending=True))

    @driven
    def count(self, filter: Filter) -> Steps[Counted]:
        """Count matching rows up to ``CAP``; a long search reads only its first windows."""
        return self._search.tally(filter)

    @driven
    def newest(self) -> Steps[UUID | None]:
        """Return the id of the newest row."""
        id_ = self._own.event.c.id
        [rows] = yield [self._own.query(sa.select(id_).order_by(id_.desc()).limit(1))]
        return self.dialect.from_uuid(rows[0][0]) if rows else None

    @driven
    def find(self, id_: UUID, *, exact: bool = False) -> Steps[tuple[Entry, ...]]:
        """Return the delivery with that id, or (unless ``exact``) all of the event with that id."""
        return self._search.find(id_, exact=exact)

    @driven
    def content(self, id_: UUID) -> Steps[Content | None]:
        """Return the content of a delivery."""
        [rows] = yield [self.sql("content", id=self.dialect.to_uuid(id_))]
        return self._content(rows[0]) if rows else None

    async def contents(self, ids: Collection[UUID]) -> Mapping[UUID, Content]:
        """Return the contents of these deliveries."""
        event = self._own.event.c
        columns = (event.payload, event.payload_data, event.payload_encoding, event.headers)
        rows = await self._of(ids, *columns) if ids else []
        return {self.dialect.from_uuid(row[0]): self._content(row[1:]) for row in rows}

    async def shadowed(self, ids: Collection[UUID]) -> frozenset[UUID]:
        """Return which of these deliveries are in shadow."""
        headers = self._own.event.c.headers
        marked = sa.cast(headers, sa.String).like(f"%{HEADER}%")
        rows = await self._of(ids, headers, where=[marked]) if ids else []
        return frozenset(self.dialect.from_uuid(id_) for id_, found in rows if is_shadow(found))

    @driven
    def attempts(self, id_: UUID) -> Steps[tuple[Attempt, ...]]:
        """Return the recorded failed attempts of a delivery, oldest first."""
        [rows] = yield [self.sql("attempts", id=self.dialect.to_uuid(id_))]
        return tuple(
            Attempt(attempt, self.dialect.from_time(at), relay, error) for attempt, at, relay, error in rows
        )

    @driven
    def head(self, destination: str, ordering_key: str, *, block: bool) -> Steps[Entry | None]:
        """Return the first open row of a key."""
        [rows] = yield [self.sql("head", destination=destination, key=ordering_key, block=block)]
        return self._own.entry(rows[0]) if rows else None

    @driven
    def _of(self, ids: Collection[UUID], *columns: Any, where: Collection[Any] = ()) -> Steps[list[Row]]:
        event = self._own.event.c
        found = sa.select(event.id, *columns).where(event.id.in_(self._own.ids(ids)), *where)
        [rows] = yield [self._own.query(found)]
        return rows

    def _content(self, row: Row) -> Content:
        payload, data, encoding, headers = row
        if not self.dialect.typed:
            payload, encoding, headers = shown(payload), shown(encoding), shown(headers) or ""
            data = data if data is None or isinstance(data, bytes) else str(data).encode()
        return Content(payload, data, encoding, headers)
