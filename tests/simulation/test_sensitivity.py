"""Planted bugs: the simulation finds every one of them, and nothing where there is none.

RELAYBOX_SEARCH=1, as ``make proof`` sets it, looks for another seed where the stored one fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.simulation.bugs import BUGS, Bug, findings, search
from tests.simulation.run import run_block

# A relay that dies in the simulation leaves its tasks where they stand.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, record_property: Callable[[str, object], None]) -> None:
    seed, found = bug.seed, findings(bug, bug.seed)
    if not found and "RELAYBOX_SEARCH" in os.environ and (other := search(bug)) is not None:
        seed, found = other, findings(bug, other)
    renew = f"python -m tests.simulation.run --bug {bug.name!r} finds another seed to store with the bug"
    assert found, f"seed {seed} catches it no longer: {renew}"
    record_property("bug", [bug.name, seed, f"{found[0].kind}: {found[0].text}"])


def test_nothing_is_found_under_the_same_seeds_without_a_bug() -> None:
    assert run_block(sorted({bug.seed for bug in BUGS})).broken == {}


def test_there_are_many_bugs_each_with_a_name_of_its_own() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 56
