"""Check text before it is stored, and format times, durations, sizes and counts for people."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

from relaybox.errors import InvalidField

UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
"""Of durations, and how many seconds each has."""

SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

NOTHING = "–"
"""Stands for an unknown value on a page."""

GAP = "\N{NO-BREAK SPACE}"


def text_field(field: str, value: Any, longest: int) -> str:
    """Return the text if it is valid and fits; raise ``InvalidField``."""
    if not isinstance(value, str):
        raise InvalidField(field, value, "it must be text")
    # Not all drivers accept subclasses, and a subclass may override ``__str__``.
    text: str = value if type(value) is str else str.__str__(value)
    if not text:
        raise InvalidField(field, text, "it must not be empty")
    if len(text) > longest:
        raise InvalidField(field, text, f"it has {len(text)} characters and may have at most {longest}")
    plain = text.isascii() and text.isprintable()
    if not plain and any(one == "\0" or "\ud800" <= one <= "\udfff" for one in text):
        raise InvalidField(field, text, "it holds a NUL or a lone surrogate; remove it")
    return text


def id_field(field: str, value: Any) -> str:
    """Return an id (text, integer or UUID) as text; raise ``InvalidField``."""
    if isinstance(value, str):
        return text_field(field, value, 255)
    if isinstance(value, UUID):
        return UUID.__str__(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidField(field, value, "give text, an integer or a UUID")
    value = int.__int__(value)
    # Python refuses to print an integer of several thousand digits.
    if value.bit_length() > 800:
        seen = f"an integer of {value.bit_length()} bits"
        raise InvalidField(field, seen, "it may have at most 240 digits")
    return str(value)


def at(moment: datetime | None) -> str:
    """Return a moment such as ``2026-01-31 12:00:00 UTC``."""
    return "an unknown time" if moment is None else f"{spelled(moment)} UTC"


def spelled(moment: datetime) -> str:
    """Return a moment in UTC, without its zone."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def machine(moment: datetime) -> str:
    """Return a moment for a ``datetime`` attribute in HTML."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def distance(moment: datetime, now: datetime) -> str:
    """Return the distance of a moment, such as ``in 3 min`` or ``3 min ago``."""
    seconds = (moment - now).total_seconds()
    return f"in {duration(seconds)}" if seconds > 0 else f"{duration(-seconds)} ago"


def duration(seconds: float | None, *, ms: str = "", s: str = "", parts: int = 1, gap: str = GAP) -> str:
    """Return a duration in its largest unit, such as ``3 min``, or in its ``parts`` largest units.

    ``ms`` and ``s`` are the formats of milliseconds and of less than ten seconds; then the rest is rounded,
    else cut. Without a ``gap``, units have one letter.
    """
    if seconds is None:
        return NOTHING
    if ms and seconds < 0.9995:
        return f"{max(seconds, 0.0) * 1000:{ms}}{gap}ms"
    if s and seconds < 9.95:
        return f"{seconds:{s}}{gap}s"
    rest = max(0, round(seconds) if s else int(seconds))
    found = []
    for size, unit in UNITS:
        whole, rest = divmod(rest, size)
        if whole:
            found.append(f"{whole}{gap}{unit if gap else unit[0]}")
        elif found:
            break
    return " ".join(found[:parts]) or f"0{gap}s"


lag = partial(duration, ms=".3g", s=".2g")
"""As pages and charts show delays: ``42.1 ms``, ``1.3 s``, ``3 min``."""

age, short_lag = partial(duration, gap=""), partial(duration, ms=".0f", s=".1f", gap="")
"""As tables on terminals show ages, ``3m``, and delays, ``42ms`` and ``1.3s``."""

span = partial(duration, ms=".0f", s=".1f", parts=2, gap=" ")
"""As logs show them: ``12 ms``, ``1.5 s``, ``3 min 20 s``."""


def rate(per_second: float | None) -> str:
    """Return a rate, such as ``12/s``."""
    if per_second is None:
        return NOTHING
    return f"{per_second:,.0f}/s" if per_second >= 100 else f"{per_second:.2g}/s"


def size(count: int) -> str:
    """Return a number of bytes, such as ``1.5 KiB``."""
    for unit, name in SIZES:
        if count >= unit:
            return f"{count / unit:.3g}{GAP}{name}"
    return f"{count}{GAP}B"


def binary(data: bytes | None, encoding: str | None) -> str:
    """Say what a binary payload is, such as ``1,024 bytes of zstd+json``."""
    return f"{len(data or b''):,} bytes of {encoding}"


def number(value: float | None) -> str:
    """Return a whole number with thousands separators."""
    return NOTHING if value is None else f"{value:,.0f}"


def compact(value: float) -> str:
    """Return a number for an axis, such as ``1.5k``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def plural(count: int, noun: str, more: str = "") -> str:
    """Return a number with its noun: ``1 event``, ``2 deliveries``, ``3 relays``, ``10,000+ events``."""
    several = f"{noun[:-1]}ies" if noun[-1] == "y" and noun[-2] not in "aeo" else f"{noun}s"
    return f"1 {noun}" if count == 1 else f"{count:,}{more} {several}"


def stated(reason: str | None) -> str:
    """Return the reason for which something is held up, or say that there is none."""
    return reason or "no reason given"


def stored_json(text: str) -> Any:
    """Return the value of a stored JSON text, with text instead of numbers that no float holds.

    JSON has neither infinity nor NaN, so they could not be sent on as numbers.
    """
    return json.loads(text, parse_constant=str, parse_float=_finite)


def _finite(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


def circuit_word(state: str) -> str:
    """Return the state of a circuit as people write it: ``half-open``."""
    return state.replace("_", "-")


def shortened(text: str | None, length: int = 120) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join((text or "").split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def cut(text: str, longest: int) -> str:
    """Return the beginning of a long text, and how much more there is."""
    left = len(text) - longest
    return text if left <= 0 else f"{text[:longest]}\n… and {left:,} characters more"


def printable(text: str, instead: str) -> str:
    """Replace each character that is not printable, such as those that control a terminal."""
    return text if text.isprintable() else "".join(one if one.isprintable() else instead for one in text)
