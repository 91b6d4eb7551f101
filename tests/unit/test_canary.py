"""The test event that proves the whole path."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from relaybox import Destination, parts
from relaybox.config import Settings
from relaybox.errors import ConfigError, StoreError
from relaybox.maintenance.canary import GRACE, Canary


class Place:
    """A service, a clock and what became of the test events."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.sent: list[UUID] = []
        self.status: str | None = "pending"
        self.forgotten: list[UUID] = []
        self.unheard = False
        """Whether what is sent arrives, and its answer does not."""
        self.took: list[tuple[str, float]] = []
        self.woken: list[str] = []
        self.away = False
        service = SimpleNamespace(send=self.send, look=self.look_at, left=self.left, forget=self.forget)
        told = lambda *one: self.took.append(one)  # noqa: E731
        self.canary = Canary(service, "runner", 60.0, self, told, self.woken.extend)

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError

    async def send(self) -> UUID:
        if self.away:
            raise StoreError("gone")
        self.sent.append(uuid4())
        self.status = "pending"
        if self.unheard:
            raise StoreError("gone")
        return self.sent[-1]

    async def look_at(self, id_: UUID) -> Any:
        assert id_ == self.sent[-1]
        if self.status is None:
            return None
        created = datetime(2026, 1, 1, tzinfo=UTC)
        times = {"delivered_at": created + timedelta(seconds=0.25), "seen_at": created + timedelta(seconds=5)}
        error = "422 unknown\nevent type"
        return SimpleNamespace(id=id_, status=self.status, created_at=created, error_message=error, **times)

    async def left(self) -> Any:
        waits = self.sent and self.status in ("pending", "failed")
        return await self.look_at(self.sent[-1]) if waits else None

    async def forget(self, id_: UUID) -> None:
        assert (id_, self.status) == (self.sent[-1], "failed")
        self.forgotten.append(id_)
        self.status = None

    async def look(self, seconds: float = 0.0) -> None:
        self.time += seconds
        await self.canary.look()


@pytest.fixture
def place() -> Place:
    return Place()


async def test_one_is_sent_at_once_and_then_on_time(place: Place) -> None:
    await place.look()
    assert (len(place.sent), place.woken) == (1, ["runner"])
    place.status = "delivered"
    await place.look(1)
    assert place.took == [("runner", 0.25)]
    await place.look(58)
    assert len(place.sent) == 1
    await place.look(1)
    assert len(place.sent) == 2


async def test_none_is_sent_while_one_is_under_way_and_it_becomes_overdue(place: Place) -> None:
    await place.look()
    for _ in range(9):
        await place.look(10)
    assert (len(place.sent), place.canary.overdue) == (1, None)
    await place.look(GRACE)
    assert place.canary.overdue == 120.0
    place.status = "delivered"
    await place.look(1)
    assert place.canary.overdue is None
    assert len(place.sent) == 2


async def test_one_that_failed_gives_way_to_the_next(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    await place.look()
    for number in range(1, 10):
        place.status = "failed"
        await place.look(1)
        assert (len(place.sent), len(place.forgotten)) == (number, number - 1)
        assert place.canary.refused == "422 unknown event type"
        await place.look(59)
        assert (len(place.sent), place.forgotten) == (number + 1, place.sent[:-1])
    assert caplog.text.count("the test event for runner failed: 422 unknown event type") == 1
    assert (place.took, place.canary.overdue, place.canary.unproven) == ([], 540.0, 540.0)
    place.status = "delivered"
    await place.look(1)
    assert (place.canary.refused, place.canary.overdue, len(place.took)) == (None, None, 1)


async def test_one_that_another_leader_left_is_followed(place: Place) -> None:
    await place.look()
    for _ in range(5):
        place.canary.rest()
        await place.look(60)
    assert len(place.sent) == 1
    place.status = "delivered"
    await place.look(1)
    assert place.took == [("runner", 0.25)]


async def test_one_that_failed_under_another_leader_gives_way_to_the_next(place: Place) -> None:
    await place.look()
    place.status = "failed"
    place.canary.rest()
    await place.look(1)
    assert (len(place.sent), place.forgotten) == (2, place.sent[:1])


async def test_one_that_was_written_though_nobody_heard_it_is_followed(place: Place) -> None:
    place.unheard = True
    with pytest.raises(StoreError):
        await place.look()
    for _ in range(5):
        await place.look(60)
    assert len(place.sent) == 1


async def test_one_that_is_deleted_when_delivered_is_timed_here(place: Place) -> None:
    await place.look()
    place.status = None
    await place.look(1.5)
    assert place.took == [("runner", 1.5)]


async def test_a_relay_that_no_longer_leads_is_not_overdue(place: Place) -> None:
    await place.look()
    await place.look(500)
    assert place.canary.overdue == 500.0
    place.canary.rest()
    assert place.canary.overdue is None
    await place.look(1)
    assert (len(place.sent), place.canary.overdue) == (1, None)


async def test_a_database_that_is_away_gets_no_flood_afterwards(place: Place) -> None:
    place.away = True
    for _ in range(3):
        with pytest.raises(StoreError):
            await place.look(60)
        await place.look(1)
    place.away = False
    await place.look(60)
    assert len(place.sent) == 1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"canary": "60s"}, "canary has no destination"),
        ({"canary_destination": "runner"}, "say also how often"),
        ({"canary": "1ms", "canary_destination": "runner"}, "must be 1s or longer"),
        ({"canary": "60s", "canary_destination": "lake"}, "no relay sees what Debezium sends"),
        ({"namespace": "9 lives"}, "namespace = '9 lives'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, str], problem: str) -> None:
    destinations = [Destination("runner", "memory:"), Destination("lake", "debezium:")]
    with pytest.raises(ConfigError, match=problem):
        Settings("postgresql://localhost/shop", destinations, **given)


def test_a_canary_for_nobody_is_refused_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    from relaybox import Outbox

    outbox = Outbox("postgresql://localhost/shop", canary="60s", canary_destination="runer")
    outbox.handler("*", name="runner")(print)
    opened: list[object] = []
    monkeypatch.setattr(parts, "open_wake", opened.append)
    monkeypatch.setattr(parts, "open_store", lambda *given: opened.append(given))
    with pytest.raises(ConfigError, match="did you mean 'runner'"):
        outbox.relay()
    assert opened == []
