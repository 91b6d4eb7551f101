"""The overview at ``/``, and the pages ``/destinations`` and ``/destinations/{name}``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from relaybox.core.settings import Destination
from relaybox.core.text import at, duration, plural, shortened, stated
from relaybox.operate.admin import DestinationStats, Point, Series, Stats
from relaybox.operate.documents import counted, place_of
from relaybox.operate.health import Health as Flow
from relaybox.operate.why import is_alive, pause_end
from relaybox.web.charts import HOURS, charts, chosen_period
from relaybox.web.templating import error_page, page

Mood: TypeAlias = Literal["good", "warn", "bad", ""]


@dataclass(frozen=True, slots=True)
class Health:
    """A destination's state; ``word`` selects the icon, and ``held`` means that it can be resumed."""

    word: str
    text: str
    mood: Mood
    note: str = ""
    held: bool = False
    paused: bool = False


SIMPLE: Mapping[str, Health] = {
    "debezium": Health("handed-over", "Debezium’s", "", "Debezium reads it from the database’s log."),
    "no route": Health("unrouted", "unrouted", "warn", "No route takes these events: add one."),
    "unknown": Health("unknown", "not configured", "warn", "No destination of this name is configured here."),
    "ok": Health("healthy", "healthy", "good", "Nothing holds it up."),
}
"""The health of states that need no more words."""

Row: TypeAlias = tuple[DestinationStats, Health, str]
"""A destination, its health, and the place of its sink."""


async def overview(request: Request) -> Response:
    """Show rates, lag, backlog and every destination's state."""
    admin = request.state.admin
    period = chosen_period(request)
    stats = await admin.stats()
    series = await admin.series(HOURS[period])
    recent = series if period == "1h" else await admin.series(HOURS["1h"])
    health = await admin.health()
    every = rows(stats, await admin.destinations())
    mood, headline = _headline(health, every)
    return page(
        request,
        "overview.html",
        stats=stats,
        rows=every,
        mood=mood,
        headline=headline,
        problems=health.problems,
        alive=sum(map(is_alive, stats.relays)),
        charts=charts(series, HOURS[period]),
        latest=latest(recent),
        delivered=sum(point.delivered for point in series.points) * series.step.total_seconds(),
        failed=sum(point.failed for point in series.points),
        **_periods(period),
    )


def latest(series: Series) -> Point:
    """Return the newest complete step; the current one has only a part of its numbers."""
    return series.points[-2] if len(series.points) > 1 else series.points[-1]


def _headline(flow: Flow, every: list[Row]) -> tuple[Mood, str]:
    troubled = [health for _, health, _ in every if health.mood in ("warn", "bad")]
    if not flow.ready:
        return "bad", "Deliveries do not flow as they should."
    if troubled:
        verb = "needs" if len(troubled) == 1 else "need"
        return "warn", f"{len(troubled)} of {plural(len(every), 'destination')} {verb} attention."
    if not every:
        return "", "Nothing is configured yet."
    return "good", "Everything flows." if len(every) == 1 else f"All {len(every)} destinations are healthy."


def _periods(chosen: str) -> dict[str, Any]:
    labels = {name: f"{name[:-1]} {name[-1]}" for name in HOURS}
    return {"periods": labels.items(), "period": chosen, "label": labels[chosen]}


async def destinations(request: Request) -> Response:
    """Show every destination that is configured or has rows."""
    admin = request.state.admin
    every = rows(await admin.stats(), await admin.destinations())
    troubled = sum(health.mood in ("warn", "bad") for _, health, _ in every)
    spoken = f"{troubled} of {plural(len(every), 'destination')} in trouble"
    return page(request, "destinations.html", rows=every, spoken=spoken)


async def destination(request: Request) -> Response:
    """Show one destination: health, charts, settings and actions."""
    admin = request.state.admin
    name = request.path_params["name"]
    configured = await admin.destinations()
    found = next((one for one in (await admin.stats()).destinations if one.name == name), None)
    if found is None:
        return error_page(request, 404, "No such destination", f"None is called {shortened(name)!r}.")
    period = chosen_period(request)
    series = await admin.series(HOURS[period], name)
    return page(
        request,
        "destination.html",
        one=found,
        health=health(found),
        charts=charts(series, HOURS[period]),
        settings=list(_settings(configured[name])) if name in configured else [],
        others=sorted(one for one, about in configured.items() if one != name and not about.handed_over),
        **_periods(period),
    )


def _settings(one: Destination) -> Iterator[tuple[str, str]]:
    """Yield the settings of a destination, without secrets."""
    yield "Sink", place_of(one.sink)
    yield "Format", _word(one.format)
    failed = "blocks" if one.on_failed == "block" else "skips"
    order = f"by {_word(one.ordering)}, a failed one {failed} its key"
    yield "Order", order if one.ordered else "none"
    yield "Attempts", str(one.max_attempts)
    backoff = one.backoff
    yield "Backoff", f"{backoff.base:g} s × {backoff.factor:g} up to {duration(backoff.cap)}"
    yield "Timeout, lease", f"{one.timeout:g} s, {one.lease:g} s"
    yield "Concurrency, batch", f"{one.concurrency}, {one.batch_size}"
    yield "Rate limit", "none" if one.rate_limit is None else f"{one.rate_limit:g} a second"
    yield "Retention", duration(one.retention) if one.retention else "deleted when delivered"
    yield "Dead letters to", one.dead_letter or "nowhere"
    yield "Signed, authorized", f"{'yes' if one.secret else 'no'}, {'yes' if one.auth else 'no'}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else "a function"


def rows(stats: Stats, configured: Mapping[str, Destination]) -> list[Row]:
    """Return every destination, those with problems first."""
    order: dict[Mood, int] = {"bad": 0, "warn": 1, "": 2, "good": 2}
    sinks = {name: place_of(one.sink) for name, one in configured.items()}
    every = [(one, health(one), sinks.get(one.name, "")) for one in stats.destinations]
    return sorted(every, key=lambda row: (order[row[1].mood], row[0].name))


def health(one: DestinationStats) -> Health:
    """Return the destination's state in the words of pages."""
    state, place, counts = one.state, one.place, one.counts
    if state in SIMPLE:
        return SIMPLE[state]
    if state == "failing":
        note = f"It delivers, but {counted(counts, 'failed')} failed for good."
        return Health("failing", "has failures", "warn", note)
    if state == "retrying":
        return Health("retrying", "retrying", "", f"What is tried again next: {counts.retrying}")
    assert place is not None
    if state == "paused":
        note = f"By {place.paused_by}, until {pause_end(place)}: {stated(place.pause_reason)}"
        return Health("paused", "paused", "warn", note, held=True, paused=True)
    reason = stated(place.circuit_reason)
    if state == "circuit half-open":
        note = f"A probe is on its way. {reason}"
        return Health("circuit-half-open", state, "warn", note, held=True)
    probe = "" if place.circuit_until is None else f" The next probe comes at {at(place.circuit_until)}."
    return Health("circuit-open", state, "bad", f"{reason}.{probe}", held=True)
