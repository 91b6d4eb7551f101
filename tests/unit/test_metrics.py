"""What is counted for Prometheus, and that nothing which is called oddly breaks it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from types import SimpleNamespace
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Reject, Retried, Retry, Unavailable, Unreachable
from relaybox.errors import ConfigError
from relaybox.operate import metrics
from relaybox.operate.admin import DestinationStats, Stats
from relaybox.operate.metrics import ERRORS, TYPES, Histogram, Latest, MetricsObserver, exposition
from relaybox.relay.observer import Sends
from relaybox.stores.ledger import Counts, DestinationState
from relaybox.stores.store import Claim, Settlement
from tests.unit.deliveries import make
from tests.waiting import PATIENCE

NOBODY: frozenset[UUID] = frozenset()
LONG = 3600.0

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: bytes) -> Samples:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def exposed(observer: MetricsObserver) -> Samples:
    return parsed(generate_latest(observer.registry))


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, tuple(sorted(labels.items()))))


def columns(*sends: tuple[Any, ...]) -> Sends:
    return Sends(*map(list, zip(*sends, strict=True)))


def settle(observer: MetricsObserver, *settlements: tuple[Delivery, Any]) -> None:
    observer.settled("runner", [Settlement(*one) for one in settlements], NOBODY)


def test_outcomes_are_counted_by_what_the_events_are() -> None:
    observer = MetricsObserver()
    paid, shipped = make(), make("order.shipped")
    settle(observer, (paid, Delivered()), (make(), Delivered()), (shipped, Retried(1.0, "no")))
    settle(observer, (shipped, Failed("no")), (make(aggregate_type="Basket"), Delivered()))
    found = exposed(observer)
    order = {"aggregate_type": "Order", "event_type": "order.paid", "destination": "runner"}
    assert value(found, "outbox_messages_published_total", **order) == 2
    assert value(found, "outbox_messages_published_total", **order | {"aggregate_type": "Basket"}) == 1
    assert value(found, "outbox_events_total", event_type="order.paid", status="delivered") == 3
    assert value(found, "outbox_events_total", event_type="order.shipped", status="retried") == 1
    assert value(found, "outbox_events_total", event_type="order.shipped", status="failed") == 1


def test_what_another_relay_took_over_is_not_counted_as_published() -> None:
    observer = MetricsObserver()
    mine, its = make(), make()
    observer.settled("runner", [Settlement(one, Delivered()) for one in (mine, its)], frozenset([its.id]))
    observer.extended("runner", frozenset([its.id]))
    found = exposed(observer)
    assert value(found, "outbox_lease_lost_total", destination="runner") == 2
    assert value(found, "outbox_events_total", event_type="order.paid", status="delivered") == 1


def test_events_that_failed_on_the_spot_count_and_lost_leases_are_there_before_the_first_is_lost() -> None:
    observer = MetricsObserver()
    observer.claimed("runner", Claim(failed=(make(),)))
    found = exposed(observer)
    assert value(found, "outbox_lease_lost_total", destination="runner") == 0
    assert value(found, "outbox_events_total", event_type="order.paid", status="failed") == 1
    assert value(found, "outbox_publish_errors_total", error_type="RelayDied", destination="runner") == 1


def test_functions_over_their_time_are_a_gauge() -> None:
    observer = MetricsObserver()
    for count in (3, 2):
        observer.overdue("runner", count)
    assert value(exposed(observer), "outbox_overdue_functions", destination="runner") == 2


# Half an hour after the clocks of Europe were set back.
NOW = datetime(2026, 10, 25, 1, 30, tzinfo=UTC)


def emitted(seconds: float, zone: tzinfo = UTC) -> Delivery:
    return make(created_at=(NOW - timedelta(seconds=seconds)).astimezone(zone))


def test_latency_is_from_emit_to_acknowledgement_and_duration_is_the_send() -> None:
    observer = MetricsObserver(wall=NOW.timestamp, clock=lambda: 100.0)
    sends = [(emitted(2.0), Delivered(), 99.7, 100.0), (emitted(0.0), Retry("no"), 80.0, 100.0)]
    observer.sent("runner", columns(*sends))
    found = exposed(observer)
    latency, duration = "outbox_publish_latency_seconds", "outbox_processing_duration_seconds"
    assert value(found, f"{latency}_bucket", destination="runner", le="1.0") == 0
    assert value(found, f"{latency}_bucket", destination="runner", le="2.5") == 1
    assert value(found, f"{latency}_count", destination="runner") == 1
    assert value(found, f"{latency}_sum", destination="runner") == pytest.approx(2.0)
    of_type = {"destination": "runner", "event_type": "order.paid"}
    assert value(found, f"{duration}_bucket", **of_type, le="0.5") == 1
    assert value(found, f"{duration}_bucket", **of_type, le="+Inf") == 2
    assert value(found, f"{duration}_sum", **of_type) == pytest.approx(20.3)


@pytest.mark.parametrize("age", [0.5, 3600.0, 86_400.0])
def test_latency_does_not_mind_that_clocks_are_set(age: float) -> None:
    observer = MetricsObserver(wall=NOW.timestamp, clock=lambda: 100.0)
    one = emitted(age, ZoneInfo("Europe/Berlin"))
    observer.sent("runner", columns((one, Delivered(), 99.0, 100.0)))
    found = exposed(observer)
    assert value(found, "outbox_publish_latency_seconds_sum", destination="runner") == pytest.approx(age)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Retry("ValueError: no such order 17"), "ValueError"),
        (Unavailable("503 Service Unavailable: try later"), "HTTP 503"),
        (Unreachable("cannot connect to 10.0.0.7:443: Connection refused"), "ConnectionError"),
        (Reject("there is no such customer"), "Reject"),
        (Retry(), "Retry"),
        (Retry(7), "Retry"),  # type: ignore[arg-type]
    ],
)
def test_an_attempt_that_was_not_acknowledged_is_an_error_of_its_kind(answer: Any, kind: str) -> None:
    observer = MetricsObserver()
    observer.sent("runner", columns((make(), answer, 1.0, 2.0), (make(), Delivered(), 1.0, 2.0)))
    found = exposed(observer)
    assert value(found, "outbox_publish_errors_total", error_type=kind, destination="runner") == 1


def test_many_types_share_a_label_in_the_end() -> None:
    observer = MetricsObserver()
    settle(observer, *((make(f"order.{n}"), Delivered()) for n in range(TYPES + 20)))
    sends = [(make(f"order.{n}"), Retry(f"Error{n}: x"), 1.0, 2.0) for n in range(TYPES + 20)]
    observer.sent("runner", columns(*sends))
    found = exposed(observer)
    for name, most in (
        ("outbox_messages_published_total", TYPES + 1),
        ("outbox_events_total", TYPES + 1),
        ("outbox_processing_duration_seconds_count", TYPES + 1),
        ("outbox_publish_errors_total", ERRORS + 1),
    ):
        assert len([key for key in found if key[0] == name]) == most
    other = {"aggregate_type": "other", "event_type": "other", "destination": "runner"}
    assert value(found, "outbox_messages_published_total", **other) == 20


def test_the_canary_is_reported_when_it_came_through() -> None:
    observer = MetricsObserver(wall=lambda: 1_700_000_000.0)
    assert not [name for name, _ in exposed(observer) if "canary" in name]
    observer.canary("runner", 0.25)
    found = exposed(observer)
    assert value(found, "outbox_canary_seconds", destination="runner") == 0.25
    assert value(found, "outbox_canary_last_success_timestamp", destination="runner") == 1_700_000_000.0


def test_a_namespace_goes_before_every_name() -> None:
    observer = MetricsObserver(namespace="shop")
    settle(observer, (make(), Delivered()))
    observer.sent("runner", columns((make(), Delivered(), 1.0, 2.0)))
    observer.canary("runner", 0.1)
    assert {name.startswith("shop_outbox_") for name, _ in exposed(observer)} == {True}
    with pytest.raises(ConfigError, match="namespace = '9 lives'"):
        MetricsObserver(namespace="9 lives")
    with pytest.raises(ConfigError, match="a registry of its own"):
        MetricsObserver(observer.registry, namespace="shop")


@given(
    st.lists(
        st.tuples(
            st.text(alphabet=st.characters(codec=None), max_size=120),
            st.text(alphabet=st.sampled_from('\\"\n\r\0{}=,# \ud800\u2028é{}'), max_size=20),
        ),
        max_size=5,
    )
)
def test_no_name_breaks_the_exposition(names: list[tuple[str, str]]) -> None:
    observer = MetricsObserver()
    for aggregate_type, event_type in names:
        one = make(event_type, aggregate_type=aggregate_type)
        observer.settled(event_type, [Settlement(one, Delivered())], NOBODY)
        observer.sent(aggregate_type, columns((one, Retry(f"{event_type}: {aggregate_type}"), 1.0, 2.0)))
        observer.claimed(event_type, Claim(failed=(one,)))
    found = exposed(observer)
    delivered = [count for (name, _), count in found.items() if name == "outbox_messages_published_total"]
    assert sum(delivered) == len(names)
    labels = [label for _, pairs in found for _, label in pairs]
    assert all(label.isprintable() and len(label) <= 100 for label in labels)


@given(st.lists(st.floats(0, 1e6), max_size=50), st.lists(st.floats(0, 1e6), max_size=50))
def test_a_histogram_counts_as_one_by_one(first: list[float], second: list[float]) -> None:
    bounds = (0.5, 1.0, 10.0)
    histogram = Histogram(bounds)
    histogram.add(list(first))
    histogram.add(list(second))
    buckets, total = histogram.buckets()
    every = first + second
    assert dict(buckets) == {
        **{repr(bound): sum(one <= bound for one in every) for bound in bounds},
        "+Inf": len(every),
    }
    assert total == pytest.approx(sum(every))


class FakeAdmin:
    """Answers as a test says."""

    def __init__(self, *destinations: DestinationStats) -> None:
        self.journal = self
        self.destinations = destinations
        self.error: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.asked = 0
        self.sampled: list[int | None] = []

    async def stats(self) -> Stats:
        self.asked += 1
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return Stats(Counts(), self.destinations, ())

    async def series(self, hours: float, destination: str | None = None) -> Any:
        return SimpleNamespace(points=[SimpleNamespace(pending=pending) for pending in self.sampled])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Sets how long answers are waited for, the usual and the first one; for long unless a test says so."""

    def wait(usual: float, first: float = LONG) -> None:
        monkeypatch.setattr(metrics, "PATIENCE", usual)
        monkeypatch.setattr(metrics, "FIRST", first)

    wait(LONG)
    return wait


def busy(**counts: Any) -> DestinationStats:
    return DestinationStats("runner", True, Counts(**counts), None)


async def scrape(admin: FakeAdmin) -> Samples:
    body, content_type = await exposition(admin)  # type: ignore[arg-type]
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(body)


async def test_gauges_are_of_every_destination() -> None:
    admin = FakeAdmin(busy(due=3, scheduled=2, parked=1, sending=4, failed=7, oldest_seconds=12.5))
    before = time.time()
    found = await scrape(admin)
    for name, expected in {
        "outbox_pending_messages": 10,
        "outbox_pending_events": 10,
        "outbox_due_messages": 3,
        "outbox_failed_messages": 7,
        "outbox_failed_events": 7,
        "outbox_oldest_pending_seconds": 12.5,
        "outbox_circuit_open": 0,
        "outbox_paused": 0,
    }.items():
        assert value(found, name, destination="runner") == expected, name
    assert value(found, "outbox_relays") == 0
    assert value(found, "outbox_scrape_errors_total") == 0
    assert before <= (value(found, "outbox_scrape_last_success_timestamp") or 0.0) <= time.time()


async def test_an_open_circuit_and_a_pause_show() -> None:
    now = datetime.now(UTC)
    place = DestinationState("runner", now, None, "ann", "tea", "half_open", None, "refused", now)
    found = await scrape(FakeAdmin(DestinationStats("runner", True, Counts(), place)))
    assert value(found, "outbox_circuit_open", destination="runner") == 1
    assert value(found, "outbox_paused", destination="runner") == 1


async def test_more_than_is_counted_comes_from_the_leaders_sample() -> None:
    admin = FakeAdmin(busy(due=10_000, capped=frozenset({"due"})))
    admin.sampled = [88_000, 90_000, None]
    assert value(await scrape(admin), "outbox_pending_messages", destination="runner") == 90_000
    admin = FakeAdmin(busy(due=10_000, capped=frozenset({"due"})))
    assert value(await scrape(admin), "outbox_pending_messages", destination="runner") == 10_001


async def test_scrapes_one_after_the_other_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FRESH", 3600.0)
    admin = FakeAdmin(busy())
    for _ in range(5):
        await scrape(admin)
    assert admin.asked == 1


async def test_a_database_that_does_not_answer_holds_up_no_scrape_and_shows(patience: Any) -> None:
    admin = FakeAdmin(busy(due=3))
    before = await scrape(admin)
    admin.answers.clear()
    for gauges in metrics._kept[admin].values():  # type: ignore[index]
        gauges._latest._at -= 60.0
    patience(0.01)
    for _ in range(3):
        found = await scrape(admin)
    assert admin.asked == 2
    assert value(found, "outbox_pending_messages", destination="runner") == 3
    same = "outbox_scrape_last_success_timestamp"
    assert value(found, same) == value(before, same)
    admin.error = OSError("gone")
    admin.answers.set()
    patience(LONG)
    found = await scrape(admin)
    assert value(found, "outbox_scrape_errors_total") == 1
    admin.error = None
    admin.destinations = (busy(due=5),)
    assert value(await scrape(admin), "outbox_pending_messages", destination="runner") == 5


async def test_who_asks_seldom_waits_for_an_answer_that_is_worth_something(patience: Any) -> None:
    latest, answers, open_ = Latest[int](stale=30.0), iter(range(9)), asyncio.Event()

    async def ask() -> int:
        await open_.wait()
        await asyncio.sleep(0.05)
        return next(answers)

    patience(0.001)
    open_.set()
    assert await latest.look(ask) == 0
    open_.clear()
    latest._at -= 10.0
    assert await latest.look(ask) == 0
    open_.set()
    await asyncio.wait([latest._task])  # type: ignore[list-item]
    latest._at -= 60.0
    assert await latest.look(ask) == 2
    assert latest.age < 30.0


async def test_a_database_that_hangs_holds_up_one_look_alone(patience: Any) -> None:
    latest: Latest[int] = Latest(timeout=LONG, stale=30.0)

    async def answer() -> int:
        return 1

    async def hang() -> int:
        await asyncio.Event().wait()
        return 2

    await latest.look(answer)
    latest._at -= 60.0
    patience(LONG, first=0.05)
    assert await latest.look(hang) == 1
    patience(0.01)
    async with asyncio.timeout(PATIENCE):
        for _ in range(3):
            assert await latest.look(hang) == 1
    await latest.close()


def test_a_histogram_read_in_between_is_one() -> None:
    seen: list[list[float]] = []

    class Bound(float):
        """One that is compared in the middle of an addition."""

        def __lt__(self, other: float) -> bool:
            seen.append([count for _, count in histogram.buckets()[0]])
            return super().__lt__(other)

    histogram = Histogram([Bound(0.1), Bound(1.0), Bound(10.0)])
    histogram.add([0.05, 0.5, 5.0, 50.0])
    assert len(seen) >= 3
    for counts in seen:
        assert counts == sorted(counts)


async def test_before_the_first_answer_there_are_no_gauges() -> None:
    admin = FakeAdmin(busy(due=3))
    admin.error = OSError("gone")
    found = await scrape(admin)
    assert "outbox_pending_messages" not in {name for name, _ in found}
    assert value(found, "outbox_scrape_errors_total") == 1


async def test_the_metrics_of_a_relay_stand_beside_those_of_the_outbox() -> None:
    observer = MetricsObserver(namespace="shop")
    settle(observer, (make(), Delivered()))
    admin: Any = FakeAdmin(busy(due=1))
    body, _ = await exposition(admin, "shop", registry=observer.registry)
    names = {name for name, _ in parsed(body)}
    assert {"shop_outbox_pending_messages", "shop_outbox_events_total"} <= names
