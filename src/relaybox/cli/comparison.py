"""Compare the deliveries that a consumer recorded with the events committed for it."""

from __future__ import annotations

import base64
import json
import sqlite3
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import groupby
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias
from uuid import UUID

from relaybox.cli.progress import reading_bar, with_bar
from relaybox.core.settings import Destination
from relaybox.core.text import at
from relaybox.database.statements import histories as statements
from relaybox.errors import ConfigError, StoreError, shorten
from relaybox.operate.admin import Admin
from relaybox.stores.ledger import Content, Entry, Filter
from relaybox.testing.checker import Committed, overtakings
from relaybox.wire.codec import BINARY

Difference = Literal["lost", "phantom", "disorder", "altered", "duplicate"]

Record: TypeAlias = tuple[int, UUID, bytes | None]
"""A recorded delivery: its place, the event, and the digest of its payload if it has one."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

EXPECTED = "expected an event id, or a JSON object with event_id, webhook-id or id"
IDS = ("event_id", "webhook-id", "id")
"""Fields that may hold the event's id, by priority: ``id`` may be the record's own."""

MARGIN = timedelta(hours=1)
"""How far an emitter's clock, whose time is in the event id, may differ from the database's."""

AT_ONCE = 100
"""Payloads to fetch at a time: each may be 1 MiB."""

LONGEST = 16 * 1024 * 1024
"""Bytes in a line: enough for a payload of 1 MiB with every character escaped."""


class Fate(NamedTuple):
    """An event: its row, the place of its first record, and the number of records."""

    event: UUID
    key: str | None
    position: int
    status: str
    sent: bool
    """True if it, or a replay of it, was delivered before the records were read."""
    created: datetime
    rows: int
    place: int | None
    times: int


class Histories:
    """The records and the rows of one destination.

    They are in a temporary SQLite database on disk with a cache of 64 MiB, so they need not fit into memory.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def record(self, records: Iterable[Record]) -> None:
        """Add records."""
        rows = ((place, event.bytes, digest) for place, event, digest in records)
        self._database.executemany(statements.RECORD, rows)

    def commit(self, rows: Iterable[tuple[Entry, bool, bool]]) -> None:
        """Add rows, each with two flags: it counts as sent, and it is compared (not only known)."""
        self._database.executemany(
            statements.COMMIT,
            (
                (
                    *(entry.event_id.bytes, entry.position, entry.ordering_key, entry.status),
                    *(sent, microseconds(entry.created_at), compared),
                )
                for entry, sent, compared in rows
            ),
        )

    def digests(self, event: UUID) -> Sequence[tuple[int, bytes]]:
        """Return the place and digest of each record of the event that has a payload."""
        return self._database.execute(statements.DIGESTS, (event.bytes,)).fetchall()

    def has_payloads(self) -> bool:
        """True if any record has a payload."""
        return self._database.execute(statements.ANY_PAYLOAD).fetchone() is not None

    def size(self) -> int:
        """Return the number of records."""
        return int(self._database.execute(statements.SIZE).fetchone()[0])

    def fates(self) -> Iterator[Fate]:
        """Yield the events to compare, by key and position."""
        for event, key, position, status, sent, created, *rest in self._database.execute(statements.FATES):
            moment = EPOCH + timedelta(microseconds=created)
            yield Fate(UUID(bytes=event), key, position, status, bool(sent), moment, *rest)

    def left_out(self) -> int:
        """Return the number of recorded events that have rows, but none to compare."""
        return int(self._database.execute(statements.LEFT_OUT).fetchone()[0])

    def strangers(self) -> Iterator[tuple[UUID, int]]:
        """Yield recorded events that have no row, each with the place of its first record."""
        for event, place in self._database.execute(statements.STRANGERS):
            yield UUID(bytes=event), place


@contextmanager
def open_histories() -> Iterator[Histories]:
    """Yield empty histories; close them after the block."""
    # An empty name is a temporary file. Two event loops use it, one after the other.
    with closing(sqlite3.connect("", check_same_thread=False)) as database:
        try:
            database.executescript(statements.TABLES)
            yield Histories(database)
        except sqlite3.Error as error:
            fix = "it is where temporary files are; name another directory with SQLITE_TMPDIR"
            raise StoreError(f"the comparison needs room on disk: {error}; {fix}") from error


def microseconds(moment: datetime) -> int:
    """Return the microseconds since 1970."""
    return (moment - EPOCH) // timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Terms:
    """The destination and the period to compare."""

    destination: str
    on_failed: str
    since: datetime | None
    until: datetime | None
    place: Callable[[int], str]
    kept_since: datetime | None = None
    """Events emitted earlier may be pruned; None if nothing is pruned."""

    def covers(self, moment: datetime) -> bool:
        """True if an event emitted at that moment is compared."""
        return (self.since is None or self.since <= moment) and (self.until is None or moment < self.until)

    def filter(self) -> Filter:
        """Return a filter wider by ``MARGIN``, so that records near the edge find their rows."""
        since = None if self.since is None else self.since - MARGIN
        until = None if self.until is None else self.until + MARGIN
        return Filter(destination=self.destination, since=since, until=until)


@dataclass(slots=True)
class Comparison:
    """The result: counts by kind, and the first findings of each kind in words."""

    shown: int
    strict: bool
    """True if duplicates are differences."""
    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[Difference, list[tuple[UUID, str]]] = field(default_factory=lambda: defaultdict(list))
    has_payloads: bool = False
    newest_lost: datetime | None = None
    oldest_record: datetime | None = None

    def find(self, kind: Difference, event: UUID, text: str, times: int = 1) -> None:
        """Count a difference, and keep its text if it is one of the first."""
        self.counts[kind] += times
        if len(self.findings[kind]) < self.shown:
            self.findings[kind].append((event, text))

    @property
    def differences(self) -> int:
        """Return the number of differences."""
        kinds = ("lost", "phantom", "disorder", "altered", *(("duplicate",) if self.strict else ()))
        return sum(self.counts[kind] for kind in kinds)

    @property
    def ok(self) -> bool:
        """True if at least one event was compared and nothing differs."""
        return self.counts["events"] > 0 and not self.differences


def compare(histories: Histories, terms: Terms, to: Comparison) -> None:
    """Check every event, then every record that has no row."""
    to.counts["records"], to.has_payloads = histories.size(), histories.has_payloads()
    to.counts["outside"] += histories.left_out()
    for _, of_key in groupby(histories.fates(), key=lambda fate: fate.key):
        for row, arrival, position, until in overtakings(_judged(of_key, terms, to), terms.on_failed):
            mine = f"position {row.position} of key {row.key!r} came at {terms.place(arrival)}"
            came = "was not recorded" if until is None else f"came at {terms.place(until)}"
            to.find("disorder", row.event_id, f"{mine}, but position {position} before it {came}")
    for event, place in histories.strangers():
        _judge_stranger(event, place, terms, to)


def _judged(fates: Iterator[Fate], terms: Terms, to: Comparison) -> Iterator[Any]:
    """Check each event on its own; yield those that count in the order of their key."""
    for fate in fates:
        to.counts["events"] += 1
        to.counts["keyed"] += fate.key is not None
        if fate.place is not None:
            _judge_recorded(fate, fate.place, terms, to)
        elif fate.sent:
            text = f"was emitted at {at(fate.created)}, and its row says delivered"
            to.find("lost", fate.event, text)
            to.newest_lost = max(to.newest_lost or fate.created, fate.created)
            continue
        else:
            # Delivered after the records were read: its record may exist by now.
            to.counts["pending" if fate.status == "delivered" else fate.status] += 1
        yield Committed(terms.destination, fate.event, fate.key, fate.position), fate.place, fate.status


def _judge_recorded(fate: Fate, place: int, terms: Terms, to: Comparison) -> None:
    to.counts["recorded"] += 1
    if (moment := moment_of(fate.event)) is not None:
        to.oldest_record = min(to.oldest_record or moment, moment)
    if (again := fate.times - fate.rows) > 0:
        text = f"was recorded {fate.times} times, first at {terms.place(place)}"
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


def moment_of(event: UUID) -> datetime | None:
    """Return the time in an event id, or None if it is not a valid UUIDv7."""
    if event.version != 7:
        return None
    try:
        return datetime.fromtimestamp((event.int >> 80) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def read(path: str, histories: Histories) -> None:
    """Add the records of a file, or of standard input for ``-``."""
    name = "standard input" if path == "-" else path
    with _opened(path) as stream, reading_bar(stream) as lines:
        histories.record(_records(lines, name))


def _opened(path: str) -> AbstractContextManager[BinaryIO]:
    if path == "-":
        if sys.stdin is None:
            raise ConfigError("standard input is closed; name a file of what the consumer recorded")
        return nullcontext(sys.stdin.buffer)
    try:
        return open(path, "rb")
    except OSError as error:
        fix = "name a file of what the consumer recorded, or - for standard input"
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}; {fix}") from error


def _records(stream: BinaryIO, name: str) -> Iterator[Record]:
    """Yield the record of each line; raise on the first malformed line, or if the file is empty."""
    empty = True
    for number, raw in enumerate(iter(lambda: stream.readline(LONGEST + 1), b""), 1):
        try:
            record = _record(number, raw)
        except ValueError as problem:
            raise ConfigError(f"{name}, line {number}: {problem}; {EXPECTED}") from None
        if record is not None:
            empty = False
            yield record
    if empty:
        raise ConfigError(f"{name}: it is empty; {EXPECTED}, one a line, in order of arrival")


def _record(number: int, raw: bytes) -> Record | None:
    """Return the record, or None if the line is blank; raise ``ValueError`` if it is malformed."""
    if len(raw) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST:,} bytes")
    try:
        # Some programs write a byte order mark.
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{shorten(raw[:40])} is not UTF-8 text (byte {error.start + 1})") from None
    if not text:
        return None
    value: Any = text
    if text[0] in '{"':
        try:
            value = loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{shorten(text)} is not JSON: {error}") from None
    if not isinstance(value, dict):
        return number, _event(value), None
    id_name = next((name for name in IDS if name in value), None)
    if id_name is None:
        raise ValueError(f"it has no id, only {shorten(sorted(value))}" if value else "it has no id")
    return number, _event(value[id_name]), _digest_of(value)


def _digest_of(value: dict[str, Any]) -> bytes | None:
    if "data_base64" in value:
        try:
            return digest(base64.b64decode(value["data_base64"], validate=True))
        except (TypeError, ValueError):
            raise ValueError(f"data_base64 = {shorten(value['data_base64'])} is not base64") from None
    name = next((name for name in ("data", "payload") if name in value), None)
    return None if name is None else digest(value[name])


def _event(text: Any) -> UUID:
    try:
        return UUID(text)
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"{shorten(text)} is not an event id") from None


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


loads = json.JSONDecoder(parse_float=_number).decode
"""Parse JSON; 1.0 becomes 1, because many programs write one for the other."""

_dumps = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def digest(value: Any) -> bytes:
    """Return a digest; equal JSON values, or equal bytes, have the same one."""
    if isinstance(value, bytes):
        return blake2b(value, digest_size=16, person=b"bytes").digest()
    return blake2b(_dumps(value).encode(), digest_size=16, person=b"json").digest()


async def begin(admin: Admin, name: str) -> tuple[Destination | None, datetime]:
    """Return the destination, and the database's time before the records are read."""
    return await admin.destination(name), await _now(admin)


async def _now(admin: Admin) -> datetime:
    """Return the database's time, or this machine's if the database has no rows."""
    page = await admin.events(limit=1, windows=1)
    return page.entries[0].seen_at if page.entries else datetime.now(UTC)


async def gather(
    admin: Admin, inbox: str | None, histories: Histories, terms: Terms, begun: datetime, done: Comparison
) -> datetime:
    """Read the inbox, if given, then the rows; return the database's time afterwards."""
    if inbox is not None:
        await _read_inbox(admin, inbox, histories)
    has_payloads = histories.has_payloads()

    async def walk(progress: Callable[[int], None]) -> None:
        seen = 0
        async for entries in admin.walk(terms.filter()):
            seen += len(entries)
            shadowed = await admin.shadowed(entries)
            delivered = [one for one in entries if one.status == "delivered" and one.id not in shadowed]
            sent = {one.id for one in delivered if one.delivered_at is None or one.delivered_at < begun}
            histories.commit((entry, entry.id in sent, terms.covers(entry.created_at)) for entry in entries)
            if has_payloads:
                await _compare_payloads(admin, histories, entries, terms, done)
            progress(seen)

    await with_bar(histories.size() or None, "comparing", walk)
    return await _now(admin)


async def _read_inbox(admin: Admin, consumer: str, histories: Histories) -> None:
    async for marks in admin.inbox(consumer):
        found: list[Record] = []
        for message_id, processed_at in marks:
            # Messages from other sources may have ids that are not UUIDs.
            with suppress(ValueError):
                found.append((microseconds(processed_at), UUID(message_id), None))
        histories.record(found)
    if not histories.size():
        raise ConfigError(f"--inbox {consumer!r}: inbox_message has no event of this consumer")


async def _compare_payloads(
    admin: Admin, histories: Histories, entries: Sequence[Entry], terms: Terms, done: Comparison
) -> None:
    found = {
        entry.id: histories.digests(entry.event_id) for entry in entries if terms.covers(entry.created_at)
    }
    recorded = [entry for entry in entries if found.get(entry.id)]
    for start in range(0, len(recorded), AT_ONCE):
        part = recorded[start : start + AT_ONCE]
        contents = await admin.contents([entry.id for entry in part])
        for entry in part:
            # The row may have been pruned meanwhile.
            wanted = _stored_digest(contents.get(entry.id))
            if wanted is None:
                continue
            done.counts["payloads"] += len(found[entry.id])
            how = "another payload than the stored one" if wanted else "a payload; the stored one is not JSON"
            for place, seen in found[entry.id]:
                if seen != wanted:
                    done.find("altered", entry.event_id, f"came at {terms.place(place)} with {how}")


def _stored_digest(content: Content | None) -> bytes | None:
    """Return the digest of a stored payload; None if it cannot be compared, empty if it is not JSON."""
    if content is None or content.payload_encoding not in (None, BINARY):
        return None
    if content.payload_encoding == BINARY:
        return digest(bytes(content.payload_data or b""))
    try:
        return digest(None if content.payload is None else loads(content.payload))
    except (ValueError, RecursionError):
        return b""
