"""How long to wait before the next attempt."""

from __future__ import annotations

from collections.abc import Callable

from relaybox.core.settings import Backoff


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
