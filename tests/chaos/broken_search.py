"""The command, with one defect in what it does for search engines.

``python -m tests.chaos.broken_search DEFECT relay``
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from relaybox.cli import main
from relaybox.core.event import Delivery
from relaybox.search import sink as search
from relaybox.search.change import Action, Changes
from relaybox.search.meilisearch.server import Task, Tasks
from relaybox.search.sink import Targets, Unit
from relaybox.search.sink import units_of as _units_of

_action_of = Changes.action_of


def take_accepted_for_done() -> None:
    async def finished(_: Tasks, uid: int, end: float) -> Task:
        return Task(uid, "succeeded")

    Tasks.finished = finished  # type: ignore


def keep_the_first() -> None:
    """Write the oldest of several changes of a document in a batch."""

    def units_of(deliveries: Sequence[Delivery], target_of: Targets) -> list[Unit]:
        units = _units_of(deliveries, target_of)
        for unit in units:
            unit.writes.reverse()
        return units

    search.units_of = units_of  # type: ignore[attr-defined]


def ignore_deletes() -> None:
    def action_of(changes: Changes, event_type: str) -> Action:
        action = _action_of(changes, event_type)
        return "ignore" if action == "delete" else action

    Changes.action_of = action_of  # type: ignore


DEFECTS: dict[str, Callable[[], None]] = {
    "takes accepted for done": take_accepted_for_done,
    "keeps the first": keep_the_first,
    "ignores deletes": ignore_deletes,
}

if __name__ == "__main__":
    DEFECTS[sys.argv.pop(1)]()
    main()
