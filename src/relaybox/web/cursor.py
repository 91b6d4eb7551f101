"""Where a list goes on: a text that clients hand back as they got it, and cannot make up."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Callable
from typing import TypeVar

from relaybox.web.problems import Problem, invalid

T = TypeVar("T")

MAC = 12
DIGITS = 18
"""Fewer than a database's largest number has."""


class Cursors:
    """Seals the place where a page ended, together with the question it was an answer to."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, about: str, place: object | None) -> str | None:
        """The cursor of a place; None: the list is at its end."""
        if place is None:
            return None
        text = str(place).encode()
        return base64.urlsafe_b64encode(self._mac(about, text) + text).rstrip(b"=").decode()

    def open(self, about: str, cursor: str | None, kind: Callable[[str], T]) -> T | None:
        """The place; raises where the cursor was not made here, or for another question."""
        if cursor is None:
            return None
        try:
            data = base64.b64decode(cursor.encode() + b"=" * (-len(cursor) % 4), b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise _wrong() from None
        mac, text = data[:MAC], data[MAC:]
        if not hmac.compare_digest(mac, self._mac(about, text)):
            raise _wrong()
        try:
            return kind(text.decode())
        except ValueError:
            raise _wrong() from None

    def _mac(self, about: str, text: bytes) -> bytes:
        return hmac.digest(self._key, about.encode() + b"\0" + text, "sha256")[:MAC]


def number(text: str) -> int:
    """A place that is a number."""
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
        raise ValueError("no number of a row")
    return int(text)


def _wrong() -> Problem:
    fix = "hand back the one of the page before, with the same query; or leave it out to begin anew"
    return invalid("cursor", f"it is none of this list; {fix}")
