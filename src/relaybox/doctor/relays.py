"""Whether a relay runs while something is due, of which release they are, and how they differ."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import version

from relaybox.admin import DestinationStats
from relaybox.doctor.check import DatabaseContext, Results, several, typed
from relaybox.doctor.finding import Finding
from relaybox.maintenance.agreement import describe, differences
from relaybox.program import Program
from relaybox.stores.upkeep import SqlUpkeep
from relaybox.why import at, is_alive

LATE = 60.0
"""Seconds that something may be due where a drain is run by cron and no relay all the time."""


async def look(context: DatabaseContext) -> Results:
    """None alive while work is due; different settings; several releases at once."""
    stats = await context.admin.stats()
    alive = [relay for relay in stats.relays if is_alive(relay)]
    due = [one for one in stats.destinations if _is_due(one)]
    oldest = max((one.counts.oldest_seconds or 0.0 for one in due), default=0.0)
    if due and not alive and Program.deliverer() is None:
        seen = f"the last was seen at {at(stats.relays[0].last_seen_at)}" if stats.relays else "none was seen"
        number = sum(one.counts.due for one in due)
        title = f"no relay runs, and {several(number, 'event')} {'is' if number == 1 else 'are'} due"
        detail = f"the oldest is {oldest:,.0f} s old; {seen}"
        yield Finding("error" if oldest >= LATE else "info", title, detail, typed("relay"))
    for problem in (await context.admin.health()).problems if alive else ():
        if problem.destination is not None and "circuit" not in problem.reason:
            title = f"nothing is delivered to {problem.destination!r}"
            detail = f"{problem.reason}, for {problem.seconds or 0.0:,.0f} s, although a relay runs"
            fix = typed("events", "list", "--status", "pending", "--destination", problem.destination)
            yield Finding("warning", title, detail, f"{fix}, and why of one of them")
    delivered = {one.name for one in stats.destinations if one.counts.delivered}
    async for finding in _differences(context, delivered):
        yield finding
    releases = {relay.version for relay in alive}
    if len(releases | {version("relaybox")}) > 1 and releases:
        title = "relays of several releases run"
        seen = ", ".join(f"{relay.name}: {relay.version}" for relay in alive)
        detail = f"{seen}; this is {version('relaybox')}. That is well while releases are changed"
        yield Finding("info", title, detail, "upgrade and restart the older ones")


async def _differences(context: DatabaseContext, delivered: set[str]) -> AsyncIterator[Finding]:
    """Relays that run with different settings, and rows that nobody prunes because nobody knows them."""
    upkeep = SqlUpkeep(context.store)
    said = await upkeep.said()
    for name, each in differences(said).items():
        title = f"relays have different settings for {name!r}"
        fix = "give every relay the same settings, and restart the others; while releases are changed, wait"
        yield Finding("warning", title, describe(name, each), fix)
    known = {one.destination for one in said} | {one.name for one in context.settings.destinations}
    for name in sorted(delivered - known):
        title = f"what was delivered to {name!r} is kept for good"
        detail = "no relay has ever said how long it is to be kept, so that nobody prunes it"
        fix = f"start a relay that has {name!r} once, with the retention that is meant"
        yield Finding("info", title, detail, fix)


def _is_due(one: DestinationStats) -> bool:
    held = one.place is not None and (one.place.paused or one.place.circuit != "closed")
    return one.configured and not one.handed_over and one.counts.due > 0 and not held
