"""The clock of a relay: monotonic, for timers only. What is due, the database's clock decides.

``now`` goes on while the machine is suspended, ``sleep`` does not: after a wake-up what was being waited for
comes late, and every lease, term and membership that is over by then is seen to be.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

# Leases go on while a machine sleeps. A clock that stands still meanwhile, as ``time.monotonic`` does,
# would have a relay believe after its wake-up that it still holds what others have long taken over.
uptime: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds since some moment, suspension included; never goes back. A partial, which is cheaper than a
function: a lane asks for every delivery.
"""


class Clock(Protocol):
    """Measures durations and sleeps."""

    def now(self) -> float:
        """Seconds from some moment on, suspension included; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        ...


class MonotonicClock:
    """The machine's own."""

    # Without a call in between: a lane asks for every delivery.
    now = staticmethod(uptime)

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await asyncio.sleep(seconds)
