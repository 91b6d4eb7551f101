"""Short schedules with every broker, in which all that can befall it does, and a proof that they can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.chaos.broker_schedule import Blow, BrokerDraw, draw, run_broker_schedule
from tests.chaos.brokers.base import BROKERS, SINKS, Broker, running
from tests.chaos.cluster import Ground, prepared
from tests.chaos.run import line
from tests.chaos.schedule import Result
from tests.conftest import available

pytestmark = pytest.mark.slow

EVENTS = 160
BRIEF = {
    "redis": ("killed", "stopped", "full"),
    "nats": ("ended", "deleted", "unroutable"),
    "rabbitmq": ("full", "deleted", "exchange deleted"),
    "kafka": ("too small", "deleted"),
}
"""What there is no time for befalls them in the long proof, and in the tests of the sinks."""
SEED_WITH_KILLS = 1


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with available("PostgreSQL 18", prepared("postgresql-18", plain=True, warm=SINKS)) as ground:
        yield ground


@pytest.fixture(scope="module")
def broker() -> Iterator[Callable[[str], Broker]]:
    with ExitStack() as stack:
        brokers: dict[str, Broker] = {}

        def start(name: str) -> Broker:
            if name not in brokers:
                brokers[name] = stack.enter_context(available(name, running(name)))
            return brokers[name]

        yield start


@pytest.mark.parametrize("name", BROKERS)
def test_whatever_befalls_a_broker_every_promise_is_kept(
    ground: Ground, broker: Callable[[str], Broker], name: str
) -> None:
    subject = broker(name)
    plan = draw(1, BRIEF[name], every=True)
    result = run_broker_schedule(ground, subject, 1, EVENTS, plan=plan)
    assert result.ok, (line(result), *result.words)
    assert result.events >= EVENTS
    assert result.duplicates <= result.bound
    assert {kind for kind in result.faults if kind.startswith("broker: ")} == {
        f"broker: {blow.kind}" for blow in plan.blows
    }
    assert result.explained == sum(bool(subject.harms[blow.kind].says) for blow in plan.blows)


def test_relays_are_killed_too(ground: Ground, broker: Callable[[str], Broker]) -> None:
    plan = draw(SEED_WITH_KILLS, tuple(broker("redis").harms))
    assert plan.general.faults
    result = run_broker_schedule(ground, broker("redis"), SEED_WITH_KILLS, EVENTS, plan=plan)
    assert result.ok, (line(result), *result.words)
    assert any("relay" in kind for kind in result.faults)


DEFECTS = [
    ("takes trouble for success", "full", "lost"),
    ("sends to the broker twice", "deleted", "duplicate"),
    ("sends to the broker backwards", "deleted", "disorder"),
    ("holds up the others", "full", "late"),
    ("does not say why", "full", "unexplained"),
]


def spoiled(ground: Ground, subject: Broker, defect: str, kind: str) -> Result:
    calm = draw(0, (kind,), every=True)
    general = calm.general._replace(relays=1, batch=20, concurrency=50)
    plan = BrokerDraw(general, (Blow(kind, 0.2, 0.5),))
    return run_broker_schedule(ground, subject, 0, EVENTS // 2, plan=plan, defect=defect)


@pytest.mark.parametrize(("defect", "kind", "found"), DEFECTS)
def test_a_broken_relay_is_found_out(
    ground: Ground, broker: Callable[[str], Broker], defect: str, kind: str, found: str
) -> None:
    result = spoiled(ground, broker("redis"), defect, kind)
    assert not result.ok
    assert result.findings[found] > 0


def test_what_no_stream_takes_is_lost_where_a_relay_calls_it_delivered(
    ground: Ground, broker: Callable[[str], Broker]
) -> None:
    result = spoiled(ground, broker("nats"), "takes trouble for success", "deleted")
    assert result.findings["lost"] > 0
    assert set(filter(result.findings.get, result.findings)) <= {"lost", "disorder"}
