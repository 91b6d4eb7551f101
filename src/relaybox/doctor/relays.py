"""Whether a relay runs while something is due, and of which release they are."""

from __future__ import annotations

from importlib.metadata import version

from relaybox.admin import DestinationStats
from relaybox.doctor.case import Patient, Results, several, typed
from relaybox.doctor.finding import Finding
from relaybox.program import Program
from relaybox.why import at, is_alive

LATE = 60.0
"""Seconds that something may be due where a drain is run by cron and no relay all the time."""


async def look(patient: Patient) -> Results:
    """None alive while work is due; several releases at once."""
    stats = await patient.admin.stats()
    alive = [relay for relay in stats.relays if is_alive(relay)]
    due = [one for one in stats.destinations if _is_due(one)]
    oldest = max((one.counts.oldest_seconds or 0.0 for one in due), default=0.0)
    if due and not alive and Program.deliverer() is None:
        seen = f"the last was seen at {at(stats.relays[0].last_seen_at)}" if stats.relays else "none was seen"
        number = sum(one.counts.due for one in due)
        title = f"no relay runs, and {several(number, 'event')} {'is' if number == 1 else 'are'} due"
        detail = f"the oldest is {oldest:,.0f} s old; {seen}"
        yield Finding("error" if oldest >= LATE else "info", title, detail, typed("relay"))
    for problem in (await patient.admin.health()).problems if alive else ():
        if problem.destination is not None and "circuit" not in problem.reason:
            title = f"nothing is delivered to {problem.destination!r}"
            detail = f"{problem.reason}, for {problem.seconds or 0.0:,.0f} s, although a relay runs"
            fix = typed("events", "list", "--status", "pending", "--destination", problem.destination)
            yield Finding("warning", title, detail, f"{fix}, and why of one of them")
    releases = {relay.version for relay in alive}
    if len(releases | {version("relaybox")}) > 1 and releases:
        title = "relays of several releases run"
        seen = ", ".join(f"{relay.name}: {relay.version}" for relay in alive)
        detail = f"{seen}; this is {version('relaybox')}. That is well while releases are changed"
        yield Finding("info", title, detail, "upgrade and restart the older ones")


def _is_due(one: DestinationStats) -> bool:
    held = one.place is not None and (one.place.paused or one.place.circuit != "closed")
    return one.configured and not one.handed_over and one.counts.due > 0 and not held
