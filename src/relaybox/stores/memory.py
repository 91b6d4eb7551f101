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

from relaybox.core import ordering
from relaybox.core.event import Delivery
from relaybox.core.ordering import Candidate
from relaybox.core.outcome import Delivered, Released, wait
from relaybox.database.dialects import POSTGRESQL, Dialect
from relaybox.stores.memory_rows import Row, Rows
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
