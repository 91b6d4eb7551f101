"""How far a backfill is, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import UUID

from relaybox.emit.row import Call


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
    """What a backfill came to, together with the earlier ones that it went on with.

    ``skipped``: documents that were refused, or, where rows are not locked, that the application has emitted
    meanwhile. ``refused`` names the first of those that this one refused, which are ``refusals``.
    ``total`` was counted at its beginning. ``resumed_from`` is the key at which it went on: an id, or without
    ``by_id`` how many documents an iterable had given. ``example``: what a dry run would emit first.
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
