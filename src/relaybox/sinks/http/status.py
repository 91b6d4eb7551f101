"""What an HTTP status means for a delivery."""

from __future__ import annotations

from http import HTTPStatus

from relaybox.core.outcome import Gone, Reject, Retry, Throttled, Unavailable

_REJECT = frozenset([400, 409, 413, 415, 422])
_UNAVAILABLE = frozenset([401, 403, 404, 407, 502, 503, 504])


def classify(status: int, reason: str, after: float | None = None) -> Retry | Reject | Unavailable:
    """What an answer other than 2xx means for the delivery."""
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
    """``Service Unavailable`` for 503; nothing for a number that means nothing."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
