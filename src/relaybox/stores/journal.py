"""The journal's values: roll-ups, failures, audits and operations, each read in bounded queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

STALLED = 30.0
"""Seconds without a heartbeat after which an operation counts as abandoned."""

OperationState = Literal["running", "done", "cancelled", "failed", "stalled"]


@dataclass(frozen=True, slots=True)
class Audit:
    """Who changes what, for the audit row; the ledger adds the number of rows."""

    actor: str
    action: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AuditRow:
    """What an operator did: a whole action, or one batch of a long one."""

    id: int
    at: datetime
    actor: str
    action: str
    details: Mapping[str, Any]
    affected: int


@dataclass(frozen=True, slots=True)
class Operation:
    """A bulk action in the background of some process.

    ``details`` holds filter, ``to`` and ``rate``. If ``capped``, there may be more than ``total``.
    ``stalled`` means no heartbeat for ``STALLED`` seconds: start it again for the rest (a replay starts
    over).
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


@dataclass(frozen=True, slots=True)
class Counted:
    """The number of rows that an action would change; at least that many if ``capped``."""

    count: int
    capped: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """Failed rows of one destination, event type and beginning of the error."""

    destination: str
    event_type: str
    error: str
    count: int
    first_at: datetime
    last_at: datetime
    example: UUID


@dataclass(frozen=True, slots=True)
class Settled:
    """Results in one step of time; ``lag`` counts by bucket."""

    delivered: int
    retried: int
    failed: int
    lag: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Level:
    """Samples of one step: the highest backlog and the last position."""

    pending: int
    oldest_seconds: float | None
    position: int | None
    at: datetime


@dataclass(frozen=True, slots=True)
class Flow:
    """Whether deliveries flow; ``due_seconds`` is how long the first row has been due, if any."""

    pending: bool
    due_seconds: float | None
    settles: bool
