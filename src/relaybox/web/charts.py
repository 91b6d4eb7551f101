"""Compute the geometry and texts of charts; ``templates/chart.html`` draws them as SVG.

A plot is always 1000 by 100 and stretches with the page. Texts are outside of it, at percentages, so they do
not stretch. Unknown values are gaps.
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
"""Most grid lines above zero."""

WEEK = 604_800
DURATIONS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900),
    *(1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, WEEK),
)
"""Round steps for an axis of durations, in seconds."""

Words = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Period:
    """How far back the charts go."""

    hours: float
    label: str


PERIODS = {"1h": Period(1, "1 h"), "24h": Period(24, "24 h"), "7d": Period(168, "7 d")}


def chosen_period(request: Request) -> str:
    """Return the period that the URL asks for, or an hour."""
    name = request.query_params.get("period", "")
    return name if name in PERIODS else "1h"


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity: its paths and newest value; ``style`` distinguishes lines without colour."""

    name: str
    style: str
    path: str
    area: str
    latest: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on an axis, at a percentage of its length."""

    at: float
    text: str
    moment: datetime | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything that the template needs."""

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
    values: Sequence[float | None]

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]


def charts(series: Series, hours: float) -> tuple[Chart, ...]:
    """Return the four charts of the overview or a destination."""
    begun = series.step <= timedelta(minutes=1) and len(series.points) > 1
    # Leave out the current minute: relays have reported only a part of it.
    ended = Series(series.step, series.points[:-1]) if begun else series

    def quantity(style: str, name: str, field: str = "") -> _Quantity:
        return _Quantity(name, style, [getattr(point, field or name) for point in ended.points])

    delivered = _Quantity("delivered", "second", [_delivered(point) for point in ended.points])
    lags = (quantity("first", "p50"), quantity("second", "p95"), quantity("third", "p99"))
    oldest = quantity("first", "oldest", "oldest_seconds")
    # Emitted events are not counted by destination.
    emitted = any(point.emitted is not None for point in series.points)
    rates = "Emitted and delivered" if emitted else "Delivered"
    drawn = (
        ("rates", rates, "events/s", (quantity("first", "emitted"), delivered), show.rate, False),
        ("lag", "Lag from emit to delivery", "", lags, show.lag, True),
        ("backlog", "Backlog", "deliveries", (quantity("first", "pending"),), show.number, False),
        ("oldest", "Age of the oldest undelivered", "", (oldest,), show.lag, True),
    )
    return tuple(_chart(ended, hours, *one) for one in drawn)


def _delivered(point: Point) -> float | None:
    """Return None if nothing was delivered and no sample was taken: no relay ran."""
    return point.delivered if point.delivered or point.pending is not None else None


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
    quantities = [one for one in quantities if one.known] or quantities
    highest = max((value for quantity in quantities for value in quantity.known), default=0.0)
    step = nice_step(highest, of_time)
    top = step * MOST_STEPS
    while top - step >= highest and top > step * 2:
        top -= step
    axis = show.lag if of_time else show.compact
    return Chart(
        name,
        title,
        unit,
        _describe(quantities, words, hours),
        tuple(_line(quantity, top, words, len(quantities) == 1) for quantity in quantities),
        tuple(
            Tick(100 - 100 * count * step / top, axis(count * step) if count else "0")
            for count in range(round(top / step) + 1)
        ),
        tuple(_times(series, hours)),
        "day" if hours > 48 else "minute",
        not any(quantity.known for quantity in quantities),
    )


def nice_step(highest: float, of_time: bool) -> float:
    """Return the smallest round step of which ``MOST_STEPS`` reach the highest value."""
    least = highest / MOST_STEPS
    if of_time:
        return next((step for step in DURATIONS if step >= least), WEEK * math.ceil(least / WEEK))
    size = 1.0
    while size * 10 < least:
        size *= 10
    while size > 0.01 and size / 10 >= least and highest:
        size /= 10
    return next(size * part for part in (1, 2, 5, 10) if size * part >= least)


def _line(quantity: _Quantity, top: float, words: Words, filled: bool) -> Line:
    places = [
        None
        if value is None
        else (WIDTH * (index + 0.5) / len(quantity.values), HEIGHT - HEIGHT * min(value, top) / top)
        for index, value in enumerate(quantity.values)
    ]
    runs = [[place for place in run if place] for known, run in groupby(places, bool) if known]
    paths = [_path(run) for run in runs]
    # Close the path along the axis, to fill it.
    areas = [
        f"{path} L{run[-1][0]:.1f} {HEIGHT:.0f} L{run[0][0]:.1f} {HEIGHT:.0f} Z"
        for path, run in zip(paths, runs, strict=True)
        if filled
    ]
    latest = quantity.values[-1] if quantity.values else None
    told = show.NOTHING if latest is None else words(latest)
    return Line(quantity.name, quantity.style, " ".join(paths), " ".join(areas), told)


def _path(run: Sequence[tuple[float, float]]) -> str:
    first, *rest = run
    # A single point needs a short line, which round ends turn into a dot.
    following = " ".join(f"L{x:.1f} {y:.2f}" for x, y in rest) or "h0.1"
    return f"M{first[0]:.1f} {first[1]:.2f} {following}"


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
        # A label at the edge would leave the page.
        if 4 <= at <= 96:
            yield Tick(at, moment.strftime("%d %b" if hours > 48 else "%H:%M"), moment)
        first += apart


def _describe(quantities: Sequence[_Quantity], words: Words, hours: float) -> str:
    told = [
        f"{one.name}: newest {words(one.known[-1])}, highest {words(max(one.known))}, "
        f"lowest {words(min(one.known))}"
        for one in quantities
        if one.known
    ]
    period = f"Over the last {show.duration(hours * 3600)}"
    return f"{period}, {'; '.join(told)}." if told else f"{period} nothing was recorded."
