"""``/destinations`` and one of them: health, charts, settings, and what an operator can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from relaybox.core.settings import Destination
from relaybox.operate.admin import DestinationStats, Stats
from relaybox.operate.why import at
from relaybox.stores.ledger import Counts, Place
from relaybox.web import show
from relaybox.web.charts import PERIODS, charts, chosen_period
from relaybox.web.templating import error_page, page

Mood: TypeAlias = Literal["good", "warn", "bad", ""]


@dataclass(frozen=True, slots=True)
class Health:
    """``word`` names the shape, ``text`` stands by it, ``note`` says more; ``held``: it can be resumed."""

    word: str
    text: str
    mood: Mood
    note: str = ""
    held: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A destination as pages list it."""

    name: str
    configured: bool
    handed_over: bool
    counts: Counts
    health: Health
    sink: str = ""


async def destinations(request: Request) -> Response:
    """Every destination that is configured, or has rows."""
    admin = request.state.admin
    every = rows(await admin.stats(), dict(await admin.destinations()))
    troubled = sum(one.health.mood in ("warn", "bad") for one in every)
    spoken = f"{troubled} of {show.plural(len(every), 'destination')} in trouble"
    return page(request, "destinations.html", rows=every, spoken=spoken)


async def destination(request: Request) -> Response:
    """All about one."""
    admin = request.state.admin
    name = request.path_params["name"]
    configured = dict(await admin.destinations())
    stats = await admin.stats()
    found = next((one for one in stats.destinations if one.name == name), None)
    if found is None:
        return error_page(request, 404, "No such destination", f"None is called {show.shortened(name)!r}.")
    period = chosen_period(request)
    series = await admin.series(PERIODS[period].hours, name)
    return page(
        request,
        "destination.html",
        one=row(found, configured.get(name)),
        charts=charts(series, PERIODS[period].hours),
        settings=list(_settings(configured[name])) if name in configured else [],
        others=sorted(one for one, about in configured.items() if one != name and not about.handed_over),
        periods=PERIODS.items(),
        period=period,
        label=PERIODS[period].label,
    )


def _settings(one: Destination) -> Iterator[tuple[str, str]]:
    """What is configured, without what is secret."""
    yield "Sink", show.place(one.sink)
    yield "Format", _word(one.format)
    yield (
        "Order",
        f"by {_word(one.ordering)}, a failed one {'blocks' if one.on_failed == 'block' else 'skips'} its key"
        if one.ordered
        else "none",
    )
    yield "Attempts", str(one.max_attempts)
    backoff = one.backoff
    yield "Backoff", f"{backoff.base:g} s × {backoff.factor:g} up to {show.duration(backoff.cap)}"
    yield "Timeout, lease", f"{one.timeout:g} s, {one.lease:g} s"
    yield "Concurrency, batch", f"{one.concurrency}, {one.batch_size}"
    yield "Rate limit", "none" if one.rate_limit is None else f"{one.rate_limit:g} a second"
    yield "Retention", show.duration(one.retention) if one.retention else "deleted when delivered"
    yield "Dead letters to", one.dead_letter or "nowhere"
    yield "Signed, authorized", f"{'yes' if one.secret else 'no'}, {'yes' if one.auth else 'no'}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else "a function"


def row(one: DestinationStats, configured: Destination | None) -> Row:
    """A destination with its health and where it leads."""
    sink = "" if configured is None else show.place(configured.sink)
    return Row(one.name, one.configured, one.handed_over, one.counts, health(one), sink)


def rows(stats: Stats, configured: dict[str, Destination]) -> list[Row]:
    """Every destination, those in trouble first."""
    order: dict[Mood, int] = {"bad": 0, "warn": 1, "": 2, "good": 2}
    every = [row(one, configured.get(one.name)) for one in stats.destinations]
    return sorted(every, key=lambda one: (order[one.health.mood], one.name))


def health(one: DestinationStats) -> Health:
    """What ``why`` would name first."""
    place = one.place
    if place is not None and place.paused:
        return _paused(place)
    if place is not None and place.circuit != "closed":
        return _circuit(place)
    if one.handed_over:
        return Health("handed-over", "Debezium’s", "", "Debezium reads it from the database’s log.")
    if not one.name:
        return Health("unrouted", "unrouted", "warn", "No route takes these events: add one.")
    if not one.configured:
        return Health("unknown", "not configured", "warn", "No destination of this name is configured here.")
    if one.counts.failed:
        failed = show.counted(one.counts, "failed")
        return Health("failing", "has failures", "warn", f"It delivers, but {failed} failed for good.")
    if one.counts.retrying:
        return Health("retrying", "retrying", "", f"What is tried again next: {one.counts.retrying}")
    return Health("healthy", "healthy", "good", "Nothing holds it up.")


def _paused(place: Place) -> Health:
    until = "until somebody resumes it" if place.paused_until is None else f"until {at(place.paused_until)}"
    reason = place.pause_reason or "no reason given"
    note = f"By {place.paused_by}, {until}: {reason}"
    return Health("paused", "paused", "warn", note, held=True, paused=True)


def _circuit(place: Place) -> Health:
    reason = place.circuit_reason or "no reason given"
    if place.circuit == "half_open":
        return Health(
            "circuit-half-open", "circuit half-open", "warn", f"A probe is on its way. {reason}", held=True
        )
    probe = "" if place.circuit_until is None else f" The next probe comes at {at(place.circuit_until)}."
    return Health("circuit-open", "circuit open", "bad", f"{reason}.{probe}", held=True)
