"""How rows of the application are locked without holding it up.

Who waits while he holds locks may hold up others for as long, or stand in a circle with them, and then it may
be the application's transaction that the database ends. So several rows are locked without waiting, or nearly
so, and where somebody has one of them it is tried with fewer. Only a row that is alone is waited for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from relaybox.errors import StoreError

T = TypeVar("T")

HURRIED = 0.2
"""Seconds of waiting where other rows are locked already; PostgreSQL takes longer to look for a deadlock."""

PATIENT = 1.5
"""Seconds of waiting where nothing else is locked; PostgreSQL takes less to end an autovacuum for it."""

TRIES = 5
PAUSE = 0.25
"""Seconds before the second try of one who is patient, and twice as many before each other."""

DEADLOCK, LOCK_WAIT_TIMEOUT = 1213, 1205
_PASSING = {"40P01", "40001", "55P03", DEADLOCK, LOCK_WAIT_TIMEOUT, "database is locked"}


class Busy(StoreError):
    """Other transactions have what is to be locked. The text says what to do."""

    def __init__(self, what: str, error: Exception) -> None:
        told = " ".join(str(error).split())
        fix = "end them, or start this again when they have ended"
        super().__init__(f"other transactions hold {what} for too long ({told}); {fix}")


class Found(NamedTuple):
    """How many events were emitted of the rows that were found, and the ids of which there is none."""

    emitted: int
    gone: frozenset[str]


class Portion:
    """How many rows to lock at once: fewer where others have some of them, more again where nobody has."""

    def __init__(self) -> None:
        self._most: int | None = None

    async def take(self, size: int, work: Callable[[int, float], Awaitable[T]]) -> T:
        """Do the work with that many rows, or fewer; it is told how long to wait for them."""
        while (part := size if self._most is None else min(size, self._most)) > 1:
            try:
                done = await work(part, HURRIED)
            except Busy:
                self._most = max(1, part // 4)
            else:
                return self._had(part, done)
        return self._had(1, await work(1, PATIENT))

    def _had(self, size: int, done: T) -> T:
        if self._most is not None:
            self._most = max(self._most, size * 2)
        return done


async def by_parts(ids: Sequence[str], work: Callable[[Sequence[str], float], Awaitable[Found]]) -> Found:
    """Do the work with these ids, by halves where others have rows of them."""
    if len(ids) > 1:
        try:
            return await work(ids, HURRIED)
        except Busy:
            half = len(ids) // 2
            one, other = await by_parts(ids[:half], work), await by_parts(ids[half:], work)
            return Found(one.emitted + other.emitted, one.gone | other.gone)
    return await work(ids, PATIENT) if ids else Found(0, frozenset())


def is_passing(error: Any) -> bool:
    """Whether a driver's error is a deadlock, or a lock that was waited for too long."""
    # MySQL's own numbers say more than the SQLSTATE that some of its drivers have too.
    return getattr(error, "sqlstate", None) in _PASSING or (*error.args, None)[0] in _PASSING
