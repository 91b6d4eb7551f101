"""What the charts and pages of the dashboard show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaybox.core import text as show
from relaybox.errors import ConfigError
from relaybox.operate.history import LONGEST, MOST, Point, Series, make_series, step_of
from relaybox.stores.journal import Level, Settled
from relaybox.web.charts import Chart, charts, nice_step
from relaybox.web.templating import back

NOW = datetime(2026, 1, 31, 12, 34, 30, tzinfo=UTC)
LAST = int(NOW.timestamp()) // 60


def history(*, settled: Mapping[int, Settled] = {}, levels: Sequence[tuple[int, Level]] = ()) -> Any:
    return NOW, settled, dict(levels)


def level(
    minute: int, position: int | None = None, pending: int = 0, oldest: float | None = None
) -> tuple[int, Level]:
    at = datetime.fromtimestamp((LAST + minute) * 60, UTC)
    return LAST + minute, Level(pending, oldest, position, at)


@given(st.floats(0.001, LONGEST))
def test_there_are_never_more_points_than_a_chart_can_show(hours: float) -> None:
    series = make_series(*history(), hours, step_of(hours))
    assert 1 <= len(series.points) <= MOST
    distances = {b.at - a.at for a, b in zip(series.points, series.points[1:], strict=False)}
    assert distances <= {series.step}


@pytest.mark.parametrize("hours", [0, -1, LONGEST + 1, float("nan"), float("inf")])
def test_an_invalid_length_is_refused(hours: float) -> None:
    with pytest.raises(ConfigError, match="hours = "):
        step_of(hours)


@pytest.mark.parametrize(("hours", "minutes", "count"), [(1, 1, 60), (24, 10, 144), (168, 60, 168)])
def test_an_hour_a_day_and_a_week(hours: float, minutes: int, count: int) -> None:
    series = make_series(*history(), hours, step_of(hours))
    assert (series.step, len(series.points)) == (timedelta(minutes=minutes), count)
    assert series.points[-1].at <= NOW < series.points[-1].at + series.step


def test_a_minute_has_rates_by_the_second_and_lags_also_while_it_goes_on() -> None:
    [*_, point] = make_series(*history(), 1, 60).points
    assert (point.delivered, point.retried, point.failed) == (0.0, 0, 0)
    assert (point.emitted, point.pending, point.oldest_seconds, point.p50, point.p99) == (None,) * 5
    settled = {LAST - 1: Settled(120, 1, 2, {}), LAST: Settled(60, 0, 0, {})}
    before, last = make_series(*history(settled=settled), 1, 60).points[-2:]
    assert (before.delivered, before.retried, before.failed) == (2.0, 1, 2)
    assert last.delivered == 2.0
    settled = {LAST: Settled(100, 0, 0, {0: 50, 10: 45, 20: 5})}
    point = make_series(*history(settled=settled), 1, 60).points[-1]
    assert (point.p50, point.p95, point.p99) == pytest.approx((0.001, 0.032, 1.024))


def test_what_was_emitted_is_how_far_the_position_has_come() -> None:
    levels = (level(-5, 100), level(-4, 220), level(-1, 400), level(0, 390))
    points = make_series(*history(levels=levels), 1, 60).points[-6:]
    assert [point.emitted for point in points] == [None, 2.0, None, None, 1.0, 0.0]
    point = make_series(*history(levels=(level(-1, 1, pending=7, oldest=3.5),)), 1, 60).points[-2]
    assert (point.pending, point.oldest_seconds) == (7, 3.5)


START = datetime(2026, 1, 31, 12, 2, tzinfo=UTC)


def series(*pending: int | None, step: int = 60) -> Series:
    points = [
        Point(START + timedelta(seconds=step * index), 2.0, 1.0, 0, 0, value, None, 0.1, 0.2, 0.4)
        for index, value in enumerate([*pending, None])
    ]
    return Series(timedelta(seconds=step), tuple(points))


def chart(name: str, data: Series, hours: float = 1) -> Chart:
    return next(one for one in charts(data, hours) if one.name == name)


def test_what_is_not_known_is_a_gap_and_one_value_alone_a_dot() -> None:
    line = chart("backlog", series(None, 5, None)).lines[0]
    assert re.fullmatch(r"M[\d.]+ [\d.]+ h0\.1", line.path)
    line = chart("backlog", series(1, 2, None, None, 3, 4)).lines[0]
    assert line.path.count("M") == 2
    assert line.area.count("Z") == 2


def test_nothing_at_all_is_said() -> None:
    empty = chart("oldest", series(1, 2))
    assert empty.empty
    assert empty.description == "Over the last 1\N{NO-BREAK SPACE}h nothing was recorded."
    assert empty.lines[0].path == ""
    text = chart("backlog", series(7, 1_200, 3)).description
    assert text == "Over the last 1\N{NO-BREAK SPACE}h, pending: newest 3, highest 1,200, lowest 3."


@pytest.mark.parametrize("highest", [0, 0.003, 0.4, 1, 3, 9, 11, 99, 1234, 10_000, 7_654_321])
def test_an_axis_of_numbers_reaches_the_highest_in_few_round_steps(highest: float) -> None:
    step = nice_step(highest, of_time=False)
    assert step * 4 >= highest
    assert f"{step:e}"[0] in "125"
    if highest > 0.01:
        assert highest > step * 4 / 10


@pytest.mark.parametrize("highest", [0, 0.0004, 0.3, 5, 61, 3600, 90_000, 10_000_000])
def test_an_axis_of_time_reaches_the_highest(highest: float) -> None:
    assert nice_step(highest, of_time=True) * 4 >= highest


def test_every_place_is_inside_of_the_plot_and_times_stand_at_round_moments() -> None:
    for one in charts(series(*range(0, 59_000, 1000)), 1):
        for line in one.lines:
            for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", line.path):
                assert 0 <= float(x) <= 1000
                assert 0 <= float(y) <= 100
        assert all(0 <= tick.at <= 100 for tick in (*one.values, *one.times))
    ticks = chart("backlog", series(*[1] * 59)).times
    assert [tick.text for tick in ticks] == ["12:15", "12:30", "12:45"]
    week = chart("backlog", series(*[1] * 167, step=3600), 168)
    assert week.times[0].text == "01 Feb"
    path = chart("rates", series(1, 2, 3)).lines[0].path
    assert path.count("L") == 2, "the minute that has just begun is left out"


def test_of_one_destination_nothing_is_said_of_what_was_emitted() -> None:
    data = series(1, 2)
    own = Series(
        data.step,
        tuple(Point(p.at, None, *[getattr(p, name) for name in Point.__slots__[2:]]) for p in data.points),
    )
    assert [line.name for line in chart("rates", own).lines] == ["delivered"]


GAP = "\N{NO-BREAK SPACE}"


@pytest.mark.parametrize(
    "given",
    [None, "", "//evil.example", "/\\evil.example", "https://evil.example", "evil", "/a\r\nb: c", "/a\tb"],
)
def test_a_form_leads_only_to_paths_of_ours(given: str | None) -> None:
    assert back(given, "/events") == "/events"
    assert back("/events?status=failed&error=a%2Fb", "/") == "/events?status=failed&error=a%2Fb"


def test_lags_rates_sizes_and_axes() -> None:
    lags = {None: "–", 0: f"0{GAP}ms", 0.0421: f"42.1{GAP}ms", 1.34: f"1.3{GAP}s", 75: f"1{GAP}min"}
    lags[90_000] = f"1{GAP}d"
    assert {seconds: show.lag(seconds) for seconds in lags} == lags
    rates = {None: "–", 0: "0/s", 0.034: "0.034/s", 12.3: "12/s", 1234.5: "1,234/s"}
    assert {value: show.rate(value) for value in rates} == rates
    sizes = {7: f"7{GAP}B", 1536: f"1.5{GAP}KiB", 2**20: f"1{GAP}MiB"}
    assert {count: show.size(count) for count in sizes} == sizes
    assert [show.compact(value) for value in (0.5, 20, 1500, 2_000_000)] == ["0.5", "20", "1.5k", "2M"]
