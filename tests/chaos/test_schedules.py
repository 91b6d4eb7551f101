"""A few short schedules of every database, and a proof that the harness can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.cluster import Ground
from tests.chaos.faults import Means, draw
from tests.chaos.run import line
from tests.chaos.schedule import run_schedule

EVENTS = 300
SEEDS = {"postgresql-18": (3, 6), "mariadb": (3, 2), "sqlite": (3, 8)}


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, seeds in SEEDS.items() for seed in seeds])
def test_a_schedule_keeps_every_promise(ground: Callable[..., Ground], kind: str, seed: int) -> None:
    result = run_schedule(ground(kind), seed, EVENTS)
    assert result.ok, (line(result), *result.words)
    assert result.events >= EVENTS
    assert result.receipts - result.duplicates >= result.events
    assert result.duplicates <= result.bound
    assert result.faults


@pytest.mark.parametrize(
    ("defect", "found"),
    [
        ("settles before it sends", "lost"),
        ("forgets rows", "not atomic"),
        ("sends twice", "duplicate"),
        ("sends backwards", "disorder"),
        ("signs with another secret", "unsigned"),
        ("alters payloads", "altered"),
    ],
)
def test_a_broken_relay_is_found_out(ground: Callable[..., Ground], defect: str, found: str) -> None:
    calm = draw(0, EVENTS, Means())._replace(faults=(), dooms=(), pooler=False)
    result = run_schedule(ground("sqlite"), 1, EVENTS, plan=calm, defect=defect)
    assert not result.ok
    assert result.findings[found] > 0
