"""Charts: round axes, gaps that stay gaps, and words for those who do not see them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from relaybox.series import Point, Series
from relaybox.web.charts import Chart, charts, nice_step

START = datetime(2026, 1, 31, 12, 2, tzinfo=UTC)


def series(*pending: int | None, step: int = 60) -> Series:
    points = [
        Point(START + timedelta(seconds=step * index), 2.0, 1.0, 0, 0, value, None, 0.1, 0.2, 0.4)
        for index, value in enumerate([*pending, None])
    ]
    return Series(timedelta(seconds=step), tuple(points))


def chart(name: str, data: Series, hours: float = 1) -> Chart:
    return next(one for one in charts(data, hours) if one.name == name)


def test_what_is_not_known_is_a_gap() -> None:
    line = chart("backlog", series(1, 2, None, None, 3, 4)).lines[0]
    assert line.path.count("M") == 2
    assert line.area.count("Z") == 2


def test_one_value_alone_is_a_dot() -> None:
    line = chart("backlog", series(None, 5, None)).lines[0]
    assert re.fullmatch(r"M[\d.]+ [\d.]+ h0\.1", line.path)


def test_nothing_at_all_is_said() -> None:
    empty = chart("oldest", series(1, 2))
    assert empty.empty
    assert empty.description == "Over the last 1\N{NO-BREAK SPACE}h nothing was recorded."
    assert empty.lines[0].path == ""


def test_a_description_says_newest_highest_and_lowest() -> None:
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


def test_every_place_is_inside_of_the_plot() -> None:
    for one in charts(series(*range(0, 59_000, 1000)), 1):
        for line in one.lines:
            for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", line.path):
                assert 0 <= float(x) <= 1000
                assert 0 <= float(y) <= 100
        assert all(0 <= tick.at <= 100 for tick in (*one.values, *one.times))


def test_times_stand_at_round_moments() -> None:
    ticks = chart("backlog", series(*[1] * 59)).times
    assert [tick.text for tick in ticks] == ["12:15", "12:30", "12:45"]
    week = chart("backlog", series(*[1] * 167, step=3600), 168)
    assert week.times[0].text == "01 Feb"


def test_the_minute_that_has_just_begun_is_left_out() -> None:
    assert chart("rates", series(1, 2, 3)).lines[0].path.count("L") == 2


def test_of_one_destination_nothing_is_said_of_what_was_emitted() -> None:
    data = series(1, 2)
    own = Series(
        data.step,
        tuple(Point(p.at, None, *[getattr(p, name) for name in Point.__slots__[2:]]) for p in data.points),
    )
    assert [line.name for line in chart("rates", own).lines] == ["delivered"]
