"""What was emitted since a test began: the rows of the outbox, read through any connection or by its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias
from uuid import UUID

import sqlalchemy as sa

from relaybox.core.values import mask_url
from relaybox.database.connect import Execute, connected, in_memory
from relaybox.database.dialects import DIALECTS
from relaybox.database.drivers.driver import translated
from relaybox.database.drivers.find import async_channel, async_sqlalchemy, channel, find, name_of
from relaybox.database.migrations import rendered
from relaybox.database.schema import now
from relaybox.database.statements.delivery import Query
from relaybox.emit.write import as_uuid
from relaybox.errors import ConfigError, SchemaError, StoreError, UnsupportedConnection
from relaybox.outbox import Outbox
from relaybox.wire.codec import decode

COLUMNS = (
    *("id", "event_id", "destination", "aggregate_type", "aggregate_id", "event_type", "payload"),
    *("payload_data", "payload_encoding", "headers", "idempotency_key", "status", "created_at"),
)
COPIES = ("relaybox-dead-letter-from", "relaybox-replay")
"""Headers of rows that nobody emitted."""

RECENT = 1_000
"""More rows than can have been written in the millisecond, by SQLite's clock, in which a test began."""


Opened: TypeAlias = Callable[[], AbstractContextManager[Execute]]
"""Opens what executes a statement without parameters."""


@dataclass(frozen=True, slots=True)
class EmittedEvent:
    """An event as it was emitted, and how the delivery to each of its destinations stands."""

    id: UUID
    type: str
    aggregate_type: str
    aggregate_id: str
    payload: Any
    headers: dict[str, Any]
    idempotency_key: str
    created_at: datetime
    statuses: dict[str, str] = field(default_factory=dict)
    """``pending``, ``delivered``, ``failed`` or ``discarded``, by destination."""

    @property
    def destinations(self) -> tuple[str, ...]:
        """Where it goes, in the order of the routes."""
        return tuple(self.statuses)


class Reader:
    """Reads the events that were emitted since it was made; ``opened`` instead of a connection of its own."""

    def __init__(self, outbox: Outbox, opened: Opened | None = None) -> None:
        database = outbox.settings.database
        self._event = outbox.tables.event
        self._dialect = DIALECTS[database.partition(":")[0]]
        self._opened = opened or partial(own_connection, database)
        self._apart = database if opened is None else None
        self._since = self._now()
        self._known = self._recent()

    def read(self, connection: Any = None) -> list[EmittedEvent]:
        """What a synchronous connection or session sees, or without one, what is committed."""
        if connection is None:
            return self._read_committed()
        if find(connection).kind.startswith("async"):
            kind = name_of(type(connection))
            raise UnsupportedConnection(f"{kind} is asynchronous: await the twin that begins with an a")
        way = channel(connection, self._event.insert())
        return self._events(way.execute(self._query()))

    async def aread(self, connection: Any = None) -> list[EmittedEvent]:
        """``read``, on an asynchronous connection or session."""
        if connection is None:
            return await asyncio.to_thread(self._read_committed)
        if not find(connection).kind.startswith("async"):
            kind = name_of(type(connection))
            raise UnsupportedConnection(f"{kind} is synchronous: call the twin without the leading a")
        if (asynchronous := async_sqlalchemy(connection)) is not None:
            events: list[EmittedEvent] = await asynchronous.run_sync(self.read)
            return events
        return self._events(await async_channel(connection).execute(self._query()))

    def _read_committed(self) -> list[EmittedEvent]:
        if self._apart is not None:
            check_lasting(self._apart)
        with self._opened() as execute:
            return self._events(execute(self._query().sql))

    def _now(self) -> datetime:
        with self._opened() as execute:
            [[moment]] = execute(self._text(sa.select(now())))
        return self._dialect.from_time(moment)

    def _recent(self) -> frozenset[UUID]:
        """The ids of the newest rows there are."""
        newest = sa.select(self._event.c.id).order_by(self._event.c.id.desc()).limit(RECENT)
        try:
            with self._opened() as execute:
                return frozenset(as_uuid(row[0]) for row in execute(self._text(newest)))
        except SchemaError:
            # The test itself may be about to make the tables.
            return frozenset()

    def _query(self) -> Query:
        # No parameters, and JSON as text: so every driver takes the same query and gives the same values.
        texts = {name: sa.cast(self._event.c[name], sa.Text) for name in ("payload", "headers")}
        since = sa.literal(str(self._dialect.to_time(self._since)), sa.String)
        found = (
            sa.select(*(texts.get(name, self._event.c[name]) for name in COLUMNS))
            .where(sa.type_coerce(self._event.c.created_at, sa.String) >= since)
            .order_by(self._event.c.position)
        )
        return Query(self._text(found), ())

    def _text(self, statement: sa.Select[Any]) -> str:
        # The name of one of the dialects, which is what is wanted.
        [text] = rendered(self._dialect.name, lambda engine: engine.execute(statement))  # type: ignore[arg-type]
        return text

    def _events(self, rows: Iterable[Sequence[Any]]) -> list[EmittedEvent]:
        events: dict[UUID, EmittedEvent] = {}
        for values in rows:
            row = dict(zip(COLUMNS, values, strict=True))
            headers = decode(row["headers"], None, None)
            if as_uuid(row["id"]) in self._known or any(name in headers for name in COPIES):
                continue
            event = self._event_of(row, headers)
            events.setdefault(event.id, event).statuses[row["destination"]] = row["status"]
        return list(events.values())

    def _event_of(self, row: dict[str, Any], headers: dict[str, Any]) -> EmittedEvent:
        data = None if row["payload_data"] is None else bytes(row["payload_data"])
        return EmittedEvent(
            as_uuid(row["event_id"]),
            row["event_type"],
            row["aggregate_type"],
            row["aggregate_id"],
            decode(row["payload"], data, row["payload_encoding"]),
            headers,
            row["idempotency_key"],
            self._dialect.from_time(row["created_at"]),
        )


def check_lasting(database: str) -> None:
    """Raise where only the application's own connection can see the database."""
    if in_memory(database):
        shown = mask_url(database)
        fix = "it is in memory, where no other connection sees it; pass session=, or name a file"
        raise ConfigError(f"database = {shown!r}: {fix}")


@contextmanager
def own_connection(database: str) -> Iterator[Execute]:
    """A short connection of our own; errors say what a test can do about them."""
    try:
        with connected(database, create=False) as execute:
            yield execute
    except StoreError as error:
        cause = error.__cause__
        ours = cause if cause is None else translated(cause)
        if isinstance(ours, SchemaError):
            raise ours from cause
        note_if_locked(error)
        raise


def note_if_locked(error: StoreError) -> None:
    """Say why SQLite is locked in a test."""
    if "database is locked" in str(error):
        error.add_note("A transaction of the test is still open: commit it, or roll it back, before this.")
