"""The values that travel: an event, its delivery to one destination, and what ``emit`` answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from msgspec import Struct

TEST_TYPE = "relaybox.test"
"""The event type of what proves a path. Nobody misses one that failed: it is no dead letter."""


class Status(StrEnum):
    """What is stored of a delivery's life. ``sending`` is not: it is ``pending`` with a live lease."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"
    DISCARDED = "discarded"


class Event(Struct, frozen=True, gc=False):
    """What the application emitted, as a handler sees it."""

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
    """What ``emit`` answers. A duplicate carries the first event's id and wrote nothing."""

    event_id: UUID
    duplicate: bool
    destinations: tuple[str, ...]


class Delivery(Struct, frozen=True, gc=False):
    """One event for one destination, as claimed: a row of ``outbox_event`` and the lease on it.

    ``payload`` and ``headers`` are the stored JSON text, decoded by whoever needs them.
    """

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
        """Whether it was emitted with an idempotency key of its own."""
        return self.idempotency_key != str(self.event_id)

    @property
    def suspect(self) -> bool:
        """Whether relays died twice while they held this row, so that it was claimed alone."""
        return self.crashes > 1

    @property
    def exhausted(self) -> bool:
        """Whether it was claimed once more only to be failed: its relay died in every attempt it had."""
        return self.attempts > self.max_attempts


def beside(event_id: UUID, number: int) -> UUID:
    """Return the id of an event's row of that number: all its rows lie together in the primary key."""
    # Any UUID may have been emitted or written by hand, the greatest of them too.
    return UUID(int=(event_id.int + number) % 2**128)
