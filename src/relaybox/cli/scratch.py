"""Two histories side by side on disk: what was recorded, and the rows of one destination.

In a temporary SQLite database that disappears with its connection, so that neither has to fit into memory:
64 MiB of it, and the operating system, keep the rest.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from relaybox.errors import StoreError
from relaybox.ledger import Entry

_TABLES = """
PRAGMA cache_size = -65536;
PRAGMA journal_mode = OFF;
CREATE TABLE recorded (event BLOB, place INTEGER, digest BLOB, PRIMARY KEY (event, place)) WITHOUT ROWID;
CREATE TABLE committed (
    event BLOB, position INTEGER, ordering_key TEXT, status TEXT, sent INTEGER, created INTEGER,
    compared INTEGER, PRIMARY KEY (event, position)
) WITHOUT ROWID;
"""
_DIGESTS = """
SELECT place, digest FROM recorded WHERE event = ? AND digest IS NOT NULL ORDER BY place"""

# With min(), SQLite takes the other columns from the row that has it: that of the event, before its replays.
_FATES = """
SELECT event, ordering_key, min(position) AS position, status, max(sent), created, count(*),
    (SELECT min(place) FROM recorded WHERE recorded.event = committed.event),
    (SELECT count(*) FROM recorded WHERE recorded.event = committed.event)
FROM committed WHERE compared GROUP BY event ORDER BY ordering_key, position"""
_STRANGERS = """
SELECT event, min(place) FROM recorded
WHERE NOT EXISTS (SELECT 1 FROM committed WHERE committed.event = recorded.event)
GROUP BY event ORDER BY min(place)"""
_LEFT_OUT = """
SELECT count(*) FROM (SELECT event FROM committed GROUP BY event HAVING NOT max(compared)) AS uncompared
WHERE EXISTS (SELECT 1 FROM recorded WHERE recorded.event = uncompared.event)"""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Fate(NamedTuple):
    """An event: its row, and where it was recorded first and how often."""

    event: UUID
    key: str | None
    position: int
    status: str
    sent: bool
    """Whether it, or a replay of it, was delivered before what was recorded was read."""
    created: datetime
    rows: int
    place: int | None
    times: int


class Scratch:
    """Takes both histories in any order; then says what became of each event."""

    def __init__(self) -> None:
        # A name that is empty is a file that has no name. Two loops may use it, one after the other.
        self._database = sqlite3.connect("", check_same_thread=False)
        self._database.executescript(_TABLES)

    def close(self) -> None:
        """Leave nothing behind."""
        self._database.close()

    def record(self, records: Iterable[tuple[int, UUID, bytes | None]]) -> None:
        """Add what was recorded: its place, the event, and the digest of its payload."""
        self._database.executemany(
            "INSERT OR IGNORE INTO recorded (place, event, digest) VALUES (?, ?, ?)",
            ((place, event.bytes, digest) for place, event, digest in records),
        )

    def commit(self, rows: Iterable[tuple[Entry, bool, bool]]) -> None:
        """Add rows, with whether they count as sent, and whether they are compared or only known."""
        self._database.executemany(
            "INSERT OR REPLACE INTO committed VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    entry.event_id.bytes,
                    entry.position,
                    entry.ordering_key,
                    entry.status,
                    sent,
                    microseconds(entry.created_at),
                    compared,
                )
                for entry, sent, compared in rows
            ),
        )

    def digests(self, event: UUID) -> Sequence[tuple[int, bytes]]:
        """The places where an event was recorded with a payload."""
        return self._database.execute(_DIGESTS, (event.bytes,)).fetchall()

    def has_payloads(self) -> bool:
        """Whether any record has a payload."""
        some = "SELECT 1 FROM recorded WHERE digest IS NOT NULL LIMIT 1"
        return self._database.execute(some).fetchone() is not None

    def size(self) -> int:
        """How many deliveries were recorded."""
        [number] = self._database.execute("SELECT count(*) FROM recorded").fetchone()
        return int(number)

    def fates(self) -> Iterator[Fate]:
        """Every event that is compared, by key and position."""
        for event, key, position, status, sent, created, *rest in self._database.execute(_FATES):
            moment = EPOCH + timedelta(microseconds=created)
            yield Fate(UUID(bytes=event), key, position, status, bool(sent), moment, *rest)

    def left_out(self) -> int:
        """How many events were recorded and have a row, but none that is compared."""
        [number] = self._database.execute(_LEFT_OUT).fetchone()
        return int(number)

    def strangers(self) -> Iterator[tuple[UUID, int]]:
        """What was recorded and has no row, and where it was recorded first."""
        for event, place in self._database.execute(_STRANGERS):
            yield UUID(bytes=event), place


def microseconds(moment: datetime) -> int:
    """Since the beginning of 1970."""
    return (moment - EPOCH) // timedelta(microseconds=1)


@contextmanager
def scratch() -> Iterator[Scratch]:
    """A scratch, until the end of the block."""
    made = Scratch()
    try:
        yield made
    except sqlite3.Error as error:
        fix = "it is where temporary files are; name another directory with SQLITE_TMPDIR"
        raise StoreError(f"the comparison needs room on disk: {error}; {fix}") from error
    finally:
        made.close()
