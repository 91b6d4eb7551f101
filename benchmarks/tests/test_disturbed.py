"""The parts on neighbours and kills judge correctly, and a small run of each succeeds."""

from __future__ import annotations

import pytest

from benchmarks.findings import Options
from benchmarks.parts import kills, neighbours
from benchmarks.parts.kills import LATEST, Number

QUICK = Options(quick=True)
COMMITS = {Number(0, 0): 1.0, Number(0, 1): 2.0, Number(1, 0): 3.0, Number(1, 1): 5.0}
"""The last one was committed after the last kill, which was at 4."""


def judged(*deliveries: tuple[int, int, float]) -> kills.Killed:
    return kills.judge(COMMITS, [(Number(key, n), at) for key, n, at in deliveries], killed_at=4.0)


def test_the_last_delivery_is_of_what_was_committed_before_the_last_kill() -> None:
    killed = judged((0, 0, 1.5), (0, 1, 2.5), (0, 0, 2.6), (1, 0, 6.0), (1, 1, 99.0))
    assert killed == kills.Killed(events=4, last=2.0, missing=0, out_of_order=0, repeated=1)


def test_what_is_missing_or_out_of_order_is_counted() -> None:
    assert judged((0, 1, 2.5), (0, 0, 2.6), (1, 0, 4.5), (1, 1, 5.0)).out_of_order == 2
    killed = judged((0, 0, 1.5), (0, 1, 2.5))
    assert (killed.missing, killed.last) == (2, LATEST)


async def test_nothing_is_missing_after_some_kills(postgres18_url: str) -> None:
    killed = await kills.run(postgres18_url, seed=0, kills=3)
    assert killed.events > 0
    assert (killed.missing, killed.out_of_order) == (0, 0)


@pytest.mark.parametrize(
    ("committed", "arrived", "wait"), [(1.0, 3.0, 2.0), (1.0, 12.0, 2.0), (11.0, 12.0, 1.0), (2.0, 1.0, 0.0)]
)
def test_a_wait_for_a_locked_table_is_not_counted(committed: float, arrived: float, wait: float) -> None:
    assert neighbours.wait(committed, arrived, writable=10.0) == wait


@pytest.mark.parametrize("case", neighbours.cases(QUICK), ids=lambda case: case.name)
async def test_all_events_arrive_beside_trouble(case: neighbours.Case, postgres18_url: str) -> None:
    taken = await neighbours.take(postgres18_url, case)
    assert set(taken.missing.values()) == {0}
    assert all(taken.waits.values())
    assert taken.memory > 0
    assert taken.connections > 0
