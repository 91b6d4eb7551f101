"""Limit the rate of a bulk action, and let it be stopped."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from relaybox.errors import ConfigError

LOOK = 0.25
"""Seconds of waiting between two checks whether to stop."""


def never() -> bool:
    """Return False: the action is not stopped."""
    return False


class Pace:
    """Limits rows a second, in batches of at most one second's rows; None: no limit."""

    def __init__(self, rate: float | None, stop: Callable[[], bool]) -> None:
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"rate = {rate:g}: use rows a second, more than 0")
        self._rate = rate
        self._stop = stop
        self._free_at = time.monotonic()
        self.stopped = False

    def size(self, most: int) -> int:
        """Return how many rows to process at a time, at most ``most``."""
        return most if self._rate is None else min(most, max(1, int(self._rate)))

    @property
    def waits(self) -> bool:
        """True if nothing may be processed at this moment."""
        return self._rate is not None and self._free_at > time.monotonic()

    async def turn(self, count: int) -> bool:
        """Wait until ``count`` rows may be processed. Return False to stop."""
        while not self.stopped and not self._stop():
            if self._rate is None:
                return True
            now = time.monotonic()
            if self._free_at <= now:
                self._free_at = now + count / self._rate
                return True
            await asyncio.sleep(min(self._free_at - now, LOOK))
        self.stopped = True
        return False
