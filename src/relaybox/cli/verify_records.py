"""What ``relaybox verify`` reads: a consumer's records, in a file or an inbox, and the committed rows."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import count
from typing import Any, BinaryIO, NamedTuple
from uuid import UUID

from relaybox.cli.progress import with_bar
from relaybox.cli.verify_comparison import EPOCH, Comparison, Histories, Terms, microseconds
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError, shorten
from relaybox.operate.admin import Admin
from relaybox.stores.ledger import Entry, Filter
from relaybox.wire.codec import BINARY

EXPECTED = "expected an event id, or a JSON object with event_id, webhook-id or id"
IDS = ("event_id", "webhook-id", "id")
"""Where an object may have the event's id; its own may stand under ``id``."""

MARGIN = timedelta(hours=1)
"""How far an emitter's clock, which is in an event's id, may be from the database's."""

AT_ONCE = 100
"""How many payloads are fetched at a time: each may be of a mebibyte."""

LONGEST = 16 * 1024 * 1024
"""Bytes of a line; a payload of 1 MiB with everything escaped has room."""


class Record(NamedTuple):
    """One delivery: the line it stands on, the event, and the digest of its payload where it has one."""

    line: int
    event: UUID
    digest: bytes | None


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
    if text[0] not in '{"':
        return Record(number, _event(text), None)
    try:
        value = loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shorten(text)} is no JSON: {error}") from None
    return _of_object(number, value) if isinstance(value, dict) else Record(number, _event(value), None)


def _of_object(number: int, value: dict[str, Any]) -> Record:
    name = next((name for name in IDS if name in value), None)
    if name is None:
        raise ValueError(f"it has no id, only {shorten(sorted(value))}" if value else "it has no id")
    return Record(number, _event(value[name]), _digest_of(value))


def _digest_of(value: dict[str, Any]) -> bytes | None:
    """Return the digest of the payload: as an envelope has it, or under the name ``payload``."""
    if "data_base64" in value:
        try:
            return digest(base64.b64decode(value["data_base64"], validate=True))
        except (TypeError, ValueError):
            raise ValueError(f"data_base64 = {shorten(value['data_base64'])} is no base64") from None
    for name in ("data", "payload"):
        if name in value:
            return digest(value[name])
    return None


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


def kept_since(configured: Destination | None, end: datetime) -> datetime | None:
    """Return the time since which no row was pruned, at ``end``."""
    if configured is None:
        return None
    # By an emitter's clock, which may be ahead, an event may be younger than what pruned it says.
    return end - timedelta(seconds=configured.retention) + MARGIN


async def gather(
    admin: Admin, inbox: str | None, histories: Histories, terms: Terms, begun: datetime, done: Comparison
) -> datetime:
    """Read the inbox, if one is given, and then the rows; return the database's time after that."""
    if inbox is not None:
        await _read_inbox(admin, inbox, histories)
    has_payloads = histories.has_payloads()

    async def walk(progress: Callable[[int], None]) -> None:
        seen = 0
        async for entries in admin.walk(_filter(terms)):
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
        histories.record(
            (microseconds(mark.processed_at), event, None)
            for mark in marks
            if (event := _uuid(mark.message_id)) is not None
        )
    if not histories.size():
        raise ConfigError(f"--inbox {consumer!r}: inbox_message has no event of this consumer")


def _filter(terms: Terms) -> Filter:
    """Return a filter of somewhat more than is compared, so that each record near the edge finds its row."""
    return Filter(
        destination=terms.destination,
        since=None if terms.since is None else terms.since - MARGIN,
        until=None if terms.until is None else terms.until + MARGIN,
    )


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


def _stored_digest(content: Any) -> bytes | None:
    """Return the digest of a stored payload: None if it cannot be compared, empty if it is not JSON."""
    if content is None or content.payload_encoding not in (None, BINARY):
        return None
    if content.payload_encoding == BINARY:
        return digest(bytes(content.payload_data or b""))
    try:
        return digest(None if content.payload is None else loads(content.payload))
    except (ValueError, RecursionError):
        return b""


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def at_line(place: int) -> str:
    """Describe a place in a file."""
    return f"line {place}"


def at_time(place: int) -> str:
    """Describe a place in an inbox."""
    return (EPOCH + timedelta(microseconds=place)).isoformat()
