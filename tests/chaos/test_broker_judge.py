"""What is drawn for a broker, and how duplicates and delays are judged, with histories made by hand."""

from __future__ import annotations

from uuid import uuid4

import pytest

from tests.chaos.broker_schedule import Flight, Wait, Window, draw, excuses, waits
from tests.chaos.workload import BROKER, LOOSE, ORDERED


def test_the_same_seed_does_the_same_harm() -> None:
    kinds = ("killed", "stopped", "full", "deleted")
    draws = [draw(seed, kinds) for seed in range(200)]
    assert draws == [draw(seed, kinds) for seed in range(200)]
    assert {blow.kind for one in draws for blow in one.blows} == set(kinds)
    assert sum(not one.blows for one in draws) in range(5, 40)
    assert any(one.general.faults for one in draws)
    assert any(one.general.dooms for one in draws)


EVENT = uuid4()
OUTSIDE = Flight(BROKER, EVENT, "host:7:a", 10.0, 11.0, delivered=True)
DURING = Flight(BROKER, EVENT, "host:7:a", 19.0, 21.0)
LOST = Flight(BROKER, EVENT, "host:7:a", 30.0, 33.0, lost=True)
TROUBLE = [Window(20.0, 25.0)]


@pytest.mark.parametrize(
    ("flights", "killed", "copies", "excused"),
    [
        ([OUTSIDE], (), 2, 0),
        ([OUTSIDE._replace(delivered=False), OUTSIDE], (), 1, 0),
        ([DURING, OUTSIDE], (), 1, 1),
        ([DURING, OUTSIDE], (), 2, 2),
        ([DURING], (), 2, 1),
        ([LOST, OUTSIDE], (), 1, 0),
        ([LOST, OUTSIDE], (7,), 1, 1),
        ([LOST, OUTSIDE], (70,), 1, 0),
    ],
)
def test_a_duplicate_needs_an_attempt_that_something_befell(
    flights: list[Flight], killed: tuple[int, ...], copies: int, excused: int
) -> None:
    found = excuses(flights, TROUBLE, killed, BROKER, copies)
    assert found.get((BROKER, EVENT), 0) == excused


def test_an_attempt_that_found_nobody_excuses_nothing() -> None:
    shut = [Window(20.0, 25.0, (21.0, 24.0))]
    in_vain = DURING._replace(begun=21.5, ended=23.5)
    assert excuses([in_vain, OUTSIDE], shut, (), BROKER, 2) == {}
    assert excuses([in_vain._replace(ended=24.5), OUTSIDE], shut, (), BROKER, 2) == {(BROKER, EVENT): 2}
    assert excuses([DURING, OUTSIDE], shut, (), BROKER, 2) == {(BROKER, EVENT): 2}


def test_the_brokers_trouble_excuses_nothing_that_went_elsewhere() -> None:
    elsewhere = [flight._replace(destination=ORDERED) for flight in (DURING, OUTSIDE)]
    assert excuses(elsewhere, TROUBLE, (), BROKER, 1) == {}


def test_a_wait_counts_for_as_long_as_nothing_else_arrived() -> None:
    created = {("a", ORDERED): 0.0, ("b", ORDERED): 1.0, ("c", ORDERED): 1.0, ("d", LOOSE): 1.0}
    arrivals = [("a", ORDERED, 0.5), ("b", ORDERED, 5.0), ("b", ORDERED, 6.0), ("c", ORDERED, 6.5)]
    assert list(waits(created, [*arrivals, ("d", LOOSE, 7.0)])) == [
        Wait(("a", ORDERED), 0.5, 0.5),
        Wait(("b", ORDERED), 4.0, 4.0),
        Wait(("c", ORDERED), 5.5, 0.5),
        Wait(("d", LOOSE), 6.0, 6.0),
    ]
