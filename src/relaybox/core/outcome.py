"""What a handler may say of a delivery, and what becomes of its row.

A handler raises ``Retry``, ``Reject`` or ``Unavailable``; a relay turns every ending of a send into
one of the values ``Delivered``, ``Retried``, ``Failed`` and ``Released``, and a store settles those.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias


class Retry(Exception):
    """Raised by a handler: try this event again later (it counts as an attempt)."""

    def __init__(self, reason: str = "", *, after: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after


class Interrupted(Retry):
    """The relay stopped while the handler ran, and the handler runs on: a stop is not a failure."""


class Reject(Exception):
    """Raised by a handler: this event can never succeed; it is failed at once."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Unavailable(Exception):
    """Raised by a handler: the destination is in trouble, not the event."""

    def __init__(self, reason: str = "", *, after: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after


class Unreachable(Unavailable):
    """There is nobody there (refused, DNS, TLS): one such answer opens the circuit."""


class Throttled(Unavailable):
    """The destination is sent more than it takes (429): that is no event's doing."""


class Gone(Unavailable):
    """The destination said that it will not come back (410): it is paused."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The destination acknowledged it. ``keep=False`` deletes the row instead of keeping it.

    ``shadow``: nothing was sent, because it was emitted in shadow.
    """

    keep: bool = True
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class Retried:
    """Due again ``after`` seconds from now; ``counts=False`` gives the attempt back.

    ``cut_off``: there was no answer, so the row's ``crashes`` grow by one instead of starting again from 0.
    """

    after: float
    error: str
    counts: bool = True
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Failed for good: only an operator moves it again. ``counts=False`` gives the attempt back."""

    error: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Released:
    """Not tried: due now at its old place, and the attempt is given back."""


Outcome: TypeAlias = Delivered | Retried | Failed | Released


def unfinished(result: Any) -> bool:
    """Whether a handler returned an awaitable: its work has yet to run. A coroutine is given up."""
    if inspect.iscoroutine(result):
        result.close()
    return inspect.isawaitable(result)


LONGEST_WAIT = 10 * 365 * 86_400.0
"""Seconds; every database can add them to its clock."""


def wait(after: float) -> float:
    """Seconds to wait, of whatever ``after`` says: no less than none, and not for ever."""
    return min(max(after, 0.0), LONGEST_WAIT) if math.isfinite(after) else LONGEST_WAIT
