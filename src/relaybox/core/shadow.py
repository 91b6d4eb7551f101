"""The mark of a delivery in shadow: it is stored, claimed and settled like any other, but not sent.

It is a header of the row. Retries, moves and copies of the row keep it; a replay is sent, and loses it.
"""

from __future__ import annotations

import msgspec

HEADER = "relaybox-shadow"
MARK = f'"{HEADER}"'
"""What headers hold that may have the mark; all others need not be read."""


def mark(headers: str) -> str:
    """The headers of a row, with the mark."""
    return f"{{{MARK}:true}}" if headers == "{}" else f"{headers[:-1]},{MARK}:true}}"


def is_shadow(headers: str) -> bool:
    """Whether a row's headers have the mark."""
    if MARK not in headers:
        return False
    try:
        values = msgspec.json.decode(headers)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(values, dict) and values.get(HEADER) is True
