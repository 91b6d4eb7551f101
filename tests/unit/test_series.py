"""What the charts are made of."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaybox.errors import ConfigError
from relaybox.journal import History, Level, Settled
from relaybox.series import LONGEST, MOST, make_series, step_of

NOW = datetime(2026, 1, 31, 12, 34, 30, tzinfo=UTC)
LAST = int(NOW.timestamp()) // 60


def history(*, settled: tuple[Settled, ...] = (), levels: tuple[Level, ...] = ()) -> History:
    return History(NOW, settled, levels)


def level(minute: int, position: int | None = None, pending: int = 0, oldest: float | None = None) -> Level:
    at = datetime.fromtimestamp((LAST + minute) * 60, UTC)
    return Level(LAST + minute, pending, oldest, position, at)


@given(st.floats(0.001, LONGEST))
def test_there_are_never_more_points_than_a_chart_can_show(hours: float) -> None:
    series = make_series(history(), hours, step_of(hours))
    assert 1 <= len(series.points) <= MOST
    distances = {b.at - a.at for a, b in zip(series.points, series.points[1:], strict=False)}
    assert distances <= {series.step}


@pytest.mark.parametrize("hours", [0, -1, LONGEST + 1, float("nan"), float("inf")])
def test_a_length_that_is_none_is_refused(hours: float) -> None:
    with pytest.raises(ConfigError, match="hours = "):
        step_of(hours)


@pytest.mark.parametrize(("hours", "minutes", "count"), [(1, 1, 60), (24, 10, 144), (168, 60, 168)])
def test_an_hour_a_day_and_a_week(hours: float, minutes: int, count: int) -> None:
    series = make_series(history(), hours, step_of(hours))
    assert (series.step, len(series.points)) == (timedelta(minutes=minutes), count)
    assert series.points[-1].at <= NOW < series.points[-1].at + series.step


def test_a_minute_in_which_nothing_happened_is_there_and_says_so() -> None:
    [*_, point] = make_series(history(), 1, 60).points
    assert (point.delivered, point.retried, point.failed) == (0.0, 0, 0)
    assert (point.emitted, point.pending, point.oldest_seconds, point.p50, point.p99) == (None,) * 5


def test_rates_are_by_the_second_also_in_the_minute_that_goes_on() -> None:
    settled = (Settled(LAST - 1, 120, 1, 2, {}), Settled(LAST, 60, 0, 0, {}))
    before, last = make_series(history(settled=settled), 1, 60).points[-2:]
    assert (before.delivered, before.retried, before.failed) == (2.0, 1, 2)
    assert last.delivered == 2.0


def test_lag_is_read_from_the_buckets() -> None:
    point = make_series(history(settled=(Settled(LAST, 100, 0, 0, {0: 50, 10: 45, 20: 5}),)), 1, 60).points[
        -1
    ]
    assert point.p50 == pytest.approx(0.001)
    assert point.p95 == pytest.approx(0.032)
    assert point.p99 == pytest.approx(1.024)


def test_what_was_emitted_is_how_far_the_position_has_come() -> None:
    levels = (level(-5, 100), level(-4, 220), level(-1, 400), level(0, 390))
    points = make_series(history(levels=levels), 1, 60).points[-6:]
    assert [point.emitted for point in points] == [None, 2.0, None, None, 1.0, 0.0]


def test_what_was_sampled_is_shown_where_it_was() -> None:
    point = make_series(history(levels=(level(-1, 1, pending=7, oldest=3.5),)), 1, 60).points[-2]
    assert (point.pending, point.oldest_seconds) == (7, 3.5)
