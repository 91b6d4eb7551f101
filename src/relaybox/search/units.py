"""Which deliveries of a batch are written together, and which of them wait for which.

A unit is a run of deliveries for one document: only the last of them is written, for it holds what the others
would have left. Units of one key or of one document follow one another; all others may go side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject
from relaybox.search.change import BUILDING
from relaybox.sinks.sink import DELIVERED, RELEASED, Answer


@dataclass(frozen=True, slots=True)
class Target:
    """Where a delivery is written: the document of an index."""

    index: str
    id: str

    @property
    def document(self) -> tuple[str, str]:
        """The document, whether it is written to its index or to the one that is being built for it."""
        return self.index.removesuffix(BUILDING), self.id


@dataclass(eq=False)
class Unit:
    """Deliveries by their places in the batch. Without a target they are ignored, or the one is refused."""

    target: Target | None
    refused: Reject | None = None
    members: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    """Those of the members that are not ignored."""
    waits_for: int = 0
    """How many units have to arrive before this one."""
    followers: list[Unit] = field(default_factory=list)
    failure: tuple[int, Answer] | None = None
    """The first member that did not arrive, and its answer: those after it are released."""
    refusals: int = 0
    passed_over: list[int] = field(default_factory=list)
    """Between what is written and what was refused after it."""

    def cut(self, at: int) -> None:
        """Leave out this member and all after it, and whatever follows."""
        self.members = [member for member in self.members if member < at]
        self.writes = [member for member in self.writes if member < at]
        self.followers = []

    def succeed(self) -> None:
        """What was written, the last, arrived; those that were passed over wait for another time."""
        if self.passed_over:
            self.failure = self.passed_over[0], RELEASED
        self.writes = []

    def fail(self, answer: Answer, *, alone: bool) -> None:
        """What was written, the last, was refused; ``alone``: those before it may still be written.

        Each time twice as many are passed over: of a long run of bad ones few are tried.
        """
        self.failure = self.writes[-1 if alone else 0], answer
        last = len(self.writes) - 1
        left = max(last + 1 - 2**self.refusals, min(last, 1)) if alone else 0
        self.writes, self.passed_over = self.writes[:left], self.writes[left:last]
        self.refusals += 1

    def answers(self) -> list[tuple[int, Answer]]:
        """An answer for each member, once nothing is left to be written."""
        if self.failure is None:
            return [(at, DELIVERED) for at in self.members]
        failed, answer = self.failure
        return [
            (at, DELIVERED if at < failed else answer if at == failed else RELEASED) for at in self.members
        ]


Targets = Callable[[Delivery], Target | None]
"""Where a delivery goes, None where it is ignored; raises ``Reject``."""


def units_of(deliveries: Sequence[Delivery], target_of: Targets) -> list[Unit]:
    """The units of a batch, in the order in which they begin."""
    units: list[Unit] = []
    of_key: dict[str, Unit] = {}
    of_document: dict[tuple[str, str], Unit] = {}
    for at, delivery in enumerate(deliveries):
        key = delivery.ordering_key
        before = None if key is None else of_key.get(key)
        try:
            target, refused = target_of(delivery), None
        except Reject as error:
            target, refused = None, error
        same = None if target is None else of_document.get(target.document)
        unit = _joined(before, same, target, refused)
        if unit is None:
            unit = Unit(target, refused)
            units.append(unit)
            for other in {earlier for earlier in (before, same) if earlier is not None}:
                other.followers.append(unit)
                unit.waits_for += 1
        unit.members.append(at)
        if target is not None:
            unit.writes.append(at)
            of_document[target.document] = unit
        if key is not None:
            of_key[key] = unit
    return units


def _joined(
    before: Unit | None, same: Unit | None, target: Target | None, refused: Reject | None
) -> Unit | None:
    """The unit that a delivery can be one of: it is the latest of its key, and of its document."""
    if refused is not None:
        return None
    if target is None:
        return before if before is not None and before.refused is None else None
    if same is None or same.target != target or before not in (None, same):
        return None
    return same
