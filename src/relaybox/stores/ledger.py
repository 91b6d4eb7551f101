"""The values of a ledger, and its contract: what an operator can ask of the tables, and change in them.

Its promises:

- No question costs more than a bounded part of the big table: counts stop at ``CAP``, and a search looks at
  a window of rows at a time and says where to go on.
- A change looks again at every row once it holds its lock: what is leased, or is no longer in the state in
  which it was seen, is left as it is. The keys of an ordered destination keep their order, and have a head
  that is due.
- Every change and its audit row commit together, or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal
from uuid import UUID

from relaybox.stores.journal import Audit as Audit
from relaybox.stores.journal import AuditRow as AuditRow
from relaybox.stores.journal import Counted as Counted
from relaybox.stores.journal import Operation as Operation

CAP = 10_000
"""Counts go no further than this."""

BATCH = 1_000
"""The most rows that one transaction changes."""


class State(StrEnum):
    """Where a delivery is. Each one is in exactly one of these."""

    DUE = "due"
    SCHEDULED = "scheduled"
    PARKED = "parked"
    SENDING = "sending"
    DELIVERED = "delivered"
    FAILED = "failed"
    DISCARDED = "discarded"
    UNKNOWN = "unknown"
    """Of a newer version, or of somebody's own making: nothing here touches it."""


FINAL = ("delivered", "failed", "discarded")
"""The statuses of rows that nothing moves but an operator."""

Choice = Literal[
    "pending", "due", "scheduled", "parked", "sending", "processing", "delivered", "completed", "failed",
    "discarded",
]  # fmt: skip
"""What a search may ask for: a state, its other name, or ``pending``: due, scheduled or parked."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of ``outbox_event`` without its payload, as it was at a moment of the database's clock."""

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
        """Where it was at that moment."""
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
        """Whether it waits because it was tried before, and not because it was emitted for later."""
        return self.state is State.SCHEDULED and self.last_attempt_at is not None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt that failed."""

    attempt: int
    failed_at: datetime
    relay: str
    error_message: str


@dataclass(frozen=True, slots=True)
class Content:
    """What an event carries, as it is stored: JSON texts, or bytes and their encoding."""

    payload: str | None
    payload_data: bytes | None
    payload_encoding: str | None
    headers: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A row of ``inbox_message``: that a consumer has processed a message."""

    message_id: str
    processed_at: datetime


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows are meant: those that everything given here is true of."""

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
    fingerprint: str | None = None
    """That of the error of failed rows (see ``fingerprint.py``)."""


EVERYTHING = Filter()
"""Every row."""


@dataclass(frozen=True, slots=True)
class Page:
    """Entries, and where the search goes on; ``None``: it is at its end."""

    entries: tuple[Entry, ...]
    cursor: UUID | None


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows of one destination are in each state; those in ``capped`` are at least so many."""

    due: int = 0
    scheduled: int = 0
    parked: int = 0
    sending: int = 0
    delivered: int = 0
    failed: int = 0
    oldest_pending: datetime | None = None
    oldest_seconds: float | None = None
    """How old that one is, by the database's clock."""
    capped: frozenset[str] = frozenset()
    retrying: str | None = None
    """Why the next of those that are scheduled is tried again, if it is."""
    sending_seconds: float | None = None
    """How long ago the first of those that are being sent was claimed, by the database's clock."""


@dataclass(frozen=True, slots=True)
class Place:
    """A destination's row: whether it is paused, and its circuit."""

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
        """Whether it was paused at that moment."""
        return self.paused_at is not None and (self.paused_until is None or self.paused_until > self.seen_at)


@dataclass(frozen=True, slots=True)
class Relay:
    """A relay's last sign of life."""

    name: str
    host: str
    pid: int
    version: str
    started_at: datetime
    last_seen_at: datetime
    leads_until: datetime | None
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class Lane:
    """What a change must know of a configured destination.

    ``ordered``: its rows keep their keys. ``handed_over``: they are delivered from the start.
    """

    ordered: bool = True
    block: bool = True
    handed_over: bool = False


@dataclass(frozen=True, slots=True)
class SingleEvent:
    """An event that an operator sends; ``payload`` and ``headers`` are JSON texts."""

    id: UUID
    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: str
    headers: str
    max_attempts: int
