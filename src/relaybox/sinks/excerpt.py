"""Texts from outside, as a message may show them."""

from __future__ import annotations

from collections.abc import Iterable

_LENGTH = 200


def clean(text: str, secrets: Iterable[str]) -> str:
    """The beginning of a text from outside, as one line without control characters or secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    # Twice what is shown is enough to look at: white space is folded.
    printable = "".join(c if c.isprintable() else " " for c in text[: 4 * _LENGTH])
    line = " ".join(printable.split())
    return line if len(line) <= _LENGTH else f"{line[:_LENGTH]}…"
