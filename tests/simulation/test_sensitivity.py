"""Planted bugs: the simulation finds every one of them, and nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.simulation.bugs import Bug, Caught, findings, search
from tests.simulation.plan import draw
from tests.simulation.relay_bugs import RELAY_BUGS
from tests.simulation.store_bugs import STORE_BUGS

BUGS = (*RELAY_BUGS, *STORE_BUGS)
SEEDS = range(4000)
CLEAN = range(200)
# A relay that dies in the simulation leaves its tasks where they stand.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def caught(request: pytest.FixtureRequest) -> Iterator[dict[str, Caught]]:
    """By bug; shown as a table in the end."""
    found: dict[str, Caught] = {}
    yield found
    lines = [f"{'bug':<56} {'seed':>4} {'runs':>4}  found by"]
    for name, (seed, schedules, finding) in found.items():
        lines.append(
            f"{name:<56} {seed:>4} {schedules:>4}  {finding.kind}: {' '.join(finding.text.split()[:12])}"
        )
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        request.config.get_terminal_writer().write("\n" + "\n".join(lines) + "\n")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(
    bug: Bug, caught: dict[str, Caught], record_property: Callable[[str, object], None]
) -> None:
    found = search(bug, SEEDS)
    assert found is not None, f"{bug.name}: not found under {len(SEEDS)} seeds"
    assert not findings(draw(found.seed)), f"seed {found.seed} finds something without the bug, too"
    caught[bug.name] = found
    record_property("bug", [bug.name, found.seed, f"{found.finding.kind}: {found.finding.text}"])


def test_without_a_bug_nothing_is_found() -> None:
    assert [(seed, found) for seed in CLEAN if (found := findings(draw(seed)))] == []


def test_there_are_many_bugs_each_with_a_name_of_its_own() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 36
