"""Results of backfill, reindex and reconcile."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple
from uuid import UUID

from relaybox.emit.row import Call

Kind = Literal["missing", "stale", "orphaned"]


class Progress(NamedTuple):
    """How far a backfill is; ``waiting`` is the number of pending deliveries that it waits for."""

    done: int
    skipped: int
    total: int | None
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class RefusedDocument:
    """A document that cannot become an event, or that the destination would refuse."""

    id: str
    reason: str
    at_destination: bool = False


@dataclass(frozen=True, slots=True)
class Backfilled:
    """The result of a backfill, including the runs that it resumed.

    ``skipped`` counts refused documents and, if rows are not locked, those that the application emitted
    meanwhile. ``refused`` names the first of this run's ``refusals``. ``resumed_from`` is an id, or, if
    ``by_id`` is False, the number of documents already read. ``total`` was counted at the start.
    ``example`` is what a dry run would emit first.
    """

    done: int
    total: int | None
    skipped: int = 0
    resumed_from: Any = None
    stopped: bool = False
    operation: UUID | None = None
    refused: tuple[RefusedDocument, ...] = ()
    refusals: int = 0
    example: Call | None = None
    by_id: bool = True


@dataclass(frozen=True, slots=True)
class Reindexed:
    """A rebuilt index: its documents, how many of them were repaired, and the time it took."""

    destination: str
    index: str
    documents: int
    repaired: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A document that differs between index and database.

    ``fields`` are those that differ if it is stale; ``failed`` is the event that should have written it.
    ``refused`` says why the destination would not write it. ``blocked``: it waits behind the failed event.
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

    ``documents`` counts those of the database that belong in the index. ``in_flight`` ones have events under
    way and do not count in ``consistency``. ``blocked`` ones wait behind a failed event and are not repaired.
    ``repaired`` counts the emitted events.
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
        """Return how many documents are wrong in the index."""
        return self.missing + self.stale + self.orphaned

    @property
    def compared(self) -> bool:
        """True unless everything is in flight, so that nothing could be compared."""
        return not self.in_flight or bool(self.matched + self.differences)

    @property
    def consistency(self) -> float:
        """Return the percentage of documents that are the same on both sides, rounded down."""
        compared = self.matched + self.differences
        if not compared:
            return 100.0 if self.compared else 0.0
        return math.floor(10_000 * self.matched / compared) / 100

    def figures(self) -> dict[str, Any]:
        """Return everything except the examples, for records and programs."""
        names = (one.name for one in fields(self) if one.name not in ("stopped", "examples"))
        return {**{name: getattr(self, name) for name in names}, "consistency": self.consistency}
