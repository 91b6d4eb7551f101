"""Rows that nobody will deliver, rows that hold up others, and rows that do not decode."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence

from relaybox.admin import DestinationStats
from relaybox.codec import decode
from relaybox.config import Destination, Settings
from relaybox.doctor.check import DatabaseContext, Results, several, typed
from relaybox.doctor.finding import Finding
from relaybox.errors import PayloadError
from relaybox.ledger import Content, Counts, Entry, Filter
from relaybox.program import Program
from relaybox.why import at

SAMPLE = 100
"""How many of the newest waiting rows are decoded."""

AT_ONCE = 20
"""How many payloads are fetched at a time: each may be of a mebibyte."""

NAMED = 20
"""How many rows a command names."""


async def look(context: DatabaseContext) -> Results:
    """What the counts of each destination say; they stop at a limit, so that nothing is read whole."""
    configured = {destination.name: destination for destination in context.settings.destinations}
    for one in (await context.admin.stats()).destinations:
        if one.name in configured:
            for finding in _held_up(one, configured[one.name]):
                yield finding
        elif not one.name:
            if _waiting(one.counts):
                yield await _unrouted(context, one)
        elif _waiting(one.counts) + one.counts.failed:
            yield _unknown(one, context.settings)


def _waiting(counts: Counts) -> int:
    return counts.due + counts.scheduled + counts.parked


async def _unrouted(context: DatabaseContext, one: DestinationStats) -> Finding:
    page = await context.admin.events(Filter(status="pending", destination=""), limit=NAMED)
    types = sorted({entry.event_type for entry in page.entries})
    title = f"{_wait(one.counts)} for a route"
    detail = f"no route takes {', '.join(types) or 'them'}; relays route them as soon as one does"
    route = Program.route.format(types[0] if types else "TYPE")
    fix = f"{route}, or: {typed('move', '', _target('', context.settings))}"
    return Finding("warning", title, detail, fix)


def _unknown(one: DestinationStats, settings: Settings) -> Finding:
    title = f"{_wait(one.counts)} for {one.name!r}, which is no destination"
    detail = "it was renamed or removed, or this is not the configuration of the relays that know it"
    return Finding("error", title, detail, typed("move", one.name, _target(one.name, settings)))


def _target(name: str, settings: Settings) -> str:
    """The destination that is most likely meant."""
    names = [one.name for one in settings.destinations if not one.handed_over]
    close = difflib.get_close_matches(name, names, n=1) if name else []
    return close[0] if close else names[0] if len(names) == 1 else "NAME"


def _wait(counts: Counts) -> str:
    number = _waiting(counts) + counts.failed
    more = "+" if counts.capped - {"delivered"} else ""
    return "1 event waits" if number == 1 else f"{number:,}{more} events wait"


def _held_up(one: DestinationStats, destination: Destination) -> Iterator[Finding]:
    place, counts, name = one.place, one.counts, one.name
    if place is not None and place.paused:
        until = "somebody resumes it" if place.paused_until is None else at(place.paused_until)
        detail = f"by {place.paused_by} until {until}: {place.pause_reason or 'no reason given'}"
        yield Finding("info", f"destination {name!r} is paused", detail, typed("resume", name))
    elif place is not None and place.circuit != "closed":
        state = place.circuit.replace("_", "-")
        detail = f"{place.circuit_reason or 'no reason given'}; a probe finds out when it is over"
        title = f"the circuit of destination {name!r} is {state}"
        yield Finding("warning", title, detail, typed("resume", name))
    if not counts.failed:
        return
    more = "+" if "failed" in counts.capped else ""
    failed = "1 event" if counts.failed == 1 else f"{counts.failed:,}{more} events"
    retry = typed("retry", "--destination", name)
    if destination.ordered and destination.on_failed == "block" and counts.parked:
        title = f"{failed} failed for {name!r}, and what is behind in the order waits"
        detail = f"behind them: {several(counts.parked, 'event')}; retry or discard lets them go on"
        yield Finding("warning", title, detail, retry)
    else:
        title = f"{failed} failed for {name!r}"
        detail = f"`{typed('events', 'list', '--status', 'failed', '--destination', name)}` lists them"
        yield Finding("info", title, detail, retry)


async def payloads(context: DatabaseContext) -> Results:
    """A sample of what waits, the newest."""
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
        yield _undecodable(destination, reason, entries, len(page.entries))


def undecodable(content: Content) -> str | None:
    """Why nothing can be made of what a row carries."""
    try:
        decode(content.payload, content.payload_data, content.payload_encoding)
    except PayloadError as error:
        return " ".join(str(error).split())
    try:
        headers = json.loads(content.headers)
    except (ValueError, RecursionError):
        headers = None
    return None if isinstance(headers, dict) else "the stored headers are no JSON object"


def _undecodable(destination: str, reason: str, entries: Sequence[Entry], looked_at: int) -> Finding:
    ids = [str(entry.id) for entry in entries[:NAMED]]
    title = f"{several(len(entries), 'event')} for {destination!r} cannot be decoded"
    detail = f"{reason}; of the newest {looked_at:,} that wait, such as {ids[0]}"
    return Finding("error", title, detail, typed("discard", *ids, "--destination", destination))
