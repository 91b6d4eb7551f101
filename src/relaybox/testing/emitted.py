"""The events emitted since a test began, what the test expects, and how they differ."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from types import EllipsisType
from typing import Any, TypeAlias, TypedDict
from uuid import UUID

import msgspec
import sqlalchemy as sa

from relaybox.core.routing import Routes
from relaybox.core.settings import Route
from relaybox.core.values import mask_url
from relaybox.database.connect import Execute, Row, connected, in_memory
from relaybox.database.dialects import DIALECTS
from relaybox.database.drivers.driver import translated
from relaybox.database.drivers.find import async_channel, async_sqlalchemy, channel, find, name_of
from relaybox.database.migrations import rendered
from relaybox.database.schema import now
from relaybox.database.statements.delivery import Query
from relaybox.emit.write import as_uuid
from relaybox.errors import ConfigError, PayloadError, SchemaError, StoreError, UnsupportedConnection, shorten
from relaybox.outbox import Outbox
from relaybox.sinks.sink import describe
from relaybox.wire.codec import Limits, decode, encode_payload

COLUMNS = (
    *("id", "event_id", "destination", "aggregate_type", "aggregate_id", "event_type", "payload"),
    *("payload_data", "payload_encoding", "headers", "idempotency_key", "status", "created_at"),
)
COPIES = ("relaybox-dead-letter-from", "relaybox-replay")
"""Headers of rows that the application did not emit."""

RECENT = 1_000
"""More rows than can be written in the millisecond, by SQLite's clock, in which a test began."""

SHOWN = 20
"""The most events that a message lists."""

NEAREST = 3
EXCERPT = 70

Opened: TypeAlias = Callable[[], AbstractContextManager[Execute]]
"""Opens a function that executes a statement without parameters."""


@dataclass(frozen=True, slots=True)
class EmittedEvent:
    """An emitted event, and the status of its delivery to each destination."""

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
        """Return where it goes, in the order of the routes."""
        return tuple(self.statuses)


class Reader:
    """Reads the events emitted since it was created, through ``opened`` or its own connection."""

    def __init__(self, outbox: Outbox, opened: Opened | None = None) -> None:
        database = outbox.settings.database
        self._event = outbox.tables.event
        self._dialect = DIALECTS[database.partition(":")[0]]
        self._opened = opened or partial(own_connection, database)
        self._apart = database if opened is None else None
        [[moment]] = self._execute(sa.select(now()))
        self._since = self._dialect.from_time(moment)
        newest = sa.select(self._event.c.id).order_by(self._event.c.id.desc()).limit(RECENT)
        try:
            self._known = {as_uuid(row[0]) for row in self._execute(newest)}
        except SchemaError:
            # The test itself may create the tables later.
            self._known = set()

    def read(self, connection: Any = None) -> list[EmittedEvent]:
        """Return what a synchronous connection or session sees, or without one, what is committed."""
        if connection is None:
            return self._events(self.execute(self._select()))
        if _is_async(connection):
            kind = name_of(type(connection))
            raise UnsupportedConnection(f"{kind} is asynchronous: await the method with the leading a")
        return self._events(channel(connection, self._event.insert()).execute(self._query()))

    async def aread(self, connection: Any = None) -> list[EmittedEvent]:
        """Return what an asynchronous connection or session sees, or without one, what is committed."""
        if connection is None:
            return await asyncio.to_thread(self.read)
        if not _is_async(connection):
            kind = name_of(type(connection))
            raise UnsupportedConnection(f"{kind} is synchronous: call the method without the leading a")
        if (asynchronous := async_sqlalchemy(connection)) is not None:
            events: list[EmittedEvent] = await asynchronous.run_sync(self.read)
            return events
        return self._events(await async_channel(connection).execute(self._query()))

    def execute(self, *statements: sa.Executable) -> list[Row]:
        """Execute the statements where committed rows are visible; return the rows of the last."""
        if self._apart is not None:
            check_lasting(self._apart)
        return self._execute(*statements)

    def _execute(self, *statements: sa.Executable) -> list[Row]:
        with self._opened() as execute:
            return [execute(text) for text in self._texts(*statements)][-1]

    def _texts(self, *statements: sa.Executable) -> list[str]:
        dialect: Any = self._dialect.name
        return rendered(dialect, lambda engine: [engine.execute(statement) for statement in statements])

    def _query(self) -> Query:
        return Query(self._texts(self._select())[0], ())

    def _select(self) -> sa.Select[Any]:
        # No parameters, and JSON as text: every driver takes the same query and returns the same values.
        texts = {name: sa.cast(self._event.c[name], sa.Text) for name in ("payload", "headers")}
        since = sa.literal(str(self._dialect.to_time(self._since)), sa.String)
        return (
            sa.select(*(texts.get(name, self._event.c[name]) for name in COLUMNS))
            .where(sa.type_coerce(self._event.c.created_at, sa.String) >= since)
            .order_by(self._event.c.position)
        )

    def _events(self, rows: Iterable[Row]) -> list[EmittedEvent]:
        events: dict[UUID, EmittedEvent] = {}
        for values in rows:
            row = dict(zip(COLUMNS, values, strict=True))
            headers = decode(row["headers"], None, None)
            if as_uuid(row["id"]) in self._known or any(name in headers for name in COPIES):
                continue
            data = None if row["payload_data"] is None else bytes(row["payload_data"])
            event = EmittedEvent(
                as_uuid(row["event_id"]),
                row["event_type"],
                row["aggregate_type"],
                row["aggregate_id"],
                decode(row["payload"], data, row["payload_encoding"]),
                headers,
                row["idempotency_key"],
                self._dialect.from_time(row["created_at"]),
            )
            events.setdefault(event.id, event).statuses[row["destination"]] = row["status"]
        return list(events.values())


def _is_async(connection: Any) -> bool:
    return find(connection).kind.startswith("async")


def check_lasting(database: str) -> None:
    """Raise if only the application's own connection can see the database."""
    if in_memory(database):
        fix = "it is in memory, where no other connection sees it; pass session=, or name a file"
        raise ConfigError(f"database = {mask_url(database)!r}: {fix}")


@contextmanager
def own_connection(database: str) -> Iterator[Execute]:
    """Open a short connection of our own; errors say what a test can do about them."""
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
    """Add a note to the error if SQLite is locked: why that happens in a test."""
    if "database is locked" in str(error):
        error.add_note("A transaction of the test is still open: commit it, or roll it back, before this.")


class Wanted(TypedDict, total=False):
    """What a test expects besides the type.

    An event's ``payload`` and ``headers`` may hold more than expected. A function gets them and returns True
    if they match.
    """

    aggregate_type: str
    aggregate_id: Any
    payload: Any
    headers: Mapping[str, Any] | Callable[[Any], Any]
    destination: str
    idempotency_key: str


@dataclass(frozen=True)
class Expectation:
    """What a test looks for; the type is a pattern, as in a route."""

    event_type: str
    aggregate_type: str | None = None
    aggregate_id: Any = None
    payload: Any | EllipsisType = ...
    headers: Mapping[str, Any] | Callable[[Any], Any] | EllipsisType = ...
    destination: str | None = None
    idempotency_key: str | None = None

    @property
    def said(self) -> dict[str, Any]:
        """Return what is expected besides the type."""
        given = {name: value for name, value in vars(self).items() if value is not None and value is not ...}
        del given["event_type"]
        return given

    def __str__(self) -> str:
        said = (f"{name}={shorten(value)}" for name, value in self.said.items())
        return ", ".join([self.event_type, *said])

    def differences(self, event: EmittedEvent) -> list[str]:
        """Describe what is not as expected; empty if the event matches."""
        found = []
        if not Routes([Route(self.event_type, to="test")]).destinations(event.type):
            found.append(f"its type is {event.type!r}, not {self.event_type!r}")
        aggregate_id = None if self.aggregate_id is None else str(self.aggregate_id)
        for name, wanted in (
            ("aggregate_type", self.aggregate_type),
            ("aggregate_id", aggregate_id),
            ("idempotency_key", self.idempotency_key),
        ):
            if wanted is not None and wanted != (seen := getattr(event, name)):
                found.append(f"its {name} is {shorten(seen)}, not {shorten(wanted)}")
        if self.destination is not None and self.destination not in event.statuses:
            found.append(f"it goes to {', '.join(event.destinations)}, not to {self.destination}")
        found += _content("payload", self.payload, event.payload)
        found += _content("headers", self.headers, event.headers)
        return found


def _content(name: str, wanted: Any, seen: Any) -> Iterator[str]:
    if wanted is ...:
        return
    if not callable(wanted) or isinstance(wanted, type):
        yield from missing(wanted, seen, name)
        return
    try:
        right = wanted(seen)
    except Exception as error:
        yield f"the function for its {name} raised {describe(error)}"
    else:
        if not right:
            yield f"the function for its {name} says no to {shorten(seen)}"


def missing(wanted: Any, seen: Any, path: str) -> Iterator[str]:
    """Describe what of ``wanted`` is not in ``seen``: objects may hold more, other values must be equal.

    Values are compared as they are and as they are stored: ``Decimal("1.5")`` equals ``"1.5"``.
    """
    if isinstance(wanted, Mapping) and isinstance(seen, Mapping):
        for key, value in wanted.items():
            name = key if isinstance(key, str) else str(next(iter(_stored({key: None})), key))
            if name in seen:
                yield from missing(value, seen[name], f"{path}[{name!r}]")
            else:
                yield f"{path}[{name!r}] is missing"
    elif _is_array(wanted) and isinstance(seen, list):
        if len(wanted) != len(seen):
            yield f"{path} has {len(seen)} item{'' if len(seen) == 1 else 's'}, not {len(wanted)}"
        for index, (value, other) in enumerate(zip(wanted, seen, strict=False)):
            yield from missing(value, other, f"{path}[{index}]")
    elif not _equal(wanted, seen):
        stored = _stored(wanted)
        if isinstance(stored, Mapping | list) and not isinstance(wanted, Mapping | list | tuple):
            yield from missing(stored, seen, path)
        elif not _equal(stored, seen):
            yield f"{path} is {shorten(seen)}, not {shorten(wanted)}"


def _is_array(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _equal(wanted: Any, seen: Any) -> bool:
    # In JSON, unlike in Python, true is not 1.
    same_kind = isinstance(wanted, bool) == isinstance(seen, bool) or not isinstance(wanted, bool | int)
    return same_kind and bool(wanted == seen)


def _stored(value: Any) -> Any:
    """Return a value as a database returns it, or unchanged if it cannot be stored, such as a matcher."""
    try:
        text, data, _ = encode_payload(value, Limits())
    except PayloadError:
        return value
    return data if text is None else msgspec.json.decode(text)


def _events(count: int) -> str:
    return f"{count or 'no'} event{'' if count == 1 else 's'}"


def not_found(
    expected: Expectation, events: Sequence[EmittedEvent], found: Sequence[EmittedEvent], count: int | None
) -> str:
    """Return the message of a failed ``assert_emitted``, without hints."""
    if found and count is not None:
        return "\n".join([f"{_events(len(found))} of {count} expected: {expected}", *table(found)])
    lines = [f"no event was emitted that is: {expected}", *_near(expected, events)]
    if events:
        lines += [f"emitted since the test began: {_events(len(events))}", *table(events)]
    return "\n".join(lines)


def found_instead(expected: Expectation, found: Sequence[EmittedEvent]) -> str:
    """Return the message of a failed ``refute_emitted``."""
    return "\n".join([f"{_events(len(found))} emitted that should not be: {expected}", *table(found)])


def _near(expected: Expectation, events: Sequence[EmittedEvent]) -> Iterator[str]:
    """Yield the events that differ least; one of another type only if nothing else differs."""
    candidates = []
    for event in events:
        differences = expected.differences(event)
        of_type = not any(text.startswith("its type is") for text in differences)
        if of_type or (expected.said and len(differences) == 1):
            candidates.append((event, differences))
    for event, differences in sorted(candidates, key=lambda each: len(each[1]))[:NEAREST]:
        named = f"{event.type} of {event.aggregate_type} {event.aggregate_id}"
        yield f"near: {named}: {'; '.join(differences)}"


def table(events: Sequence[EmittedEvent]) -> list[str]:
    """Return the events as a table, one a line."""
    rows = [("event type", "aggregate", "destinations", "payload")]
    for event in events[:SHOWN]:
        aggregate = f"{event.aggregate_type} {event.aggregate_id}"
        rows.append((event.type, aggregate, ", ".join(event.destinations), _excerpt(event.payload)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    more = len(events) - SHOWN
    return [*lines, f"  … and {more} more"] if more > 0 else lines


def _excerpt(payload: Any) -> str:
    text = repr(payload) if isinstance(payload, bytes) else json.dumps(payload, ensure_ascii=False)
    return text if len(text) <= EXCERPT else f"{text[: EXCERPT - 1]}…"
