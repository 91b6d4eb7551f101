"""Checks of deliveries: events that wait or do not decode, and the relays that deliver them."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import version

from relaybox.core.commands import Program
from relaybox.core.settings import Destination, Settings
from relaybox.core.text import at, circuit_word, plural, stated
from relaybox.errors import PayloadError
from relaybox.operate.admin import DestinationStats, headers_of
from relaybox.operate.doctor.check import DatabaseContext, Finding, Results, check, typed
from relaybox.operate.why import is_alive, pause_end
from relaybox.relay.upkeep.agreement import describe, differences
from relaybox.stores.ledger import Content, Counts, Entry, Filter
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.wire.codec import decode

SAMPLE = 100
"""The newest waiting rows that are decoded."""

AT_ONCE = 20
"""Payloads that are fetched at a time: each may have a mebibyte."""

NAMED = 20
"""Rows that a command names."""

CLAIMED = ("ok", "retrying", "failing")
"""The states of a destination in which relays claim what is due."""

LATE = 60.0
"""Seconds that an event may be due without a relay: cron may run a drain."""


@check()
async def destinations(context: DatabaseContext) -> Results:
    """Find events that no relay delivers, and what holds up others; counts stop at a limit."""
    configured = {destination.name: destination for destination in context.settings.destinations}
    for one in (await context.admin.stats()).destinations:
        counts, name = one.counts, one.name
        waiting = counts.due + counts.scheduled + counts.parked
        if name in configured:
            for finding in _held_up(one, configured[name]):
                yield finding
        elif name and waiting + counts.failed:
            title = f"{_wait(waiting, counts)} for {name!r}, which is not a destination"
            detail = "it was renamed or removed, or this is not the configuration of the relays that know it"
            yield Finding("error", title, detail, typed("move", name, _target(name, context.settings)))
        elif waiting:
            page = await context.admin.events(Filter(status="pending", destination=""), limit=NAMED)
            types = sorted({entry.event_type for entry in page.entries})
            title = f"{_wait(waiting, counts)} for a route"
            detail = f"no route takes {', '.join(types) or 'them'}; relays route them as soon as one does"
            route = Program.route.format(types[0] if types else "TYPE")
            fix = f"{route}, or: {typed('move', '', _target('', context.settings))}"
            yield Finding("warning", title, detail, fix)


def _wait(waiting: int, counts: Counts) -> str:
    number = waiting + counts.failed
    events = plural(number, "event", "+" if counts.capped - {"delivered"} else "")
    return f"{events} {'waits' if number == 1 else 'wait'}"


def _target(name: str, settings: Settings) -> str:
    """Return the destination that is most likely meant."""
    names = [one.name for one in settings.destinations if not one.handed_over]
    close = difflib.get_close_matches(name, names, n=1) if name else []
    return close[0] if close else names[0] if len(names) == 1 else "NAME"


def _held_up(one: DestinationStats, destination: Destination) -> Iterator[Finding]:
    place, counts, name = one.place, one.counts, one.name
    if place is not None and place.paused:
        detail = f"by {place.paused_by} until {pause_end(place)}: {stated(place.pause_reason)}"
        yield Finding("info", f"destination {name!r} is paused", detail, typed("resume", name))
    elif place is not None and place.circuit != "closed":
        detail = f"{stated(place.circuit_reason)}; a probe finds out when it is over"
        title = f"the circuit of destination {name!r} is {circuit_word(place.circuit)}"
        yield Finding("warning", title, detail, typed("resume", name))
    if not counts.failed:
        return
    title = f"{plural(counts.failed, 'event', '+' if 'failed' in counts.capped else '')} failed for {name!r}"
    retry = typed("retry", "--destination", name)
    if destination.ordered and destination.on_failed == "block" and counts.parked:
        title = f"{title}, and what is behind in the order waits"
        detail = f"behind them: {plural(counts.parked, 'event')}; retry or discard lets them go on"
        yield Finding("warning", title, detail, retry)
    else:
        detail = f"`{typed('events', 'list', '--status', 'failed', '--destination', name)}` lists them"
        yield Finding("info", title, detail, retry)


@check()
async def payloads(context: DatabaseContext) -> Results:
    """Find events that do not decode, in a sample of the newest waiting ones."""
    page = await context.admin.events(Filter(status="pending"), limit=SAMPLE)
    wrong: dict[tuple[str, str], list[Entry]] = {}
    for start in range(0, len(page.entries), AT_ONCE):
        part = page.entries[start : start + AT_ONCE]
        contents = await context.admin.contents([entry.id for entry in part])
        for entry in part:
            content = contents.get(entry.id)
            if content is not None and (reason := undecodable(content)):
                wrong.setdefault((entry.destination, reason), []).append(entry)
    for (destination, reason), entries in wrong.items():
        ids = [str(entry.id) for entry in entries[:NAMED]]
        title = f"{plural(len(entries), 'event')} for {destination!r} cannot be decoded"
        detail = f"{reason}; of the newest {len(page.entries):,} that wait, such as {ids[0]}"
        yield Finding("error", title, detail, typed("discard", *ids, "--destination", destination))


def undecodable(content: Content) -> str | None:
    """Return why the content of a row cannot be decoded, or ``None``."""
    try:
        decode(content.payload, content.payload_data, content.payload_encoding)
    except PayloadError as error:
        return " ".join(str(error).split())
    return "the stored headers are no JSON object" if headers_of(content) is None else None


@check()
async def relays(context: DatabaseContext) -> Results:
    """Find that no relay runs while events are due, and relays with different settings or releases."""
    stats = await context.admin.stats()
    alive = [relay for relay in stats.relays if is_alive(relay)]
    due = [one for one in stats.destinations if one.counts.due and one.state in CLAIMED]
    if due and not alive and Program.deliverer() is None:
        oldest = max(one.counts.oldest_seconds or 0.0 for one in due)
        seen = f"the last was seen at {at(stats.relays[0].last_seen_at)}" if stats.relays else "none was seen"
        number = sum(one.counts.due for one in due)
        title = f"no relay runs, and {plural(number, 'event')} {'is' if number == 1 else 'are'} due"
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
    ours = version("relaybox")
    if any(relay.version != ours for relay in alive):
        seen = ", ".join(f"{relay.name}: {relay.version}" for relay in alive)
        detail = f"{seen}; this is {ours}. That is well while releases are changed"
        fix = "upgrade and restart the older ones"
        yield Finding("info", "relays of several releases run", detail, fix)


async def _differences(context: DatabaseContext, delivered: set[str]) -> AsyncIterator[Finding]:
    said = await SqlUpkeep(context.store).reports.read()
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
