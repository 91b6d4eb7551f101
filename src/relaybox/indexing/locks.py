"""How rows of the application are locked without holding it up.

Who waits while he holds locks may hold up others for as long, or stand in a circle with them, and then it may
be the application's transaction that the database ends. So several rows are locked without waiting, or nearly
so, and where somebody has one of them it is tried with fewer. Only a row that is alone is waited for.
"""

from __future__ import annotations

from typing import Any

from relaybox.errors import StoreError

HURRIED = 0.2
"""Seconds of waiting where other rows are locked already: less than PostgreSQL takes to look for a deadlock."""

PATIENT = 1.5
"""Seconds of waiting where nothing else is locked; longer than PostgreSQL takes to end an autovacuum for it."""

_TEXTS = {
    "postgresql": "SET LOCAL lock_timeout = {milliseconds}",
    "mysql": "SET SESSION innodb_lock_wait_timeout = {seconds}",
}

DEADLOCK, LOCK_WAIT_TIMEOUT = 1213, 1205
_PASSING = {"40P01", "40001", "55P03", DEADLOCK, LOCK_WAIT_TIMEOUT, "database is locked"}


class Busy(StoreError):
    """Other transactions have what is to be locked. The text says what to do."""

    def __init__(self, what: str, error: Exception) -> None:
        told = " ".join(str(error).split())
        fix = "end them, or start this again when they have ended"
        super().__init__(f"other transactions hold {what} for too long ({told}); {fix}")


class Portion:
    """How many rows to lock at once: fewer where others have some of them, more again where nobody has."""

    def __init__(self) -> None:
        self._most: int | None = None

    def of(self, size: int) -> int:
        """As many as are wanted, or fewer."""
        return size if self._most is None else min(size, self._most)

    def less(self, size: int) -> None:
        """So many were too many."""
        self._most = max(1, size // 4)

    def more(self, size: int) -> None:
        """So many could be had."""
        if self._most is not None:
            self._most = max(self._most, size * 2)


def lock_wait(backend: str, seconds: float) -> str | None:
    """What says, inside a transaction, how long it waits for a lock; SQLite has one writer at a time."""
    text = _TEXTS.get(backend)
    return text and text.format(milliseconds=int(seconds * 1_000), seconds=int(seconds))


def is_passing(error: Any) -> bool:
    """Whether a driver's error is a deadlock, or a lock that was waited for too long."""
    code = getattr(error, "sqlstate", None) or (*error.args, None)[0]
    return code in _PASSING
