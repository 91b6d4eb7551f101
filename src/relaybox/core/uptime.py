"""Seconds since some moment, the time for which the machine was suspended included, where the system says.

Leases go on while a machine sleeps. A clock that stands still meanwhile, as ``time.monotonic`` does on Linux,
would have a relay believe after its wake-up that it still holds what others have long taken over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

uptime: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Never goes back. A partial, which is cheaper than a function: a lane asks for every delivery."""
