"""Check text before it is stored, and format times, durations and counts for people."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from relaybox.errors import InvalidField

UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
"""Of durations, and how many seconds each has."""


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
    return "an unknown time" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def largest(seconds: float) -> tuple[int, str]:
    """Return a duration as whole units of the largest one that it holds: 200 seconds are 3 and ``min``."""
    whole = max(0, int(seconds))
    size, unit = next((unit for unit in UNITS if whole >= unit[0]), UNITS[-1])
    return whole // size, unit


def span(seconds: float) -> str:
    """Return a duration in two units at most: ``12 ms``, ``1.5 s``, ``3 min 20 s``, ``2 h``."""
    if seconds < 0.9995:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rest = round(seconds)
    parts = []
    for size, unit in UNITS:
        whole, rest = divmod(rest, size)
        if whole:
            parts.append(f"{whole} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def plural(count: int, noun: str, more: str = "") -> str:
    """Return a number with its noun: ``1 event``, ``2 events``, ``10,000+ events``."""
    return f"1 {noun}" if count == 1 else f"{count:,}{more} {noun}s"
