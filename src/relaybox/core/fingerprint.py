"""What makes two errors the same: their destination, their class, and their text without what varies.

A relay writes an error as one line (``relay/decide.py``): of an exception ``ValueError: no such order 17``,
of an HTTP answer ``422 Unprocessable Entity: …`` or ``HOST:PORT: 422 …``, of a sink's own trouble a sentence
such as ``no answer from HOST within 30s``. The class is read from how the line begins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2s

LOOKED_AT = 1_000
"""Characters of an error that count; databases are asked for no more."""

KEPT = 160
"""Characters of its text without what varies."""

_HTTP = re.compile(
    r"(?:HTTP |(?:Reject|Retry|Unavailable): |\S+:[0-9]+: |(?:[\w-]+\.)+[a-z]+: )?"
    r"([1-5][0-9]{2})\b(?![.:][0-9])"
)
"""A status, perhaps behind the server's address or a handler's own answer."""
_EXCEPTION = re.compile(r"((?:\w+\.)*[A-Z]\w*)(?:: |$)")
_SENTENCES = (
    ("Timeout", re.compile(r"no answer from |.* within [0-9.]+s\b|.*\btook longer than ")),
    ("DNSError", re.compile(r"DNS knows no address ")),
    ("TLSError", re.compile(r"TLS with ")),
    ("ConnectionError", re.compile(r"cannot connect to |.*closed the connection|the connection to .* broke")),
    ("RelayDied", re.compile(r"the relay died ")),
    ("Refused", re.compile(r".* refuses the credentials")),
)

# In this order: what is longer and surer goes before what it holds.
_VARIES = re.compile(
    r"""
    (?P<query>\?[^\s"'<>=?]*=[^\s"'<>]*)
    | (?P<quoted>(?<!\w)'[^']*'(?!\w) | "[^"]*" | `[^`]*`)
    | (?P<id>
        \b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b
        | \b[0-9a-fA-F]{16,}\b
        | \b[^\W\d]*\d\w*(?:[-.,:+][^\W\d]*\d\w*)*
      )
    | (?P<space>\s{2,} | [^\S ])
    """,
    re.VERBOSE,
)
_STANDS_FOR = {"query": "", "quoted": "'…'", "id": "#", "space": " "}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one kind of error at one destination; ``hash`` is its name."""

    hash: str
    error_class: str
    message: str


@lru_cache(maxsize=16_384)
def fingerprint(destination: str, error: str | None) -> Fingerprint:
    """The fingerprint of an error as a row holds it."""
    text = (error or "")[:LOOKED_AT].strip()
    kind, message = error_class(text), normalised(text)
    # A text of a database may hold what no encoding has.
    whole = "\0".join((destination, kind, message)).encode("utf-8", "surrogatepass")
    return Fingerprint(blake2s(whole, digest_size=6).hexdigest(), kind, message)


def error_class(text: str) -> str:
    """``HTTP 422``, ``ValueError``, ``Timeout``; ``Error`` where the text does not say it."""
    if http := _HTTP.match(text):
        return f"HTTP {http[1]}"
    if exception := _EXCEPTION.match(text):
        return exception[1].rpartition(".")[2][:100]
    return next((name for name, sentence in _SENTENCES if sentence.match(text)), "Error")


def normalised(text: str) -> str:
    """The text without ids, numbers, quoted values and the queries of URLs.

    It begins with its HTTP status, if it has one: whichever server of several said it does not count.
    """
    status, end = (http[1], http.end()) if (http := _HTTP.match(text)) else ("", 0)
    rest = _VARIES.sub(lambda match: _STANDS_FOR[match.lastgroup or "space"], text[end:])
    return f"{status}{rest}"[:KEPT].strip()
