"""Group errors: two are the same if destination, class and text without variable parts are equal.

The start of the relay's one-line error (``relay/decide.py``) gives the class: ``ValueError: no such order
17``, ``422 Unprocessable Entity: …``, ``HOST:PORT: 422 …`` or ``no answer from HOST within 30s``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2s

from relaybox.core.redact import Rules

LOOKED_AT = 1_000
"""Characters of an error that count; databases are asked for no more."""

KEPT = 160
"""Characters of the normalised text that are kept."""

_HTTP = re.compile(
    r"(?:HTTP |(?:Reject|Retry|Unavailable): |\S+:[0-9]+: |(?:[\w-]+\.)+[a-z]+: )?"
    r"([1-5][0-9]{2})\b(?![.:][0-9])"
)
"""An HTTP status, perhaps after the server's address or the name of a handler's answer."""
_EXCEPTION = re.compile(r"((?:\w+\.)*[A-Z]\w*)(?:: |$)")
_SENTENCES = (
    ("Timeout", re.compile(r"no answer from |.* within [0-9.]+s\b|.*\btook longer than ")),
    ("DNSError", re.compile(r"DNS knows no address ")),
    ("TLSError", re.compile(r"TLS with ")),
    ("ConnectionError", re.compile(r"cannot connect to |.*closed the connection|the connection to .* broke")),
    ("RelayDied", re.compile(r"the relay died ")),
    ("Refused", re.compile(r".* refuses the credentials")),
)

# Order matters: longer and more specific patterns come before those that they contain.
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
    """One kind of error at one destination; ``hash`` identifies it."""

    hash: str
    error_class: str
    message: str


@lru_cache(maxsize=16_384)
def fingerprint(destination: str, error: str | None) -> Fingerprint:
    """Return the fingerprint of an error as a row holds it."""
    # Without secrets: from the hash of a text, what it hides could be guessed.
    text = Rules().scrub((error or "")[:LOOKED_AT].strip())
    kind, message = error_class(text), normalised(text)
    # A database's text may hold lone surrogates.
    whole = "\0".join((destination, kind, message)).encode("utf-8", "surrogatepass")
    return Fingerprint(blake2s(whole, digest_size=6).hexdigest(), kind, message)


def error_class(text: str) -> str:
    """Return ``HTTP 422``, ``ValueError``, ``Timeout`` and so on; ``Error`` if the text does not say."""
    if http := _HTTP.match(text):
        return f"HTTP {http[1]}"
    if exception := _EXCEPTION.match(text):
        return exception[1].rpartition(".")[2][:100]
    return next((name for name, sentence in _SENTENCES if sentence.match(text)), "Error")


def normalised(text: str) -> str:
    """Return the text without ids, numbers, quoted values, URL queries and the server's address."""
    status, end = (http[1], http.end()) if (http := _HTTP.match(text)) else ("", 0)
    rest = _VARIES.sub(lambda match: _STANDS_FOR[match.lastgroup or "space"], text[end:])
    return f"{status}{rest}"[:KEPT].strip()
