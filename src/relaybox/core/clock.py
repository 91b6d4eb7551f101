"""The relay's clock: monotonic, for timers only. The database's clock decides what is due.

``now`` counts while the machine is suspended; ``sleep`` does not. After a resume, sleeps end late, and
expired leases, terms and memberships are noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

# Leases expire while a machine is suspended. ``time.monotonic`` stands still meanwhile, and a resumed relay
# would believe that it still holds rows that others have taken over.
uptime: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds since some moment; never goes back. A ``partial`` is cheap: a lane calls it per delivery."""


class Clock(Protocol):
    """Measures durations and sleeps."""

    def now(self) -> float:
        """Return the seconds since some moment, suspension included; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        ...


class MonotonicClock:
    """The machine's clock."""

    now = staticmethod(uptime)

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)
