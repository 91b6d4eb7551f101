"""The values of a journal, which keeps what is not in the rows: roll-ups, failures, audits and operations.

No question of it reads more than a bounded part of any table, and each is a fixed number of queries (for each
destination: one).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

STALLED = 30.0
"""Seconds without a sign of life after which nobody works on an operation any more."""

OperationState = Literal["running", "done", "cancelled", "failed", "stalled"]


@dataclass(frozen=True, slots=True)
class Audit:
    """Who changes what, for the audit row; the ledger adds how many rows it were."""

    actor: str
    action: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AuditRow:
    """What an operator did: a whole action, or a batch of a long one."""

    id: int
    at: datetime
    actor: str
    action: str
    details: Mapping[str, Any]
    affected: int


@dataclass(frozen=True, slots=True)
class Operation:
    """A bulk action that runs, or ran, in the background of some process.

    ``details`` say the filter, ``to`` and ``rate``. ``total`` is what was counted ahead; ``capped``: it is at
    least so many. ``stalled``: its process gave no sign of life for ``STALLED`` seconds; what it has done is
    done, and to start it once more does the rest; a replay begins with the first again.
    """

    id: UUID
    action: str
    actor: str
    details: Mapping[str, Any]
    state: OperationState
    total: int | None
    capped: bool
    done: int
    skipped: int
    started_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    error: str | None
    seen_at: datetime = field(compare=False)
    """When that was so, by the database's clock."""


@dataclass(frozen=True, slots=True)
class Counted:
    """How many rows an action would be about; ``capped``: at least so many."""

    count: int
    capped: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """Failed rows of one destination, event type and error (its beginning)."""

    destination: str
    event_type: str
    error: str
    count: int
    first_at: datetime
    last_at: datetime
    example: UUID


@dataclass(frozen=True, slots=True)
class FailedRows:
    """The newest failed rows by their errors; ``capped``: there are more than were looked at."""

    failures: tuple[Failure, ...]
    capped: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """What was settled in one step of time; steps are counted from 1970. ``lag`` counts by bucket."""

    step: int
    delivered: int
    retried: int
    failed: int
    lag: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Level:
    """What was sampled in one step: the most that was pending, and the last position."""

    step: int
    pending: int
    oldest_seconds: float | None
    position: int | None
    at: datetime


@dataclass(frozen=True, slots=True)
class History:
    """The steps on record, as of a moment of the database's clock."""

    now: datetime
    settled: tuple[Settled, ...]
    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """Whether a destination's deliveries flow.

    ``pending``: something is, due or not. ``due_seconds``: for how long the first is due, None: none is.
    ``settles``: something was settled not long ago.
    """

    pending: bool
    due_seconds: float | None
    settles: bool
