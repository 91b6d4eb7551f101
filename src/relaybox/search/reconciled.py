"""What a comparison of a database and a search index came to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from uuid import UUID

Kind = Literal["missing", "stale", "orphaned"]


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
    """What a comparison came to.

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

    COUNTS: ClassVar = (
        "documents",
        "matched",
        "missing",
        "stale",
        "orphaned",
        "in_flight",
        "blocked",
        "repaired",
    )

    @property
    def differences(self) -> int:
        """How many documents differ that should not."""
        return self.missing + self.stale + self.orphaned

    @property
    def compared(self) -> bool:
        """Whether anything could be compared, or there was nothing to compare: not all is in flight."""
        return not self.in_flight or bool(self.matched + self.differences)

    @property
    def consistency(self) -> float:
        """The documents that are the same on both sides, in percent, rounded down; 0 if none was compared."""
        compared = self.matched + self.differences
        if not compared:
            return 100.0 if self.compared else 0.0
        return math.floor(10_000 * self.matched / compared) / 100


def told(result: Reconciled) -> dict[str, Any]:
    """The figures, for records and programs."""
    figures = {name: getattr(result, name) for name in Reconciled.COUNTS}
    about = {"destination": result.destination, "index": result.index}
    return {**about, **figures, "consistency": result.consistency}
