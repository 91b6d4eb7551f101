"""Hide the values of configured secrets in texts that are stored, logged or shown.

A receiver or a client library may quote what it was sent. There is one list for the process: whatever reads a
secret adds it, and every text of another system passes ``scrub``.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

HIDDEN = "***"

_SHORTEST = 6
"""Characters; shorter values would hide half of every text."""
_MOST = 1000

_hidden: dict[str, None] = {}
_pattern: re.Pattern[str] | None = None


def conceal(*secrets: str) -> None:
    """Hide these values from now on, also each of several in one text, percent-encoded and decoded."""
    global _pattern
    words = {word for secret in secrets for word in (secret, *secret.split())}
    # A key is quoted with and without the prefix that says its kind.
    words |= {word.partition("_")[2] for word in words if word.startswith(("whsec_", "whsk_"))}
    words |= {form for word in words for form in (quote(word, safe=""), unquote(word))}
    new = {word for word in words if len(word) >= _SHORTEST} - _hidden.keys()
    if new:
        _hidden.update(dict.fromkeys(new))
        for oldest in list(_hidden)[:-_MOST]:
            del _hidden[oldest]
        _pattern = None


def scrub(text: str) -> str:
    """Return the text with every known secret replaced by ``***``."""
    global _pattern
    if not _hidden:
        return text
    if _pattern is None:
        # Longest first, so that no part of a secret is left.
        _pattern = re.compile("|".join(map(re.escape, sorted(_hidden, key=len, reverse=True))))
    return _pattern.sub(HIDDEN, text)


def forget() -> None:
    """Forget all secrets, between tests."""
    global _pattern
    _hidden.clear()
    _pattern = None
