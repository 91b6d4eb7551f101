"""Short schedules with every broker and all of its faults, and a proof that they can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

import pytest

from tests.chaos.broker_schedule import Blow, BrokerDraw, draw, run_broker_schedule
from tests.chaos.brokers.base import BROKERS, SINKS, Broker, running
from tests.chaos.cluster import Ground
from tests.chaos.run import line
from tests.chaos.schedule import Result
from tests.conftest import available

EVENTS = 160
BRIEF = {
    "redis": ("killed", "stopped", "full"),
    "nats": ("ended", "deleted", "unroutable"),
    "rabbitmq": ("full", "deleted", "exchange deleted"),
    "kafka": ("too small", "deleted"),
}
"""What there is no time for befalls them in the long proof, and in the tests of the sinks."""
SEED_WITH_KILLS = 1


@dataclass(frozen=True)
class Scene:
    """A database, and brokers that are started when the first test asks for them."""

    ground: Ground
    broker: Callable[[str], Broker]

    def run(self, name: str, seed: int, events: int, plan: BrokerDraw, defect: str = "") -> Result:
        return run_broker_schedule(self.ground, self.broker(name), seed, events, plan=plan, defect=defect)


@pytest.fixture(scope="module")
def scene(ground: Callable[..., Ground]) -> Iterator[Scene]:
    with ExitStack() as stack:
        start = cache(lambda name: stack.enter_context(available(name, running(name))))
        yield Scene(ground("postgresql-18", SINKS), start)


@pytest.mark.parametrize("name", BROKERS)
def test_whatever_befalls_a_broker_every_promise_is_kept(scene: Scene, name: str) -> None:
    plan = draw(1, BRIEF[name], every=True)
    result = scene.run(name, 1, EVENTS, plan)
    assert result.ok, (line(result), *result.words)
    assert result.events >= EVENTS
    assert result.duplicates <= result.bound
    assert {kind for kind in result.faults if kind.startswith("broker: ")} == {
        f"broker: {blow.kind}" for blow in plan.blows
    }
    harms = scene.broker(name).harms
    assert result.explained == sum(bool(harms[blow.kind].says) for blow in plan.blows)


def test_relays_are_killed_too(scene: Scene) -> None:
    plan = draw(SEED_WITH_KILLS, tuple(scene.broker("redis").harms))
    assert plan.general.faults
    result = scene.run("redis", SEED_WITH_KILLS, EVENTS, plan)
    assert result.ok, (line(result), *result.words)
    assert any("relay" in kind for kind in result.faults)


def spoiled(scene: Scene, name: str, defect: str, kind: str) -> Result:
    calm = draw(0, (kind,), every=True)
    general = calm.general._replace(relays=1, batch=20, concurrency=50)
    return scene.run(name, 0, EVENTS // 2, BrokerDraw(general, (Blow(kind, 0.2, 0.5),)), defect)


@pytest.mark.parametrize(
    ("defect", "kind", "found"),
    [
        ("takes trouble for success", "full", "lost"),
        ("sends to the broker twice", "deleted", "duplicate"),
        ("sends to the broker backwards", "deleted", "disorder"),
        ("holds up the others", "full", "late"),
        ("does not say why", "full", "unexplained"),
    ],
)
def test_a_broken_relay_is_found_out(scene: Scene, defect: str, kind: str, found: str) -> None:
    assert spoiled(scene, "redis", defect, kind).findings[found] > 0


def test_what_no_stream_takes_is_lost_where_a_relay_calls_it_delivered(scene: Scene) -> None:
    result = spoiled(scene, "nats", "takes trouble for success", "deleted")
    assert result.findings["lost"] > 0
    assert set(filter(result.findings.get, result.findings)) <= {"lost", "disorder"}
