"""The records of a consumer in a file: one delivery a line, in order of arrival."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from typing import Any, BinaryIO, NamedTuple
from uuid import UUID

from relaybox.errors import ConfigError, shorten

EXPECTED = "expected an event id, or a JSON object with event_id, webhook-id or id"
IDS = ("event_id", "webhook-id", "id")
"""Where an object may have the event's id; its own may stand under ``id``."""

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
    import sys

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
