"""Check webhook requests and choose the answers, as docs/how-to/receive.md lists them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import NamedTuple

from msgspec import json

from relaybox.core.event import Event
from relaybox.core.values import Duration, Secret, parse_duration, parse_secret, parse_size
from relaybox.errors import ConfigError
from relaybox.receive.consumer import Crashed, Done, Later, Rejected, Verdict
from relaybox.wire.envelope import CONTENT_TYPES, Malformed, Received, media_type, unpack
from relaybox.wire.signature import ID, SIGNATURE, TIMESTAMP, is_recent, parse_keys, verify
from relaybox.wire.tracing import NAMES

_SIGNED = (ID, TIMESTAMP, SIGNATURE)
_CONTEXT = (*NAMES, "relaybox-replay", "relaybox-dead-letter-from", "relaybox-dead-letter-reason")
"""The headers that belong to the event; all others belong to the request."""
_LONGEST_REASON = 500
READ_AGAIN_SECONDS = 1.0


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes


class Refusal(Exception):
    """The request is refused with ``answer``."""

    def __init__(self, status: int, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.answer = problem(status, detail, **headers)


def problem(status: int, detail: str, **headers: str) -> Answer:
    """Return a problem document (RFC 9457); underscores in header names become hyphens."""
    shown = detail.encode("utf-8", "replace").decode()[:_LONGEST_REASON]
    body = {"title": HTTPStatus(status).phrase, "status": status, "detail": shown}
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Answer(status, {"content-type": "application/problem+json", **named}, json.encode(body))


class Webhooks:
    """Verifies and reads signed requests.

    ``secret`` is one or several separated by spaces: a value, ``env:NAME`` or ``file:PATH``. It is read again
    after a wrong signature, at most once a second. ``tolerance`` is for the sender's clock, either way.
    """

    def __init__(self, secret: str | Secret, tolerance: Duration, max_body: str | int) -> None:
        self._secret = parse_secret(secret, "secret")
        self._tolerance = parse_duration(tolerance, "tolerance")
        self.max_body = parse_size(max_body, "max_body")
        self._revealed = self._reveal()
        self._read_again = -math.inf

    def _reveal(self) -> str:
        try:
            revealed = self._secret.reveal()
            parse_keys(revealed)
        except ConfigError as error:
            raise ConfigError(f"secret: {error}") from None
        return revealed

    def admit(self, method: str, headers: Mapping[str, str]) -> None:
        """Raise ``Refusal`` if the headers alone are enough to refuse the request."""
        if method != "POST":
            raise Refusal(405, "events are sent with POST", allow="POST")
        if media_type(headers.get("content-type", "")) not in CONTENT_TYPES:
            raise Refusal(415, f"the content type is not one of {', '.join(CONTENT_TYPES)}")
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise Refusal(415, "the body is compressed; send it as it is")
        length = headers.get("content-length", "").strip()
        if length and not (length.isascii() and length.isdigit()):
            raise Refusal(400, "the content length is not a number")
        # No real length has twenty digits, and Python refuses to parse very long numbers.
        if len(length) > 20 or (length and int(length) > self.max_body):
            raise self.too_large()

    def too_large(self) -> Refusal:
        """Return the refusal of a body longer than ``max_body``."""
        return Refusal(413, f"the body is longer than {self.max_body:,} bytes")

    def read(self, headers: Mapping[str, str], body: bytes) -> Event:
        """Return the event of an admitted request; raise ``Refusal`` if it is not valid."""
        signed = {name: headers[name] for name in _SIGNED if name in headers}
        if not (self._fits(signed, body) or (self._has_changed(signed) and self._fits(signed, body))):
            raise Refusal(401, "the signature is missing, does not fit, or is too old or too new")
        sent_at = datetime.fromtimestamp(int(headers[TIMESTAMP].strip()), UTC)
        context = {name: headers[name] for name in _CONTEXT if name in headers}
        message = Received(headers[ID].strip(), body, headers["content-type"], context, sent_at)
        try:
            return unpack(message)
        except Malformed as error:
            raise Refusal(400, str(error)) from None

    def _has_changed(self, signed: Mapping[str, str]) -> bool:
        """Read the secret again if a new one could fit, but not often: anyone can send bad signatures."""
        complete = len(signed) == len(_SIGNED)
        if not complete or not is_recent(signed[TIMESTAMP].strip(), self._tolerance, time.time()):
            return False
        if time.monotonic() - self._read_again < READ_AGAIN_SECONDS:
            return False
        self._read_again = time.monotonic()
        before = self._revealed
        # The file may be in the middle of being replaced: keep the old secret then.
        with suppress(ConfigError):
            self._revealed = self._reveal()
        return self._revealed != before

    def _fits(self, signed: Mapping[str, str], body: bytes) -> bool:
        return verify(body, signed, self._revealed, tolerance=self._tolerance, now=time.time())


def answer(verdict: Verdict) -> Answer:
    """Return the response for a verdict."""
    match verdict:
        case Done():
            return Answer(204, {}, b"")
        case Rejected(reason):
            return problem(422, reason)
        case Later(reason, after):
            return problem(503, reason, **({} if after is None else {"retry_after": str(math.ceil(after))}))
        case Crashed():
            # The exception's text is only for the log: it may show anything.
            return problem(500, "the handler failed; the receiver's log says why")


def single(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers by lower-case name; raise ``Refusal`` if an important one is repeated.

    Otherwise the signature could cover one id while the event is remembered under the other.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        lower = name.lower()
        if lower in found and lower in (*_SIGNED, "content-type", "content-length", "content-encoding"):
            raise Refusal(400, f"the header {lower} stands there twice")
        found[lower] = value
    return found
