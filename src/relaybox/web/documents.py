"""What answers are made of. Rendering and the OpenAPI document follow from these."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from msgspec import Struct


class CountsDocument(Struct, kw_only=True):
    """How many deliveries are where; those named in ``capped`` are at least so many."""

    pending: int
    processing: int
    completed: int
    failed: int
    due: int
    scheduled: int
    parked: int
    oldest_pending: datetime | None
    oldest_pending_seconds: float | None
    capped: list[str]


class PauseDocument(Struct, kw_only=True):
    """A pause."""

    at: datetime | None
    until: datetime | None
    by: str | None
    reason: str | None


class CircuitDocument(Struct, kw_only=True):
    """A circuit."""

    state: Literal["closed", "open", "half_open"] = "closed"
    until: datetime | None = None
    reason: str | None = None


class DestinationDocument(CountsDocument, kw_only=True):
    """A destination: its deliveries, what holds it up, and its settings where it is configured."""

    name: str
    configured: bool
    handed_over: bool
    sink: str | None
    ordered: bool | None
    max_attempts: int | None
    dead_letter: str | None
    retrying: str | None
    paused: PauseDocument | None
    circuit: CircuitDocument


class RelayDocument(Struct, kw_only=True):
    """A relay's last sign of life."""

    name: str
    host: str
    pid: int
    version: str
    started_at: datetime
    last_seen_at: datetime
    leads_until: datetime | None
    alive: bool


class StatsDocument(CountsDocument, kw_only=True):
    """Where everything is."""

    destinations: list[DestinationDocument]
    relays: list[RelayDocument]


class DestinationsDocument(Struct, kw_only=True):
    """Every destination that is configured, or has rows."""

    destinations: list[DestinationDocument]


class RelaysDocument(Struct, kw_only=True):
    """The relays that were seen last."""

    relays: list[RelayDocument]


class EventDocument(Struct, kw_only=True):
    """A delivery: one event for one destination."""

    id: UUID
    event_id: UUID
    destination: str
    aggregate_type: str
    aggregate_id: str
    event_type: str
    ordering_key: str | None
    position: int
    status: str
    state: str
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


class EventsDocument(Struct, kw_only=True):
    """Deliveries, newest first. A short page that has a cursor is worth going on from."""

    events: list[EventDocument]
    cursor: str | None


class AttemptDocument(Struct, kw_only=True):
    """An attempt that failed."""

    attempt: int
    failed_at: datetime
    relay: str
    error_message: str


class DetailDocument(EventDocument, kw_only=True):
    """A delivery with what it carries, redacted; of a binary payload, its size."""

    payload: Any
    payload_encoding: str | None
    payload_size: int | None
    headers: Any
    failed_attempts: list[AttemptDocument]


class DeliveriesDocument(Struct, kw_only=True):
    """The delivery of an id, or every delivery of the event of that id."""

    deliveries: list[DetailDocument]


class ReasonDocument(Struct, kw_only=True):
    """Why a delivery is where it is."""

    id: UUID
    event_id: UUID
    destination: str
    state: str
    why: str
    text: str
    until: datetime | None
    behind: ReasonDocument | None


class ReasonsDocument(Struct, kw_only=True):
    """Why each delivery of an id is where it is."""

    deliveries: list[ReasonDocument]


class DoneDocument(Struct, kw_only=True):
    """What an action did; with ``dry_run``, would have done: at least so many where ``capped``.

    ``skipped`` ones were not in a state for it; of ``unknown`` ids there is nothing.
    """

    skipped: int
    unknown: list[UUID]
    dry_run: bool
    capped: bool


class RetriedDocument(DoneDocument, kw_only=True):
    """What a retry did."""

    retried: int


class ReplayedDocument(DoneDocument, kw_only=True):
    """What a replay did."""

    replayed: int


class DiscardedDocument(DoneDocument, kw_only=True):
    """What a discard did."""

    discarded: int


class MovedDocument(DoneDocument, kw_only=True):
    """What a move did."""

    moved: int


class OperationDocument(Struct, kw_only=True):
    """A bulk action in the background: how far it is."""

    id: UUID
    action: str
    actor: str
    details: Any
    state: Literal["running", "done", "cancelled", "failed", "stalled"]
    total: int | None
    capped: bool
    done: int
    skipped: int
    started_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    error: str | None


class OperationsDocument(Struct, kw_only=True):
    """Bulk actions, newest first."""

    operations: list[OperationDocument]


class CancelledDocument(Struct, kw_only=True):
    """Whether there was anything to cancel."""

    cancelled: bool


class FailureDocument(Struct, kw_only=True):
    """Failed deliveries whose errors are alike."""

    fingerprint: str
    destination: str
    error_class: str
    message: str
    count: int
    first_at: datetime
    last_at: datetime
    example: UUID
    event_types: list[str]


class FailuresDocument(Struct, kw_only=True):
    """Failures in groups; ``capped``: of the newest ``looked_at`` only."""

    failures: list[FailureDocument]
    looked_at: int
    capped: bool


class DeadLetterDocument(EventDocument, kw_only=True):
    """A delivery that failed elsewhere, where, and why."""

    origin: str | None
    reason: str | None


class DeadLettersDocument(Struct, kw_only=True):
    """Dead letters, newest first."""

    dead_letters: list[DeadLetterDocument]
    cursor: str | None


class AuditDocument(Struct, kw_only=True):
    """Who did what."""

    id: int
    at: datetime
    actor: str
    action: str
    details: Any
    affected: int


class AuditsDocument(Struct, kw_only=True):
    """What operators did, newest first."""

    audit: list[AuditDocument]
    cursor: str | None


class PausedDocument(Struct, kw_only=True):
    """A destination that is paused now."""

    destination: str
    paused: bool
    reason: str
    until: datetime | None


class ResumedDocument(Struct, kw_only=True):
    """Whether there was anything to resume."""

    destination: str
    resumed: bool


class TestedDocument(Struct, kw_only=True):
    """The event that was written to test a destination."""

    destination: str
    event_id: UUID


class PointDocument(Struct, kw_only=True):
    """One step of a chart: events a second, counts, and seconds."""

    at: datetime
    emitted: float | None
    delivered: float
    retried: int
    failed: int
    pending: int | None
    oldest_seconds: float | None
    p50: float | None
    p95: float | None
    p99: float | None


class SeriesDocument(Struct, kw_only=True):
    """What charts are drawn from, oldest first."""

    step_seconds: float
    points: list[PointDocument]


class TroubleDocument(Struct, kw_only=True):
    """A reason for which work does not flow."""

    destination: str | None
    reason: str
    seconds: float | None


class HealthDocument(Struct, kw_only=True):
    """Whether work flows."""

    ready: bool
    problems: list[TroubleDocument]


class AliveDocument(Struct, kw_only=True):
    """That this process answers."""

    alive: bool


class ProblemDocument(Struct, kw_only=True):
    """What went wrong, as RFC 9457 has it."""

    type: str
    title: str
    status: int
    detail: str
    parameter: str | None = None
