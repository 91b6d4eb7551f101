"""The values that travel: an event, its delivery to one destination, and the result of ``emit``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from msgspec import Struct

TEST_TYPE = "relaybox.test"
"""The type of events that test a path. A failed one does not count as a dead letter."""


class Status(StrEnum):
    """The stored status of a delivery. ``sending`` is not stored: it is ``pending`` with a live lease."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"
    DISCARDED = "discarded"


class Event(Struct, frozen=True, gc=False):
    """An emitted event, as a handler receives it."""

    id: UUID
    type: str
    aggregate_type: str
    aggregate_id: str
    payload: Any
    headers: Mapping[str, Any]
    attempt: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Emitted:
    """The result of ``emit``. A duplicate has the first event's id and wrote nothing."""

    event_id: UUID
    duplicate: bool
    destinations: tuple[str, ...]


class Delivery(Struct, frozen=True, gc=False):
    """One event for one destination, as claimed. ``payload`` and ``headers`` are the stored JSON text."""

    id: UUID
    event_id: UUID
    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: str | None
    payload_data: bytes | None
    payload_encoding: str | None
    headers: str
    ordering_key: str | None
    position: int
    idempotency_key: str
    attempts: int
    max_attempts: int
    crashes: int
    created_at: datetime
    destination: str
    lease_token: UUID
    lease_owner: str

    @property
    def keyed(self) -> bool:
        """True if the event was emitted with an idempotency key of its own."""
        return self.idempotency_key != str(self.event_id)

    @property
    def suspect(self) -> bool:
        """True if relays died twice while they held this row, so that it was claimed alone."""
        return self.crashes > 1

    @property
    def exhausted(self) -> bool:
        """True if the row was claimed only to be failed: its relay died in every attempt."""
        return self.attempts > self.max_attempts


def beside(event_id: UUID, number: int) -> UUID:
    """Return the id of an event's row number ``number``: an event's rows are adjacent in the primary key."""
    # Wrap around: any UUID may have been emitted or written by hand, even the greatest.
    return UUID(int=(event_id.int + number) % 2**128)
