"""This host's clock against the database's."""

from __future__ import annotations

import time

from relaybox.doctor.check import DatabaseContext, Results
from relaybox.doctor.finding import Finding

NOTICEABLE = 5.0
"""Seconds from which on ids and times that this host makes are visibly out of line."""

REFUSED = 300.0
"""Seconds from which on receivers refuse signatures that are made with this host's time."""


async def look(context: DatabaseContext) -> Results:
    """Leases go by the database's clock alone; ids, signatures and logs by the host's."""
    begun, here = time.monotonic(), context.clock()
    there = await context.store.now()
    # Half of the way there and back is the best guess of when the database looked at its clock.
    passed = time.monotonic() - begun
    skew = here + passed / 2 - there.timestamp()
    if abs(skew) < NOTICEABLE + passed:
        return
    way = "ahead of" if skew > 0 else "behind"
    refused = abs(skew) >= REFUSED
    effect = (
        "receivers refuse signatures whose time is 5 minutes off"
        if refused
        else "leases do not depend on it, but the order of ids and the times in signatures and logs do"
    )
    yield Finding(
        "error" if refused else "warning",
        f"this host's clock is {abs(skew):,.0f} s {way} the database's",
        f"here it is {_utc(here)}, there {_utc(there.timestamp())}; {effect}",
        "timedatectl set-ntp true   # on whichever host is wrong; `chronyc tracking` says which",
    )


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
