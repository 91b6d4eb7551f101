"""The database's time, as far as this process knows it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from relaybox.core.clock import Clock


class DatabaseTime:
    """Runs with the monotonic clock, from the database's last word on; before that, from the host's time."""

    def __init__(self, clock: Clock, host_time: Callable[[], datetime]) -> None:
        self._clock = clock
        self.set(host_time())

    def set(self, now: datetime) -> None:
        """The database has just said what time it is."""
        self._said, self._at = now, self._clock.now()

    def now(self) -> datetime:
        """What the database would say now."""
        return self._said + timedelta(seconds=self._clock.now() - self._at)
