"""How fast a bulk action goes, and whether it goes on."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from relaybox.errors import ConfigError

LOOK = 0.25
"""Seconds of waiting after which it is asked again whether to stop."""


def never() -> bool:
    """For callers that do not want to stop it."""
    return False


class Pace:
    """Lets so many rows a second through, in parts no larger than those of a second; None: all at once."""

    def __init__(self, rate: float | None, stop: Callable[[], bool]) -> None:
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"rate = {rate:g}: use rows a second, more than 0")
        self._rate = rate
        self._stop = stop
        self._free_at = time.monotonic()
        self.stopped = False

    def size(self, most: int) -> int:
        """How many rows to do at a time, no more than ``most``."""
        return most if self._rate is None else min(most, max(1, int(self._rate)))

    @property
    def waits(self) -> bool:
        """Whether nothing may go at this moment."""
        return self._rate is not None and self._free_at > time.monotonic()

    async def turn(self, count: int) -> bool:
        """Wait until so many may go; whether to go on."""
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
