"""Compute the geometry and texts of charts; ``templates/chart.html`` draws them as SVG.

A plot is always 1000 by 100 and stretches with the page. Texts are outside of it, at percentages, so they do
not stretch. Unknown values are gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import TypeAlias

from starlette.requests import Request

from relaybox.core import text
from relaybox.operate.admin import Point, Series

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

STYLES = ("first", "second", "third")
"""They distinguish the lines of a chart without colour."""

HOURS = {"1h": 1, "24h": 24, "7d": 168}
"""How far back the charts go, by the period in the URL."""

Words: TypeAlias = Callable[[float | None], str]
Values: TypeAlias = Sequence[float | None]


def chosen_period(request: Request) -> str:
    """Return the period that the URL asks for, or an hour."""
    name = request.query_params.get("period", "")
    return name if name in HOURS else "1h"


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity: its paths and newest value."""

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


def charts(series: Series, hours: float) -> tuple[Chart, ...]:
    """Return the four charts of the overview or a destination."""
    begun = series.step <= timedelta(minutes=1) and len(series.points) > 1
    # Leave out the current minute: relays have reported only a part of it.
    ended = Series(series.step, series.points[:-1]) if begun else series

    def values(field: str) -> Values:
        return [getattr(point, field) for point in ended.points]

    delivered = [_delivered(point) for point in ended.points]
    lags = {name: values(name) for name in ("p50", "p95", "p99")}
    # Emitted events are not counted by destination.
    emitted = any(point.emitted is not None for point in series.points)
    rates = "Emitted and delivered" if emitted else "Delivered"
    drawn = (
        ("rates", rates, "events/s", text.rate, {"emitted": values("emitted"), "delivered": delivered}),
        ("lag", "Lag from emit to delivery", "", text.lag, lags),
        ("backlog", "Backlog", "deliveries", text.number, {"pending": values("pending")}),
        ("oldest", "Age of the oldest undelivered", "", text.lag, {"oldest": values("oldest_seconds")}),
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
    words: Words,
    quantities: Mapping[str, Values],
) -> Chart:
    known = {name: [value for value in values if value is not None] for name, values in quantities.items()}
    empty = not any(known.values())
    styled = zip(STYLES, quantities.items(), strict=False)
    shown = [(name, style, values) for style, (name, values) in styled if known[name] or empty]
    highest = max((value for values in known.values() for value in values), default=0.0)
    of_time = words is text.lag
    step = nice_step(highest, of_time)
    top = step * MOST_STEPS
    while top - step >= highest and top > step * 2:
        top -= step
    axis = text.lag if of_time else text.compact
    return Chart(
        name,
        title,
        unit,
        _describe(known, words, hours),
        tuple(
            Line(name, style, *_paths(values, top, len(shown) == 1), words(values[-1] if values else None))
            for name, style, values in shown
        ),
        tuple(
            Tick(100 - 100 * count * step / top, axis(count * step) if count else "0")
            for count in range(round(top / step) + 1)
        ),
        tuple(_times(series, hours)),
        "day" if hours > 48 else "minute",
        empty,
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


def _paths(values: Values, top: float, filled: bool) -> tuple[str, str]:
    """Return the path of a line, and of the area below it if that is filled."""
    places = [
        None
        if value is None
        else (WIDTH * (index + 0.5) / len(values), HEIGHT - HEIGHT * min(value, top) / top)
        for index, value in enumerate(values)
    ]
    runs = [[place for place in run if place] for known, run in groupby(places, bool) if known]
    paths = [_path(run) for run in runs]
    # Close the path along the axis, to fill it.
    areas = [
        f"{path} L{run[-1][0]:.1f} {HEIGHT:.0f} L{run[0][0]:.1f} {HEIGHT:.0f} Z"
        for path, run in zip(paths, runs, strict=True)
        if filled
    ]
    return " ".join(paths), " ".join(areas)


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


def _describe(known: Mapping[str, Sequence[float]], words: Words, hours: float) -> str:
    ranges = [
        f"{name}: newest {words(values[-1])}, highest {words(max(values))}, lowest {words(min(values))}"
        for name, values in known.items()
        if values
    ]
    period = f"Over the last {text.duration(hours * 3600)}"
    return f"{period}, {'; '.join(ranges)}." if ranges else f"{period} nothing was recorded."
