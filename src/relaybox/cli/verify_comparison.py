"""What was recorded and what was committed, side by side on disk, and what became of each event."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Literal, NamedTuple
from uuid import UUID

from relaybox.database.statements import histories
from relaybox.errors import StoreError
from relaybox.stores.ledger import Entry
from relaybox.testing.checker import Committed, Overtaking, overtakings

Difference = Literal["lost", "phantom", "disorder", "altered", "duplicate"]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Fate(NamedTuple):
    """An event: its row, and where it was recorded first and how often."""

    event: UUID
    key: str | None
    position: int
    status: str
    sent: bool
    """True if it, or a replay of it, was delivered before what was recorded was read."""
    created: datetime
    rows: int
    place: int | None
    times: int


class Histories:
    """Two histories side by side on disk: what was recorded, and the rows of one destination.

    They are in a temporary SQLite database that disappears with its connection, so that neither has to fit
    into memory: it and the operating system keep 64 MiB of them there.
    """

    def __init__(self) -> None:
        # A name that is empty is a file that has no name. Two loops may use it, one after the other.
        self._database = sqlite3.connect("", check_same_thread=False)
        self._database.executescript(histories.TABLES)

    def close(self) -> None:
        """Remove the database."""
        self._database.close()

    def record(self, records: Iterable[tuple[int, UUID, bytes | None]]) -> None:
        """Add what was recorded: its place, the event, and the digest of its payload."""
        self._database.executemany(
            histories.RECORD,
            ((place, event.bytes, digest) for place, event, digest in records),
        )

    def commit(self, rows: Iterable[tuple[Entry, bool, bool]]) -> None:
        """Add rows; the flags are True if a row counts as sent, and if it is compared and not only known."""
        self._database.executemany(
            histories.COMMIT,
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
        """Return the places where an event was recorded with a payload."""
        return self._database.execute(histories.DIGESTS, (event.bytes,)).fetchall()

    def has_payloads(self) -> bool:
        """Return True if any record has a payload."""
        return self._database.execute(histories.ANY_PAYLOAD).fetchone() is not None

    def size(self) -> int:
        """Return the number of deliveries that were recorded."""
        [number] = self._database.execute(histories.SIZE).fetchone()
        return int(number)

    def fates(self) -> Iterator[Fate]:
        """Yield every event that is compared, by key and position."""
        for event, key, position, status, sent, created, *rest in self._database.execute(histories.FATES):
            moment = EPOCH + timedelta(microseconds=created)
            yield Fate(UUID(bytes=event), key, position, status, bool(sent), moment, *rest)

    def left_out(self) -> int:
        """Return the number of events that were recorded and have rows, but none that is compared."""
        [number] = self._database.execute(histories.LEFT_OUT).fetchone()
        return int(number)

    def strangers(self) -> Iterator[tuple[UUID, int]]:
        """Yield what was recorded and has no row, and where it was recorded first."""
        for event, place in self._database.execute(histories.STRANGERS):
            yield UUID(bytes=event), place


def microseconds(moment: datetime) -> int:
    """Return the microseconds since the beginning of 1970."""
    return (moment - EPOCH) // timedelta(microseconds=1)


@contextmanager
def open_histories() -> Iterator[Histories]:
    """Yield empty histories, until the end of the block."""
    made = Histories()
    try:
        yield made
    except sqlite3.Error as error:
        fix = "it is where temporary files are; name another directory with SQLITE_TMPDIR"
        raise StoreError(f"the comparison needs room on disk: {error}; {fix}") from error
    finally:
        made.close()


@dataclass(frozen=True, slots=True)
class Terms:
    """What is compared with what."""

    destination: str
    on_failed: str
    since: datetime | None
    until: datetime | None
    kept_since: datetime | None
    """What was emitted before may be pruned; None: nothing is."""
    place: Callable[[int], str]
    """Describes a place among the records."""

    def covers(self, moment: datetime) -> bool:
        """Return True if an event of that moment is compared."""
        return (self.since is None or self.since <= moment) and (self.until is None or moment < self.until)


@dataclass(slots=True)
class Comparison:
    """How many there are of each kind, and the first of each in words."""

    shown: int
    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[Difference, list[tuple[UUID, str]]] = field(default_factory=lambda: defaultdict(list))
    has_payloads: bool = False
    newest_lost: datetime | None = None
    oldest_record: datetime | None = None

    def find(self, kind: Difference, event: UUID, text: str, times: int = 1) -> None:
        """Count it, and keep the first few."""
        self.counts[kind] += times
        if len(self.findings[kind]) < self.shown:
            self.findings[kind].append((event, text))

    def differences(self, *, strict: bool) -> int:
        """Return the number of differences; duplicates only count if ``strict``."""
        kinds = ("lost", "phantom", "disorder", "altered", *(("duplicate",) if strict else ()))
        return sum(self.counts[kind] for kind in kinds)


def compare(histories: Histories, terms: Terms, to: Comparison) -> None:
    """Judge every event, then every record that has no row."""
    to.counts["outside"] += histories.left_out()
    for _, of_key in groupby(histories.fates(), key=lambda fate: fate.key):
        for overtaking in overtakings(_judged(of_key, terms, to), terms.on_failed):
            to.find("disorder", overtaking.row.event_id, _overtook(overtaking, terms))
    for event, place in histories.strangers():
        _judge_stranger(event, place, terms, to)


def _judged(fates: Iterator[Fate], terms: Terms, to: Comparison) -> Iterator[Any]:
    """Judge each event by itself, and yield those that have a place in the order of their key."""
    for fate in fates:
        to.counts["events"] += 1
        to.counts["keyed"] += fate.key is not None
        if fate.place is not None:
            _judge_recorded(fate, to, terms)
        elif fate.sent:
            text = f"was emitted at {fate.created:%Y-%m-%d %H:%M:%S} UTC, and its row says delivered"
            to.find("lost", fate.event, text)
            to.newest_lost = max(to.newest_lost or fate.created, fate.created)
            continue
        else:
            # What was delivered since the records were read may stand in them by now.
            to.counts["pending" if fate.status == "delivered" else fate.status] += 1
        row = Committed(terms.destination, fate.event, fate.key, fate.position)
        yield row, fate.place, fate.status


def _judge_recorded(fate: Fate, to: Comparison, terms: Terms) -> None:
    to.counts["recorded"] += 1
    if (moment := moment_of(fate.event)) is not None:
        to.oldest_record = min(to.oldest_record or moment, moment)
    again = fate.times - fate.rows
    if again > 0:
        assert fate.place is not None
        text = f"was recorded {fate.times} times, first at {terms.place(fate.place)}"
        to.find("duplicate", fate.event, text, again)


def _judge_stranger(event: UUID, place: int, terms: Terms, to: Comparison) -> None:
    moment = moment_of(event)
    if moment is not None and not terms.covers(moment):
        to.counts["outside"] += 1
    elif moment is not None and terms.kept_since is not None and moment < terms.kept_since:
        to.counts["pruned"] += 1
    else:
        text = f"was recorded at {terms.place(place)}, and {terms.destination} has no row of it"
        to.find("phantom", event, text)


def _overtook(overtaking: Overtaking, terms: Terms) -> str:
    row, arrival, position, until = overtaking
    came = "was not recorded" if until is None else f"came at {terms.place(until)}"
    mine = f"position {row.position} of key {row.key!r} came at {terms.place(arrival)}"
    return f"{mine}, but position {position} before it {came}"


def moment_of(event: UUID) -> datetime | None:
    """Return when an event was emitted, by its id, or None if the id does not say."""
    if event.version != 7:
        return None
    try:
        return datetime.fromtimestamp((event.int >> 80) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None
