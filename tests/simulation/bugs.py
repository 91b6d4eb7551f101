"""Planted bugs, each switched on by a test alone: what the simulation has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from relaybox.testing.checker import Finding
from tests.simulation.plan import Plan, draw
from tests.simulation.schedule import Schedule

Patch = tuple[Any, str, Any]
"""The class or module, the name in it, and what is planted there."""


def any_plan(plan: Plan) -> bool:
    """A bug that may show in every schedule."""
    return True


def faulty(*faults: str) -> Callable[[Plan], bool]:
    """A bug that shows only where one of these faults happens."""
    return lambda plan: any(fault in plan.faults for fault in faults)


class Bug(NamedTuple):
    """A bug in plain words. Only schedules of which ``shows`` is true are worth running."""

    name: str
    patches: Sequence[Patch]
    shows: Callable[[Plan], bool] = any_plan


class Caught(NamedTuple):
    """The first seed under which a bug is found, and what is found."""

    seed: int
    schedules: int
    finding: Finding


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The product, or the fake's statement of the same name, with a bug in it."""
    with ExitStack() as stack:
        for owner, name, value in bug.patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def findings(plan: Plan) -> list[Finding]:
    return Schedule(plan).run().findings


def search(bug: Bug, seeds: range) -> Caught | None:
    """Run the schedules of these seeds until the bug is found."""
    ran = 0
    with planted(bug):
        for seed in seeds:
            plan = draw(seed)
            if bug.shows(plan):
                ran += 1
                if found := findings(plan):
                    return Caught(seed, ran, found[0])
    return None
