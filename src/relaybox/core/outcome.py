"""The answers a handler may give, the outcomes that a store settles, and how long a retry waits.

A handler raises ``Retry``, ``Reject`` or ``Unavailable``. A relay turns the result of each send into
``Delivered``, ``Retried``, ``Failed`` or ``Released``, and a store settles those.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from relaybox.core.settings import Backoff


class _Later(Exception):
    def __init__(self, reason: str = "", *, after: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after


class Retry(_Later):
    """Raised by a handler: try this event again later (it counts as an attempt)."""


class Interrupted(Retry):
    """The relay stopped while the handler was still running. This is not a failure."""


class Reject(Exception):
    """Raised by a handler: this event can never succeed; fail it at once."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Unavailable(_Later):
    """Raised by a handler: the destination has a problem, not the event."""


class Unreachable(Unavailable):
    """The destination cannot be reached (refused, DNS, TLS). One such answer opens the circuit."""


class Throttled(Unavailable):
    """The destination is sent more than it accepts (429). The event is not the cause."""


class Gone(Unavailable):
    """The destination said that it will not come back (410): it is paused."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """Acknowledged, or in ``shadow`` not sent at all. ``keep=False`` deletes the row."""

    keep: bool = True
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class Retried:
    """Due again ``after`` seconds from now; ``counts=False`` gives the attempt back.

    ``cut_off``: there was no answer, so ``crashes`` grows by one instead of being reset to 0.
    """

    after: float
    error: str
    counts: bool = True
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Failed for good: only an operator can retry it. ``counts=False`` gives the attempt back."""

    error: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Released:
    """Not tried: due now at its old place, with its attempt given back."""


Outcome: TypeAlias = Delivered | Retried | Failed | Released


def unfinished(result: Any) -> bool:
    """True if a handler returned an awaitable, so its work has not run. A coroutine is closed."""
    if inspect.iscoroutine(result):
        result.close()
    return inspect.isawaitable(result)


LONGEST_WAIT = 10 * 365 * 86_400.0
"""Seconds; every database can add them to its clock."""


def wait(after: float) -> float:
    """Clamp a handler's ``after`` to between 0 and ``LONGEST_WAIT`` seconds."""
    return min(max(after, 0.0), LONGEST_WAIT) if math.isfinite(after) else LONGEST_WAIT


def delay(backoff: Backoff, attempts: int, random: Callable[[], float]) -> float:
    """Return the seconds to wait after attempt ``attempts``; ``random`` returns numbers from 0 to 1."""
    if not backoff.base:
        return 0.0
    try:
        full = min(backoff.cap, backoff.base * backoff.factor ** (attempts - 1))
    except OverflowError:
        full = backoff.cap
    if backoff.jitter == "full":
        return full * random()
    return full * (1 + backoff.jitter * (2 * random() - 1))
