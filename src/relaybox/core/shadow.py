"""The mark of a delivery in shadow: it is stored, claimed and settled like any other, but not sent.

It is a header of the row. Retries, moves and copies keep it; a replay loses it and is sent.
"""

from __future__ import annotations

import msgspec

HEADER = "relaybox-shadow"
MARK = f'"{HEADER}"'
"""Headers without this text cannot have the mark and need no parsing."""


def mark(headers: str) -> str:
    """Return a row's headers with the mark added."""
    return f"{{{MARK}:true}}" if headers == "{}" else f"{headers[:-1]},{MARK}:true}}"


def is_shadow(headers: str) -> bool:
    """True if a row's headers have the mark."""
    if MARK not in headers:
        return False
    try:
        values = msgspec.json.decode(headers)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(values, dict) and values.get(HEADER) is True
