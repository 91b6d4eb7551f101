"""The clock of a relay: monotonic, for timers only. What is due, the database's clock decides."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Measures durations and sleeps."""

    def now(self) -> float:
        """Seconds from some moment on; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        ...


class MonotonicClock:
    """The machine's own."""

    # Without a call in between: a lane asks for every delivery.
    now = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await asyncio.sleep(seconds)
