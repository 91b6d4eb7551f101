"""Reads claimed rows, which may have been edited by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import msgspec

from relaybox.core.event import Delivery
from relaybox.core.ordering import Candidate
from relaybox.database.dialects import Dialect, Unreadable

KEY, POSITION = map(Delivery.__struct_fields__.index, ("ordering_key", "position"))

# Every database parses a UUID from 32 digits; text columns store exactly these.
_json = msgspec.json.Encoder(uuid_format="hex")


def to_json(value: Any) -> str:
    """Return the value as the JSON of a parameter."""
    return _json.encode(value).decode()


class Unread(NamedTuple):
    """A row that cannot become a delivery."""

    id: Any
    key: Any
    error: str

    @property
    def text_id(self) -> bytes | None:
        """Return the id if it may be SQLite text that is not valid UTF-8, which arrives as bytes."""
        try:
            if isinstance(self.id, bytes):
                self.id.decode()
        except UnicodeDecodeError:
            return self.id  # type: ignore[no-any-return]
        return None


def read(
    dialect: Dialect, rows: Sequence[Sequence[Any]], ordered: bool
) -> tuple[tuple[Delivery, ...], Sequence[Delivery], Sequence[Unread]]:
    """Convert claimed rows, sorted by position.

    Return the deliveries, those that follow an unread row of their key, and the unread rows.
    """
    try:
        return tuple(map(dialect.delivery, rows)), (), ()
    except Unreadable:
        pass
    deliveries: list[Delivery] = []
    behind: list[Delivery] = []
    unread: list[Unread] = []
    blocked: set[Any] = set()
    for row in rows:
        try:
            delivery = dialect.delivery(row)
        except Unreadable as error:
            unread.append(_unread(row[0], row[KEY], str(error)))
            if ordered and row[KEY] is not None:
                blocked.add(row[KEY])
        else:
            (behind if delivery.ordering_key in blocked else deliveries).append(delivery)
    return tuple(deliveries), behind, unread


def without_unaddressable(
    dialect: Dialect, rows: Sequence[Sequence[Any]]
) -> tuple[Sequence[Sequence[Any]], list[Unread]]:
    """Split off the rows whose id or ordering key a statement cannot express."""
    if dialect.typed:
        return rows, []
    named: list[Sequence[Any]] = []
    unread: list[Unread] = []
    for row in rows:
        id_, key = row[:2]
        if nameable(id_) and (key is None or nameable(key)):
            named.append(row)
        else:
            unread.append(_unread(id_, key, "its id or its ordering_key is not a text, or has a NUL in it"))
    return named, unread


def candidates(dialect: Dialect, rows: Sequence[Sequence[Any]]) -> list[Candidate]:
    """Convert rows to candidates for the ordering rules."""
    if dialect.typed:
        return list(starmap(Candidate, rows))
    # A position that is not a number cannot be compared, and a row without a valid id cannot be leased.
    return [
        Candidate(id_, key, number(position), free and nameable(id_), number(suspect), *size)
        for id_, key, position, free, suspect, *size in rows
    ]


def listed(dialect: Dialect, ids: Iterable[Any]) -> Any:
    """Return the ids as the parameter of a statement: PostgreSQL takes an array."""
    return array(ids) if dialect.one_statement else list(ids)


def array(ids: Iterable[Any]) -> str:
    """Return the ids as an array of PostgreSQL."""
    return f"{{{','.join(map(str, ids))}}}"


def shown(value: Any) -> str | None:
    """Return the value as ``str``, whatever the column holds."""
    if value is None or isinstance(value, str):
        return value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def addressable(dialect: Dialect, id_: Any) -> bool:
    """True if a statement can address the row with this id."""
    return dialect.typed or nameable(id_)


def nameable(value: Any) -> bool:
    """True if a statement can express this value: SQLite's JSON ends a text at its first NUL."""
    return isinstance(value, str) and "\0" not in value


def number(value: Any) -> int:
    """Return the value, or 0 if it is not an integer and cannot be compared."""
    return value if isinstance(value, int) else 0


def _unread(id_: Any, key: Any, error: str) -> Unread:
    return Unread(id_, key, f"this row cannot be read: {error}")
