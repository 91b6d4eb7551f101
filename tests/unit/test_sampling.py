"""The leader's samples: one of every destination in every minute, and one of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from relaybox.config import Destination
from relaybox.errors import StoreError
from relaybox.maintenance.sample import CAP, Sampling
from relaybox.upkeep import Sample, Sampled
from tests.unit.upkeep import Clock, going_on

START = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)


class Time:
    """The database's clock."""

    def __init__(self) -> None:
        self.moment = START

    def now(self) -> datetime:
        return self.moment


class FakeSamples:
    """Remembers what it was asked and told."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self.led = True
        self.broken = False
        self.measured: list[str] = []
        self.kept: dict[datetime, Sequence[Sample]] = {}
        self.pruned: list[str] = []

    async def names(self) -> tuple[str, ...]:
        return ("gone", "shop")

    async def measure(self, destination: str, cap: int) -> Sample:
        self.measured.append(destination)
        return {
            "shop": Sample("shop", cap, 1, 7.0),
            "mail": Sample("mail", 5, 0, None),
            "": Sample("", 2, 0, 1.0),
        }.get(destination, Sample(destination, 0, 0, None))

    async def position(self) -> tuple[int | None, datetime]:
        return 42, self._time.moment

    async def keep(self, term: int, minute: datetime, samples: Sequence[Sample]) -> int | None:
        if self.broken:
            raise StoreError("a table is missing")
        self.kept[minute] = samples
        return len(samples) if self.led else None

    async def prune(self, term: int, what: Sampled, age: float, limit: int) -> int | None:
        self.pruned.append(what)
        return 0


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def samples(time: Time) -> FakeSamples:
    return FakeSamples(time)


@pytest.fixture
def sampling(samples: FakeSamples, time: Time) -> Sampling:
    destinations = [Destination("shop", "console:"), Destination("mail", "console:")]
    return Sampling(samples, destinations, time, Clock(), going_on)  # type: ignore[arg-type]


async def test_a_minute_is_sampled_once(sampling: Sampling, samples: FakeSamples, time: Time) -> None:
    for _ in range(3):
        assert (await sampling(1)).led
        time.moment += timedelta(seconds=5)
    assert samples.measured == ["", "shop", "mail", "gone"]
    time.moment += timedelta(minutes=1)
    await sampling(1)
    assert [minute.minute for minute in samples.kept] == [0, 1]
    assert samples.pruned == ["sample", "operation"] * 2


async def test_the_whole_is_what_all_are_together(
    sampling: Sampling, samples: FakeSamples, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(destination: str, cap: int) -> Sample:
        return Sample(destination, 1, 0, 0.0)

    await sampling(1)
    monkeypatch.setattr(samples, "measure", measure)
    time.moment += timedelta(minutes=1)
    await sampling(1)
    kept, new = samples.kept.values()
    assert [one.destination for one in kept] == ["shop", "mail", "gone", ""]
    assert kept[-1] == Sample("", CAP, 1, 7.0, 42)
    assert new[-1].oldest_seconds == 0.0, "what has just come is no time old"


async def test_who_no_longer_leads_is_told(sampling: Sampling, samples: FakeSamples) -> None:
    samples.led = False
    assert not (await sampling(1)).led
    assert samples.pruned == []


async def test_after_a_failure_the_next_minute_is_tried(
    sampling: Sampling, samples: FakeSamples, time: Time
) -> None:
    samples.broken = True
    with pytest.raises(StoreError):
        await sampling(1)
    assert (await sampling(1)).led
    assert len(samples.measured) == 4
    samples.broken = False
    time.moment += timedelta(minutes=1)
    await sampling(1)
    assert len(samples.kept) == 1


async def test_one_that_is_stopped_writes_nothing(samples: FakeSamples, time: Time) -> None:
    async def stop(seconds: float) -> bool:
        return False

    sampling = Sampling(samples, [], time, Clock(), stop)  # type: ignore[arg-type]
    assert not (await sampling(1)).done
    assert samples.kept == {}
