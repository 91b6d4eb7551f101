"""Check text before it is stored: accept only what every database keeps unchanged."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from relaybox.errors import InvalidField


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
