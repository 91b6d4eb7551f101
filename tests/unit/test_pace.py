"""How fast a bulk action goes."""

from __future__ import annotations

import pytest

from relaybox.errors import ConfigError
from relaybox.operate.pace import Pace, never


class Watch:
    """A clock that goes on when a test sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("relaybox.operate.pace.time.monotonic", lambda: self.now)
        monkeypatch.setattr("relaybox.operate.pace.asyncio.sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


async def go(pace: Pace, rows: int) -> list[int]:
    done = []
    while (left := rows - sum(done)) and await pace.turn(part := pace.size(left)):
        done.append(part)
    return done


@pytest.mark.parametrize("rate", [0.5, 1, 3, 7.5, 100])
async def test_no_more_than_the_rate_and_no_less(rate: float, watch: Watch) -> None:
    await go(Pace(rate, never), 30)
    assert 30 / rate - max(1, int(rate)) / rate <= watch.now + 0.01
    assert watch.now <= 30 / rate + 0.01


async def test_without_a_rate_all_go_at_once(watch: Watch) -> None:
    assert await go(Pace(None, never), 30) == [30]
    assert watch.now == 0
    assert await go(Pace(None, never), 0) == []


async def test_who_is_asked_to_stop_does_so_while_waiting(watch: Watch) -> None:
    pace = Pace(1, lambda: watch.now > 2.1)
    assert await go(pace, 30) == [1, 1, 1]
    assert pace.stopped
    assert watch.now < 3


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_an_invalid_rate_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate = "):
        Pace(rate, never)
