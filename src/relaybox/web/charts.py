"""Charts as SVG, drawn on the server: geometry and words here, the elements in ``templates/chart.html``.

A plot is 1000 wide and 100 high whatever it measures on the screen, and stretches with its page; texts stand
outside of it, at percentages, so that they never stretch. What is not known is a gap, never a line across it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby

from starlette.requests import Request

from relaybox.operate.admin import Point, Series
from relaybox.web import show

WIDTH = 1000.0
HEIGHT = 100.0
MOST_STEPS = 4
"""Lines of the grid above zero."""

WEEK = 604_800
DURATIONS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900),
    *(1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, WEEK),
)
"""Steps of an axis of time, in seconds, that people find round."""

Value = Callable[[Point], float | None]
Words = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Period:
    """How far back the charts go."""

    hours: float
    label: str


PERIODS = {"1h": Period(1, "1 h"), "24h": Period(24, "24 h"), "7d": Period(168, "7 d")}


def chosen_period(request: Request) -> str:
    """The name of the period that the URL asks for; an hour's where it names none."""
    name = request.query_params.get("period", "")
    return name if name in PERIODS else "1h"


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity: its paths, and its newest value in words. ``style`` tells lines apart without colour."""

    name: str
    style: str
    path: str
    area: str
    latest: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis, in percent of it, and what stands there."""

    at: float
    text: str
    moment: datetime | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """What the template draws."""

    name: str
    title: str
    unit: str
    description: str
    lines: tuple[Line, ...]
    values: tuple[Tick, ...]
    times: tuple[Tick, ...]
    clock: str
    empty: bool


@dataclass(frozen=True, slots=True)
class _Quantity:
    name: str
    style: str
    value: Value


def charts(series: Series, hours: float) -> tuple[Chart, ...]:
    """The four of the overview, and of a destination."""
    emitted = _Quantity("emitted", "first", lambda point: point.emitted)
    delivered = _Quantity("delivered", "second", _delivered)
    lags = (
        _Quantity("p50", "first", lambda point: point.p50),
        _Quantity("p95", "second", lambda point: point.p95),
        _Quantity("p99", "third", lambda point: point.p99),
    )
    backlog = _Quantity("pending", "first", lambda point: point.pending)
    oldest = _Quantity("oldest", "first", lambda point: point.oldest_seconds)
    # Of one destination nobody counts what was emitted.
    rates = "Emitted and delivered" if _known(series, emitted) else "Delivered"
    drawn = (
        ("rates", rates, "events/s", (emitted, delivered), show.rate, False),
        ("lag", "Lag from emit to delivery", "", lags, show.lag, True),
        ("backlog", "Backlog", "deliveries", (backlog,), show.number, False),
        ("oldest", "Age of the oldest undelivered", "", (oldest,), show.lag, True),
    )
    ended = _ended(series)
    return tuple(_chart(ended, hours, *one) for one in drawn)


def _delivered(point: Point) -> float | None:
    """Nothing while nobody took a sample either: then nobody was there to deliver, or to count."""
    return point.delivered if point.delivered or point.pending is not None else None


def _ended(series: Series) -> Series:
    """Without the minute that has just begun: relays tell of it only as it goes on."""
    short = series.step <= timedelta(minutes=1)
    return Series(series.step, series.points[:-1]) if short and len(series.points) > 1 else series


def _chart(
    series: Series,
    hours: float,
    name: str,
    title: str,
    unit: str,
    quantities: Sequence[_Quantity],
    words: Words,
    of_time: bool,
) -> Chart:
    quantities = [one for one in quantities if _known(series, one)] or quantities
    known = [value for quantity in quantities for value in _known(series, quantity)]
    step = nice_step(max(known, default=0.0), of_time)
    top = step * MOST_STEPS
    while top - step >= max(known, default=0.0) and top > step * 2:
        top -= step
    lines = tuple(_line(series, quantity, top, words, len(quantities) == 1) for quantity in quantities)
    values = tuple(
        Tick(100 - 100 * count * step / top, _axis(count * step, of_time))
        for count in range(round(top / step) + 1)
    )
    description = _describe(series, quantities, words, hours)
    times = tuple(_times(series, hours))
    clock = "day" if hours > 48 else "minute"
    return Chart(name, title, unit, description, lines, values, times, clock, not known)


def _known(series: Series, quantity: _Quantity) -> list[float]:
    return [value for point in series.points if (value := quantity.value(point)) is not None]


def nice_step(highest: float, of_time: bool) -> float:
    """The smallest round step of which few enough reach the highest value."""
    least = highest / MOST_STEPS
    if of_time:
        return next((step for step in DURATIONS if step >= least), WEEK * math.ceil(least / WEEK))
    size = 1.0
    while size * 10 < least:
        size *= 10
    while size > 0.01 and size / 10 >= least and highest:
        size /= 10
    return next(size * part for part in (1, 2, 5, 10) if size * part >= least)


def _axis(value: float, of_time: bool) -> str:
    if not value:
        return "0"
    return show.lag(value) if of_time else show.compact(value)


def _line(series: Series, quantity: _Quantity, top: float, words: Words, filled: bool) -> Line:
    places = list(_places(series, quantity.value, top))
    runs = [list(run) for there, run in groupby(places, lambda place: place is not None) if there]
    whole = [[place for place in run if place is not None] for run in runs]
    path = " ".join(_run(run) for run in whole)
    area = " ".join(_under(run) for run in whole) if filled else ""
    latest = quantity.value(series.points[-1]) if series.points else None
    return Line(quantity.name, quantity.style, path, area, show.NOTHING if latest is None else words(latest))


def _places(series: Series, value: Value, top: float) -> Iterator[tuple[float, float] | None]:
    for index, point in enumerate(series.points):
        seen = value(point)
        if seen is None:
            yield None
        else:
            across = WIDTH * (index + 0.5) / len(series.points)
            yield across, HEIGHT - HEIGHT * min(seen, top) / top


def _run(run: Sequence[tuple[float, float]]) -> str:
    first, *rest = run
    # One alone has no length, and a round end makes a dot of it.
    following = " ".join(f"L{x:.1f} {y:.2f}" for x, y in rest) or "h0.1"
    return f"M{first[0]:.1f} {first[1]:.2f} {following}"


def _under(run: Sequence[tuple[float, float]]) -> str:
    return f"{_run(run)} L{run[-1][0]:.1f} {HEIGHT:.0f} L{run[0][0]:.1f} {HEIGHT:.0f} Z"


def _times(series: Series, hours: float) -> Iterator[Tick]:
    if not series.points:
        return
    apart = next((apart for most, apart in ((1, 900), (6, 3600), (24, 14_400)) if hours <= most), 86_400)
    start = series.points[0].at.astimezone(UTC)
    span = len(series.points) * series.step.total_seconds()
    first = -start.timestamp() % apart
    while first <= span:
        at = 100 * first / span
        moment = start + timedelta(seconds=first)
        # At the very edge a text would stand outside of the page.
        if 4 <= at <= 96:
            yield Tick(at, moment.strftime("%d %b" if hours > 48 else "%H:%M"), moment)
        first += apart


def _describe(series: Series, quantities: Sequence[_Quantity], words: Words, hours: float) -> str:
    period = f"Over the last {show.duration(hours * 3600)}"
    told = []
    for quantity in quantities:
        if values := _known(series, quantity):
            newest, highest, lowest = words(values[-1]), words(max(values)), words(min(values))
            told.append(f"{quantity.name}: newest {newest}, highest {highest}, lowest {lowest}")
    return f"{period}, {'; '.join(told)}." if told else f"{period} nothing was recorded."
