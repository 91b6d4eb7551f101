"""The rows of a store in a dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from relaybox.core import ordering
from relaybox.core.event import Delivery, Status
from relaybox.core.ordering import Candidate
from relaybox.core.outcome import Delivered, Failed, Outcome, Released, Retried, wait
from relaybox.database.dialects import POSTGRESQL
from relaybox.stores.sql.outcomes import storable
from relaybox.stores.store import DeadLetter, OnFailed, Want


@dataclass(slots=True)
class Row:
    """A delivery's row; ``values`` holds what ``emit`` wrote, in the order of ``INSERTED``."""

    values: tuple[Any, ...]
    position: int
    created_at: float
    next_attempt_at: float | None
    status: Status = Status.PENDING
    attempts: int = 0
    crashes: int = 0
    leased_until: float | None = None
    lease_token: UUID | None = None
    lease_owner: str | None = None
    error_message: str | None = None
    alone: bool = False
    """True if the death of the relay that holds the row counts."""

    @property
    def id(self) -> UUID:
        """Return the primary key."""
        return UUID(self.values[0])

    @property
    def destination(self) -> str:
        """Return the destination's name."""
        return str(self.values[2])

    @property
    def key(self) -> str | None:
        """Return the ordering key."""
        return self.values[10]  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """Return the bytes of payload and headers."""
        payload, payload_data, _, headers = self.values[6:10]
        return len(payload.encode() if payload_data is None else payload_data) + len(headers.encode())

    @property
    def suspect(self) -> int:
        """Return how many relays died with this row since it was last settled; 0 if fewer than two."""
        deaths = self.crashes + (self.lease_token is not None)
        return deaths if deaths > 1 else 0

    def leased(self, now: float) -> bool:
        """True if a relay holds the row."""
        return self.leased_until is not None and self.leased_until > now

    def free(self, now: float) -> bool:
        """True if the row can be leased, as far as its key allows."""
        time_has_come = self.next_attempt_at is None or self.next_attempt_at <= now
        return self.status is Status.PENDING and time_has_come and not self.leased(now)

    def delivery(self) -> Delivery:
        """Return the row as a delivery."""
        id_, event_id, destination, *emitted, idempotency_key, max_attempts, _ = self.values
        counts = (self.attempts, max_attempts, self.crashes)
        created_at = datetime.fromtimestamp(self.created_at, UTC)
        values: list[Any] = [UUID(id_), UUID(event_id), *emitted, self.position, idempotency_key, *counts]
        values += [created_at, destination, self.lease_token, self.lease_owner]
        return Delivery(*values)

    def candidate(self, want: Want, now: float) -> Candidate:
        """Return the row as the ordering rules see it."""
        free = self.free(now) and (want.suspects or not self.suspect)
        return Candidate(self.id, self.key, self.position, free, self.suspect)

    def lease(self, token: UUID, want: Want, now: float) -> None:
        """Lease the row for a claim."""
        died = self.lease_token is not None
        self.attempts += 0 if died and not self.alone else 1
        self.crashes += died
        self.alone = False
        self.leased_until, self.lease_token, self.lease_owner = now + want.lease, token, want.owner

    def settle(self, outcome: Outcome, now: float) -> None:
        """End the lease with an outcome."""
        self.leased_until = self.lease_token = self.lease_owner = None
        match outcome:
            case Delivered():
                self.status, self.next_attempt_at = Status.DELIVERED, None
            case Retried(after, error, counts, cut_off):
                self.next_attempt_at, self.error_message = now + wait(after), error
                self.crashes = self.crashes + 1 if cut_off else 0
                self.attempts -= not counts
            case Failed(error, counts):
                self.status, self.next_attempt_at, self.error_message = Status.FAILED, None, error
                self.attempts -= not counts
            case Released():
                self.attempts -= 1

    def copy(self, dead_letter: DeadLetter) -> tuple[Any, ...]:
        """Return the values of the row's dead letter."""
        _, event_id, came_from, *event, headers, key, idempotency_key, _, _ = self.values
        own: dict[str, Any] = msgspec.json.decode(headers, type=dict[str, msgspec.Raw])
        own["relaybox-dead-letter-from"] = came_from
        own["relaybox-dead-letter-reason"] = storable(self.error_message or "")
        own_headers = msgspec.json.encode(own).decode()
        id_, key = POSTGRESQL.to_uuid(uuid7()), key if dead_letter.ordered else None
        last = (own_headers, key, idempotency_key, dead_letter.max_attempts, None)
        return (id_, event_id, dead_letter.destination, *event, *last)


class Rows(dict[UUID, Row]):
    """The rows by id, and what claims and settles look for in them."""

    def window(self, want: Want, now: float) -> list[Row]:
        """Return the due rows that a claim looks at."""
        due = [
            row
            for row in self.values()
            if row.destination == want.destination
            and row.next_attempt_at is not None
            and row.candidate(want, now).free
            and (want.only is None or row.id in want.only)
        ]
        due.sort(key=lambda row: (row.next_attempt_at, row.position))
        # Keys that must wait must not fill the window of chosen rows.
        return due if want.ordered and want.only is not None else due[: want.limit]

    def choose(self, want: Want, window: Sequence[Row], now: float) -> ordering.Choice:
        """Return what an ordered claim takes and parks."""
        by_key = {row.key: self._open(want.destination, row.key, want.on_failed) for row in window}
        heads = {key: rows[0].candidate(want, now) for key, rows in by_key.items()}
        heads.pop(None, None)
        only = want.only
        free = [head for head in heads.values() if head.free and (only is None or head.id in only)]
        rows = (row.candidate(want, now) for rows in by_key.values() for row in rows)
        runs = ordering.runs(free, rows, only, want.run)
        candidates = [row.candidate(want, now) for row in window]
        sizes = {row.id: row.size for of_key in by_key.values() for row in of_key}
        return ordering.choose(candidates, heads, runs, sizes, want.limit, want.bytes)

    def make_head_due(self, delivery: Delivery, on_failed: OnFailed, now: float) -> None:
        """Make the next row of the delivery's key due, if it is parked."""
        if delivery.ordering_key is None:
            return
        rows = self._open(delivery.destination, delivery.ordering_key, on_failed)
        if rows and rows[0].status is Status.PENDING and rows[0].next_attempt_at is None:
            rows[0].next_attempt_at = min(rows[0].created_at, now)

    def held(self, delivery: Delivery) -> Row | None:
        """Return the row if the delivery's lease still holds it."""
        row = self.get(delivery.id)
        return row if row is not None and row.lease_token == delivery.lease_token else None

    def _open(self, destination: str, key: str | None, on_failed: OnFailed) -> list[Row]:
        blocking = {Status.PENDING, Status.FAILED} if on_failed == "block" else {Status.PENDING}
        rows = self.values()
        mine = (row for row in rows if row.destination == destination and row.key == key)
        return sorted((row for row in mine if row.status in blocking), key=lambda row: row.position)
