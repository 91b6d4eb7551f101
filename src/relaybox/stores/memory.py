"""A store in a dictionary: the reference implementation, for tests and single processes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any, Literal
from uuid import UUID, uuid4

import msgspec
from uuid_utils.compat import uuid7

from relaybox.core import ordering
from relaybox.core.event import Delivery, Status
from relaybox.core.ordering import Candidate
from relaybox.core.outcome import Delivered, Failed, Outcome, Released, Retried, wait
from relaybox.database.dialects import POSTGRESQL, Dialect
from relaybox.stores.sql.outcomes import storable
from relaybox.stores.store import (
    Claim,
    DeadLetter,
    Held,
    OnFailed,
    Settlement,
    Want,
    bury,
    is_dead_letter,
    used_up,
)


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


@dataclass(slots=True)
class DestinationState:
    """What relays share of a destination, as a row of ``outbox_destination``."""

    paused_at: float | None = None
    paused_until: float | None = None
    paused_by: str | None = None
    pause_reason: str | None = None
    circuit: Literal["closed", "open", "half_open"] = "closed"
    circuit_until: float | None = None
    circuit_reason: str | None = None
    rate_at: float = 0.0

    def paused(self, now: float) -> bool:
        """True if the destination is paused now."""
        return self.paused_at is not None and (self.paused_until is None or self.paused_until > now)

    def held(self, now: float, *, probe: bool) -> Held | None:
        """Return what stops a claim, or None."""
        if self.paused(now):
            return Held("paused", _left(self.paused_until, now), self.pause_reason)
        if self.circuit != "closed" and not probe:
            return Held(self.circuit, _left(self.circuit_until, now), self.circuit_reason)
        return None


class MemoryStore:
    """A ``Store`` without a database; see ``stores/store.py``."""

    dialect: Dialect = POSTGRESQL

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._positions = count(1)
        self.rows = Rows()
        self.destinations: defaultdict[str, DestinationState] = defaultdict(DestinationState)

    def insert(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows as ``emit`` builds them for ``dialect``."""
        now = self._clock()
        for values in rows:
            due = now if values[-1] is None else values[-1].timestamp()
            row = Row(values, next(self._positions), now, due)
            self.rows[row.id] = row

    async def claim(self, want: Want) -> Claim:
        """Lease due rows."""
        now = self._clock()
        held = self.destinations[want.destination].held(now, probe=want.probe)
        if held is not None:
            return Claim(held=held)
        window = self.rows.window(want, now)
        choice = self.rows.choose(want, window, now) if want.ordered else _any(want, window)
        for id_ in choice.park:
            self.rows[id_].next_attempt_at = None
        token = uuid4()
        taken = [self.rows[id_] for id_ in choice.take]
        for row in taken:
            row.lease(token, want, now)
        deliveries = tuple(row.delivery() for row in sorted(taken, key=lambda row: row.position))
        if failed := used_up(deliveries):
            buried = [Settlement(delivery, bury(delivery)) for delivery in failed]
            await self.settle(buried, on_failed=want.on_failed, dead_letter=want.dead_letter)
            deliveries = tuple(delivery for delivery in deliveries if not delivery.exhausted)
        return Claim(deliveries, failed=failed, parked=len(choice.park))

    async def settle(
        self,
        settlements: Sequence[Settlement],
        *,
        on_failed: OnFailed = "block",
        dead_letter: DeadLetter | None = None,
        made_due: Callable[[], None] | None = None,
        wait: bool = True,
    ) -> frozenset[UUID]:
        """Write the outcomes; return the ids of lost leases."""
        now = self._clock()
        lost = set()
        failed: list[Row] = []
        unique = {(s.delivery.id, s.delivery.lease_token): s for s in settlements}
        for delivery, outcome in unique.values():
            row = self.rows.held(delivery)
            if row is None:
                lost.add(delivery.id)
                continue
            row.settle(outcome, now)
            if isinstance(outcome, Delivered) and not outcome.keep:
                del self.rows[row.id]
            failed += [row] if is_dead_letter(delivery, outcome) else []
        for delivery, _ in settlements:
            self.rows.make_head_due(delivery, on_failed, now)
        if dead_letter is not None:
            in_order = sorted(failed, key=lambda row: row.position)
            self.insert(row.copy(dead_letter) for row in in_order)
        if made_due is not None and any(delivery.ordering_key is not None for delivery, _ in settlements):
            made_due()
        return frozenset(lost)

    async def extend(self, deliveries: Sequence[Delivery], lease: float) -> frozenset[UUID]:
        """Extend the leases to ``lease`` seconds from now; return the ids of lost leases."""
        held = [row for delivery in deliveries if (row := self.rows.held(delivery)) is not None]
        for row in held:
            row.leased_until = self._clock() + lease
        return frozenset(delivery.id for delivery in deliveries) - {row.id for row in held}

    async def hold_alone(self, delivery: Delivery, alone: bool) -> None:
        """Set whether the death of the relay that holds this row counts."""
        if (row := self.rows.held(delivery)) is not None:
            row.alone = alone

    async def release(
        self, deliveries: Sequence[Delivery], *, on_failed: OnFailed = "block"
    ) -> frozenset[UUID]:
        """Release untried rows; return the ids of lost leases."""
        settlements = [Settlement(delivery, Released()) for delivery in deliveries]
        return await self.settle(settlements, on_failed=on_failed)

    async def now(self) -> datetime:
        """Return the time of the store's clock."""
        return datetime.fromtimestamp(self._clock(), UTC)

    async def open_circuit(
        self, destination: str, seconds: float, reason: str, *, probed: bool = False
    ) -> bool:
        """Open a closed circuit (if ``probed``, a half-open one); return whether this call did it."""
        state = self.destinations[destination]
        if state.circuit != ("half_open" if probed else "closed"):
            return False
        state.circuit, state.circuit_reason = "open", storable(reason)
        state.circuit_until = self._clock() + wait(seconds)
        return True

    async def probe(self, destination: str, seconds: float) -> bool:
        """Half-open a circuit whose time is over; return whether this call did it."""
        state, now = self.destinations[destination], self._clock()
        if state.circuit == "closed" or state.circuit_until is None or state.circuit_until > now:
            return False
        state.circuit, state.circuit_until = "half_open", now + wait(seconds)
        return True

    async def close_circuit(self, destination: str) -> bool:
        """Close a half-open circuit; return whether this call did it."""
        state = self.destinations[destination]
        if state.circuit != "half_open":
            return False
        state.circuit, state.circuit_until, state.circuit_reason = "closed", None, None
        return True

    async def pause(self, destination: str, by: str, reason: str) -> bool:
        """Pause until an operator resumes; return whether this call did it."""
        state, now = self.destinations[destination], self._clock()
        if state.paused(now):
            return False
        state.paused_at, state.paused_until = now, None
        state.paused_by, state.pause_reason = by, storable(reason)
        return True

    async def reserve(self, destination: str, count: int, rate: float) -> float:
        """Reserve the next ``count`` slots; return the seconds until the first."""
        state, now = self.destinations[destination], self._clock()
        start = max(state.rate_at, now)
        state.rate_at = start + wait(count / rate)
        return start - now

    async def close(self) -> None:
        """Do nothing: there is no connection."""


def _left(until: float | None, now: float) -> float | None:
    return None if until is None else max(0.0, until - now)


def _any(want: Want, window: Sequence[Row]) -> ordering.Choice:
    rows = [Candidate(row.id, row.key, row.position, True, row.suspect, row.size) for row in window]
    return ordering.Choice(ordering.unordered(rows, want.limit, want.bytes), [])
