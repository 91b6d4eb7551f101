"""The ledger's values and contract: what operators can ask of the tables, and change.

- A query reads a bounded part of the big table. Counts stop at ``CAP``; a search reads one window at a time
  and returns where to continue.
- A change checks each row again under its lock. It skips rows that are leased or changed state. The keys of
  an ordered destination keep their order and a head that is due.
- A change and its audit row commit together.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal
from uuid import UUID

from relaybox.core.redact import Rules
from relaybox.stores.journal import Audit as Audit
from relaybox.stores.journal import AuditRow as AuditRow
from relaybox.stores.journal import Counted as Counted
from relaybox.stores.journal import Operation as Operation

CAP = 10_000
"""The limit of every count."""

BATCH = 1_000
"""The most rows that one transaction changes."""


class State(StrEnum):
    """The state of a delivery; it has exactly one."""

    DUE = "due"
    SCHEDULED = "scheduled"
    PARKED = "parked"
    SENDING = "sending"
    DELIVERED = "delivered"
    FAILED = "failed"
    DISCARDED = "discarded"
    UNKNOWN = "unknown"
    """Written by a newer version or by hand; nothing here changes it."""


FINAL = ("delivered", "failed", "discarded")
"""Statuses of rows that only an operator changes."""

Choice = Literal[
    "pending", "due", "scheduled", "parked", "sending", "processing", "delivered", "completed", "failed",
    "discarded",
]  # fmt: skip
"""What a search can ask for: a state, its other name, or ``pending`` (due, scheduled or parked)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of ``outbox_event`` without its payload, at a moment of the database's clock."""

    id: UUID
    event_id: UUID
    destination: str
    aggregate_type: str
    aggregate_id: str
    event_type: str
    ordering_key: str | None
    position: int
    status: str
    idempotency_key: str
    attempts: int
    max_attempts: int
    crashes: int
    next_attempt_at: datetime | None
    leased_until: datetime | None
    lease_owner: str | None
    created_at: datetime
    updated_at: datetime
    last_attempt_at: datetime | None
    delivered_at: datetime | None
    error_message: str | None
    seen_at: datetime

    @property
    def state(self) -> State:
        """Return the state at that moment."""
        if self.status in FINAL:
            return State(self.status)
        if self.status != "pending":
            return State.UNKNOWN
        if self.leased_until is not None and self.leased_until > self.seen_at:
            return State.SENDING
        if self.next_attempt_at is None:
            return State.PARKED
        return State.DUE if self.next_attempt_at <= self.seen_at else State.SCHEDULED

    @property
    def backing_off(self) -> bool:
        """True if it waits for a retry, and not because it was emitted for later."""
        return self.state is State.SCHEDULED and self.last_attempt_at is not None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One failed attempt."""

    attempt: int
    failed_at: datetime
    relay: str
    error_message: str


@dataclass(frozen=True, slots=True)
class Content:
    """An event's content as stored: JSON texts, or bytes and their encoding."""

    payload: str | None
    payload_data: bytes | None
    payload_encoding: str | None
    headers: str


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects rows that match every given field."""

    status: Choice | None = None
    destination: str | None = None
    event_type: str | None = None
    aggregate_type: str | None = None
    aggregate_id: str | None = None
    ordering_key: str | None = None
    event_id: UUID | None = None
    since: datetime | None = None
    until: datetime | None = None
    error: str | None = None
    """A part of the error, without case."""
    fingerprint: str | None = None
    """The fingerprint of a failed row's error (see ``fingerprint.py``)."""
    rules: Rules | None = None
    """What hides parts of errors from the one who searches: ``error`` matches only the rest."""


EVERYTHING = Filter()
"""Matches every row."""


@dataclass(frozen=True, slots=True)
class Page:
    """Entries, and the cursor to continue with; ``None`` at the end."""

    entries: tuple[Entry, ...]
    cursor: UUID | None


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows of one destination by state; states in ``capped`` have at least that many."""

    due: int = 0
    scheduled: int = 0
    parked: int = 0
    sending: int = 0
    delivered: int = 0
    failed: int = 0
    oldest_pending: datetime | None = None
    oldest_seconds: float | None = None
    """The age of that row, by the database's clock."""
    capped: frozenset[str] = frozenset()
    retrying: str | None = None
    """The error of the next scheduled row, if it is a retry."""
    sending_seconds: float | None = None
    """Seconds since the oldest active claim, by the database's clock."""


@dataclass(frozen=True, slots=True)
class DestinationState:
    """A destination's row: its pause and its circuit."""

    name: str
    paused_at: datetime | None
    paused_until: datetime | None
    paused_by: str | None
    pause_reason: str | None
    circuit: Literal["closed", "open", "half_open"]
    circuit_until: datetime | None
    circuit_reason: str | None
    seen_at: datetime

    @property
    def paused(self) -> bool:
        """True if it was paused at that moment."""
        return self.paused_at is not None and (self.paused_until is None or self.paused_until > self.seen_at)


@dataclass(frozen=True, slots=True)
class Relay:
    """A relay's last heartbeat."""

    name: str
    host: str
    pid: int
    version: str
    started_at: datetime
    last_seen_at: datetime
    leads_until: datetime | None
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class Policy:
    """What a change needs to know about a destination; ``handed_over`` rows are inserted as delivered."""

    ordered: bool = True
    block: bool = True
    handed_over: bool = False
