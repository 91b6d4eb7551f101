"""Decide what the status and the ``Retry-After`` of an HTTP answer mean for a delivery."""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from relaybox.core.outcome import Gone, Reject, Retry, Throttled, Unavailable

LONGEST_RETRY_AFTER = 3600.0
"""Seconds; a longer ``Retry-After`` is cut to this."""

_REJECT = frozenset([400, 409, 413, 415, 422])
_UNAVAILABLE = frozenset([401, 403, 404, 407, 502, 503, 504])


def classify(status: int, reason: str, after: float | None = None) -> Retry | Reject | Unavailable:
    """Return the answer that a status other than 2xx stands for."""
    if status in _REJECT:
        return Reject(reason)
    if status == HTTPStatus.GONE:
        return Gone(reason)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return Throttled(reason, after=after)
    if status in _UNAVAILABLE or status // 100 == 3:
        return Unavailable(reason, after=after)
    return Retry(reason, after=after)


def phrase_of(status: int) -> str:
    """Return the phrase of a status, such as ``Service Unavailable`` for 503, or an empty text."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def retry_after(value: str | None, now: float) -> float | None:
    """Return the seconds that a ``Retry-After`` (a number or a date) asks for, at most an hour."""
    text = (value or "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        seconds = float(text)
    elif text.isascii() and text.isdigit():
        seconds = LONGEST_RETRY_AFTER
    else:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now
        except Exception:
            # The parser raises many kinds of errors, and a bad date must not fail the delivery.
            return None
    return min(seconds, LONGEST_RETRY_AFTER) if seconds > 0 else None
