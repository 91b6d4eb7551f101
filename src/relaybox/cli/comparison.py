"""What a consumer recorded and what was committed for it, side by side on disk, and how they differ."""

from __future__ import annotations

import base64
import json
import sqlite3
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import count, groupby
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias
from uuid import UUID

from relaybox.cli.progress import with_bar
from relaybox.database.statements import histories as statements
from relaybox.errors import ConfigError, StoreError, shorten
from relaybox.operate.admin import Admin
from relaybox.stores.ledger import Content, Entry, Filter
from relaybox.testing.checker import Committed, Overtaking, overtakings
from relaybox.wire.codec import BINARY

Difference = Literal["lost", "phantom", "disorder", "altered", "duplicate"]

Record: TypeAlias = tuple[int, UUID, bytes | None]
"""A delivery: its place among the records, the event, and the digest of its payload if it has one."""

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

EXPECTED = "expected an event id, or a JSON object with event_id, webhook-id or id"
IDS = ("event_id", "webhook-id", "id")
"""Where an object may have the event's id; its own may stand under ``id``."""

MARGIN = timedelta(hours=1)
"""How far an emitter's clock, which is in an event's id, may be from the database's."""

AT_ONCE = 100
"""How many payloads are fetched at a time: each may be of a mebibyte."""

LONGEST = 16 * 1024 * 1024
"""Bytes of a line; a payload of 1 MiB with everything escaped has room."""


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


@dataclass(frozen=True, slots=True)
class Histories:
    """Two histories side by side on disk: what was recorded, and the rows of one destination.

    They are in a temporary SQLite database that disappears with its connection, so that neither has to fit
    into memory: it and the operating system keep 64 MiB of them there.
    """

    database: sqlite3.Connection

    def record(self, records: Iterable[Record]) -> None:
        """Add what was recorded."""
        rows = ((place, event.bytes, digest) for place, event, digest in records)
        self.database.executemany(statements.RECORD, rows)

    def commit(self, rows: Iterable[tuple[Entry, bool, bool]]) -> None:
        """Add rows; the flags are True if a row counts as sent, and if it is compared and not only known."""
        self.database.executemany(
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
        """Return the places where an event was recorded with a payload."""
        return self.database.execute(statements.DIGESTS, (event.bytes,)).fetchall()

    def has_payloads(self) -> bool:
        """Return True if any record has a payload."""
        return self.database.execute(statements.ANY_PAYLOAD).fetchone() is not None

    def size(self) -> int:
        """Return the number of deliveries that were recorded."""
        return int(self.database.execute(statements.SIZE).fetchone()[0])

    def fates(self) -> Iterator[Fate]:
        """Yield every event that is compared, by key and position."""
        for event, key, position, status, sent, created, *rest in self.database.execute(statements.FATES):
            moment = EPOCH + timedelta(microseconds=created)
            yield Fate(UUID(bytes=event), key, position, status, bool(sent), moment, *rest)

    def left_out(self) -> int:
        """Return the number of events that were recorded and have rows, but none that is compared."""
        return int(self.database.execute(statements.LEFT_OUT).fetchone()[0])

    def strangers(self) -> Iterator[tuple[UUID, int]]:
        """Yield what was recorded and has no row, and where it was recorded first."""
        for event, place in self.database.execute(statements.STRANGERS):
            yield UUID(bytes=event), place


@contextmanager
def open_histories() -> Iterator[Histories]:
    """Yield empty histories, until the end of the block."""
    # A name that is empty is a file that has no name. Two loops may use it, one after the other.
    with closing(sqlite3.connect("", check_same_thread=False)) as database:
        try:
            database.executescript(statements.TABLES)
            yield Histories(database)
        except sqlite3.Error as error:
            fix = "it is where temporary files are; name another directory with SQLITE_TMPDIR"
            raise StoreError(f"the comparison needs room on disk: {error}; {fix}") from error


def microseconds(moment: datetime) -> int:
    """Return the microseconds since the beginning of 1970."""
    return (moment - EPOCH) // timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Terms:
    """What is compared with what."""

    destination: str
    on_failed: str
    since: datetime | None
    until: datetime | None
    place: Callable[[int], str]
    """Describes a place among the records."""
    kept_since: datetime | None = None
    """What was emitted before may be pruned; None: nothing is."""

    def covers(self, moment: datetime) -> bool:
        """Return True if an event of that moment is compared."""
        return (self.since is None or self.since <= moment) and (self.until is None or moment < self.until)

    def filter(self) -> Filter:
        """Return a filter of somewhat more than is compared: each record near the edge finds its row."""
        since = None if self.since is None else self.since - MARGIN
        until = None if self.until is None else self.until + MARGIN
        return Filter(destination=self.destination, since=since, until=until)


@dataclass(slots=True)
class Comparison:
    """How many there are of each kind, and the first of each in words."""

    shown: int
    strict: bool
    """True if duplicates are differences."""
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

    @property
    def differences(self) -> int:
        """Return the number of differences."""
        kinds = ("lost", "phantom", "disorder", "altered", *(("duplicate",) if self.strict else ()))
        return sum(self.counts[kind] for kind in kinds)

    @property
    def ok(self) -> bool:
        """True if something was compared, and nothing differs."""
        return self.counts["events"] > 0 and not self.differences


def compare(histories: Histories, terms: Terms, to: Comparison) -> None:
    """Judge every event, then every record that has no row."""
    to.counts["records"], to.has_payloads = histories.size(), histories.has_payloads()
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
            _judge_recorded(fate, fate.place, terms, to)
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


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Open the file, or standard input for ``-``."""
    if path == "-":
        if sys.stdin is None:
            raise ConfigError("standard input is closed; name a file of what the consumer recorded")
        yield sys.stdin.buffer
        return
    try:
        # Closed below; only errors of opening it are translated here.
        stream = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        fix = "name a file of what the consumer recorded, or - for standard input"
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}; {fix}") from error
    with stream:
        yield stream


def read_records(stream: BinaryIO, name: str) -> Iterator[Record]:
    """Yield each line; raise on the first malformed line, or if the file is empty."""
    empty = True
    for number in count(1):
        raw = stream.readline(LONGEST + 1)
        if not raw:
            break
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
    """Return the record of a line, or None of a blank one; raise ``ValueError`` if the line is malformed."""
    if len(raw) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST:,} bytes")
    try:
        # Some programs begin a text with a mark of their own.
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{shorten(raw[:40])} is no UTF-8 text (byte {error.start + 1})") from None
    if not text:
        return None
    value: Any = text
    if text[0] in '{"':
        try:
            value = loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{shorten(text)} is no JSON: {error}") from None
    if not isinstance(value, dict):
        return number, _event(value), None
    id_name = next((name for name in IDS if name in value), None)
    if id_name is None:
        raise ValueError(f"it has no id, only {shorten(sorted(value))}" if value else "it has no id")
    return number, _event(value[id_name]), _digest_of(value)


def _digest_of(value: dict[str, Any]) -> bytes | None:
    """Return the digest of the payload: as an envelope has it, or under the name ``payload``."""
    if "data_base64" in value:
        try:
            return digest(base64.b64decode(value["data_base64"], validate=True))
        except (TypeError, ValueError):
            raise ValueError(f"data_base64 = {shorten(value['data_base64'])} is no base64") from None
    name = next((name for name in ("data", "payload") if name in value), None)
    return None if name is None else digest(value[name])


def _event(text: Any) -> UUID:
    try:
        return UUID(text)
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"{shorten(text)} is no event id") from None


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


loads = json.JSONDecoder(parse_float=_number).decode
"""A JSON value in which 1.0 is 1, as many programs write it."""

_dumps = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def digest(value: Any) -> bytes:
    """Return a digest that is the same for equal JSON values, or for equal bytes."""
    if isinstance(value, bytes):
        return blake2b(value, digest_size=16, person=b"bytes").digest()
    return blake2b(_dumps(value).encode(), digest_size=16, person=b"json").digest()


async def now(admin: Admin) -> datetime:
    """Return the database's time, or that of this machine if the database has no row."""
    page = await admin.events(limit=1, windows=1)
    return page.entries[0].seen_at if page.entries else datetime.now(UTC)


async def gather(
    admin: Admin, inbox: str | None, histories: Histories, terms: Terms, begun: datetime, done: Comparison
) -> datetime:
    """Read the inbox, if one is given, and then the rows; return the database's time after that."""
    if inbox is not None:
        await _read_inbox(admin, inbox, histories)
    has_payloads = histories.has_payloads()

    async def walk(progress: Callable[[int], None]) -> None:
        seen = 0
        async for entries in admin.walk(terms.filter()):
            seen += len(entries)
            shadowed = await admin.shadowed(entries)
            sent = {entry.id for entry in entries if entry.id not in shadowed and _is_sent(entry, begun)}
            histories.commit((entry, entry.id in sent, terms.covers(entry.created_at)) for entry in entries)
            if has_payloads:
                await _compare_payloads(admin, histories, entries, terms, done)
            progress(seen)

    await with_bar(histories.size() or None, "comparing", walk)
    return await now(admin)


async def _read_inbox(admin: Admin, consumer: str, histories: Histories) -> None:
    async for marks in admin.inbox(consumer):
        found: list[Record] = []
        for mark in marks:
            # Messages of others may have ids of another kind.
            with suppress(ValueError):
                found.append((microseconds(mark.processed_at), UUID(mark.message_id), None))
        histories.record(found)
    if not histories.size():
        raise ConfigError(f"--inbox {consumer!r}: inbox_message has no event of this consumer")


def _is_sent(entry: Entry, begun: datetime) -> bool:
    """Return True if it was delivered before what was recorded was read."""
    return entry.status == "delivered" and (entry.delivered_at is None or entry.delivered_at < begun)


async def _compare_payloads(
    admin: Admin, histories: Histories, entries: Sequence[Entry], terms: Terms, done: Comparison
) -> None:
    """Compare the payload of each record that has one with the stored one, a few at a time."""
    found = {
        entry.id: histories.digests(entry.event_id) for entry in entries if terms.covers(entry.created_at)
    }
    recorded = [entry for entry in entries if found.get(entry.id)]
    for start in range(0, len(recorded), AT_ONCE):
        part = recorded[start : start + AT_ONCE]
        contents = await admin.contents([entry.id for entry in part])
        for entry in part:
            # A row may have been pruned in the meantime.
            wanted = _stored_digest(contents.get(entry.id))
            if wanted is None:
                continue
            done.counts["payloads"] += len(found[entry.id])
            how = "another payload than the stored one" if wanted else "a payload; the stored one is no JSON"
            for place, seen in found[entry.id]:
                if seen != wanted:
                    done.find("altered", entry.event_id, f"came at {terms.place(place)} with {how}")


def _stored_digest(content: Content | None) -> bytes | None:
    """Return the digest of a stored payload: None if it cannot be compared, empty if it is not JSON."""
    if content is None or content.payload_encoding not in (None, BINARY):
        return None
    if content.payload_encoding == BINARY:
        return digest(bytes(content.payload_data or b""))
    try:
        return digest(None if content.payload is None else loads(content.payload))
    except (ValueError, RecursionError):
        return b""
