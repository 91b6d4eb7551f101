"""What backfill, reindex and reconcile report and return."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple
from uuid import UUID

from relaybox.emit.row import Call

Kind = Literal["missing", "stale", "orphaned"]


class Progress(NamedTuple):
    """How far a backfill is. ``waiting``: for so many deliveries of the destination to become fewer."""

    done: int
    skipped: int
    total: int | None
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A document that cannot be an event, and why; or one whose event the destination would refuse."""

    id: str
    reason: str
    at_destination: bool = False


@dataclass(frozen=True, slots=True)
class Backfilled:
    """The result of a backfill, together with the earlier ones that it went on with.

    ``skipped``: documents that were refused, or, if rows are not locked, that the application has emitted
    meanwhile. ``refused`` names the first of the ``refusals`` of this run. ``total`` was counted at its
    beginning. ``resumed_from`` is the key at which it went on: an id, or without ``by_id`` how many documents
    an iterable had given. ``example``: what a dry run would emit first.
    """

    done: int
    total: int | None
    skipped: int = 0
    resumed_from: Any = None
    stopped: bool = False
    operation: UUID | None = None
    refused: tuple[Refused, ...] = ()
    refusals: int = 0
    example: Call | None = None
    by_id: bool = True


@dataclass(frozen=True, slots=True)
class Reindexed:
    """An index that was rebuilt: its documents, how many of them were repaired, and how long it took."""

    destination: str
    index: str
    documents: int
    repaired: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A document that is not in the index as it is in the database.

    ``fields`` are those that differ in a stale one, ``failed`` is the event that would have written it, and
    ``refused`` why the destination would not write it. A ``blocked`` one waits behind that failed event.
    """

    kind: Kind
    id: str
    fields: tuple[str, ...] = ()
    failed: UUID | None = None
    refused: str | None = None
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The result of a comparison.

    ``documents`` are those of the database that belong in the index. ``in_flight`` ones differ because their
    events are under way, and are left out of ``consistency``. ``blocked`` is how many of those that differ
    wait behind a failed event, and are not repaired. ``repaired`` is how many events were emitted.
    """

    destination: str
    index: str
    documents: int = 0
    matched: int = 0
    missing: int = 0
    stale: int = 0
    orphaned: int = 0
    in_flight: int = 0
    blocked: int = 0
    repaired: int = 0
    stopped: bool = False
    examples: tuple[Difference, ...] = ()

    @property
    def differences(self) -> int:
        """Return how many documents differ that should not."""
        return self.missing + self.stale + self.orphaned

    @property
    def compared(self) -> bool:
        """True if something could be compared, or there was nothing to compare: not all is in flight."""
        return not self.in_flight or bool(self.matched + self.differences)

    @property
    def consistency(self) -> float:
        """Return the documents that are the same on both sides, in percent, rounded down."""
        compared = self.matched + self.differences
        if not compared:
            return 100.0 if self.compared else 0.0
        return math.floor(10_000 * self.matched / compared) / 100

    def figures(self) -> dict[str, Any]:
        """Return all but the examples, for records and programs."""
        names = (one.name for one in fields(self) if one.name not in ("stopped", "examples"))
        return {**{name: getattr(self, name) for name in names}, "consistency": self.consistency}
