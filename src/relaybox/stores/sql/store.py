"""The store of every SQL database: the steps, driven on an asynchronous connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Protocol, TypeVar
from uuid import UUID

from relaybox.core.event import Delivery
from relaybox.core.outcome import Released, wait
from relaybox.database.steps import Steps
from relaybox.errors import Locked, RowsLocked
from relaybox.stores.sql.destinations import DestinationSteps
from relaybox.stores.sql.steps import Settled, StoreSteps
from relaybox.stores.store import Claim, DeadLetter, OnFailed, Settlement, Want

T = TypeVar("T")

UPKEEP = "(upkeep)"
"""The lane of what a relay does beside delivering."""
ROWS_PER_SETTLE = 1000
"""With the longest errors these stay below the 16 MiB that MariaDB takes in one statement."""


class Driver(Protocol):
    """Runs steps on a database; the only part of a store that knows a driver."""

    async def run(self, begin: Callable[[], Steps[T]], *, checked: bool = False, lane: str = "") -> T:
        """Drive the steps to their end; ``begin`` is called again for another try after a deadlock.

        Raise ``Locked`` where another session holds a lock for long and the steps do not go on without it.
        That a ``lane`` waits for one does not keep the others from their connections.

        Where a row that somebody edited breaks a constraint, and the database can, they are driven once more
        without constraints, unless they are to be ``checked`` in any case: they write new rows.
        """
        ...

    async def close(self) -> None:
        """Give up every connection."""
        ...


class SqlStore:
    """A ``Store`` (see there) on whatever database its driver talks to.

    ``vital`` is a driver with a connection of its own for what must not wait for claims and settles: lease
    extensions, and the heartbeats of ``SqlUpkeep``. Without it they use ``driver`` too.
    """

    def __init__(self, steps: StoreSteps, driver: Driver, vital: Driver | None = None) -> None:
        self.steps = steps
        self.driver = driver
        self.vital = driver if vital is None else vital
        self._extending = asyncio.Lock()
        self._destinations = DestinationSteps(steps.statements)

    async def claim(self, want: Want) -> Claim:
        """Lease due rows."""
        return await self.driver.run(lambda: self.steps.claim(want), lane=want.destination)

    async def settle(
        self,
        settlements: Sequence[Settlement],
        *,
        on_failed: OnFailed = "block",
        dead_letter: DeadLetter | None = None,
        made_due: Callable[[], None] | None = None,
        wait: bool = True,
    ) -> frozenset[UUID]:
        """Write the outcomes; the ids whose lease was lost come back."""
        lost = left = frozenset[UUID]()
        due = False
        for start in range(0, len(settlements), ROWS_PER_SETTLE):
            part = settlements[start : start + ROWS_PER_SETTLE]
            settled = await self._settle(part, on_failed, dead_letter, wait)
            lost |= settled.lost
            left |= settled.left
            due |= settled.due
        if due and made_due is not None:
            made_due()
        if left:
            raise RowsLocked(left, lost)
        return lost

    async def _settle(
        self,
        settlements: Sequence[Settlement],
        on_failed: OnFailed,
        dead_letter: DeadLetter | None,
        wait: bool,
    ) -> Settled:
        """All of them at once; if that meets a lock, those that nobody has locked."""
        run = partial(self.driver.run, lane=settlements[0].delivery.destination)
        if wait:
            with suppress(Locked):
                return await run(partial(self.steps.settle, settlements, on_failed, dead_letter))
        return await run(partial(self.steps.settle_free, settlements, on_failed, dead_letter))

    async def extend(self, deliveries: Sequence[Delivery], lease: float) -> frozenset[UUID]:
        """Hold the leases for ``lease`` seconds from now; the ids whose lease was lost come back."""
        if not deliveries:
            return frozenset()
        # One at a time: then a heartbeat waits for one of them at most.
        async with self._extending:
            extended = await self.vital.run(lambda: self.steps.extend(deliveries, lease))
        if extended.left:
            raise RowsLocked(extended.left, extended.lost)
        return extended.lost

    async def hold_alone(self, delivery: Delivery, alone: bool) -> None:
        """Have the death of the relay that holds this row count, or no longer."""
        await self.driver.run(partial(self.steps.hold_alone, delivery, alone), lane=delivery.destination)

    async def release(
        self, deliveries: Sequence[Delivery], *, on_failed: OnFailed = "block"
    ) -> frozenset[UUID]:
        """Give untried rows back; the ids whose lease was lost come back."""
        settlements = [Settlement(delivery, Released()) for delivery in deliveries]
        return await self.settle(settlements, on_failed=on_failed)

    async def open_circuit(
        self, destination: str, seconds: float, reason: str, *, probed: bool = False
    ) -> bool:
        """Open a closed circuit (``probed``: a half-open one) for so long; whether this call did it."""
        steps = partial(self._destinations.open_circuit, destination, seconds, reason, probed=probed)
        return await self.driver.run(steps, lane=destination)

    async def probe(self, destination: str, seconds: float) -> bool:
        """Make a circuit whose time is over half-open; whether this call did it."""
        steps = partial(self._destinations.probe, destination, seconds)
        return await self.driver.run(steps, lane=destination)

    async def close_circuit(self, destination: str) -> bool:
        """Close a half-open circuit; whether this call did it."""
        return await self.driver.run(partial(self._destinations.close_circuit, destination), lane=destination)

    async def pause(self, destination: str, by: str, reason: str) -> bool:
        """Pause until somebody resumes it; whether this call did it."""
        steps = partial(self._destinations.pause, destination, by, reason)
        return await self.driver.run(steps, lane=destination)

    async def reserve(self, destination: str, count: int, rate: float) -> float:
        """Take the next ``count`` places in the line; in how many seconds the first of them comes."""
        steps = partial(self._destinations.reserve, destination, wait(count / rate))
        return await self.driver.run(steps, lane=destination)

    async def now(self) -> datetime:
        """The time by the database's clock."""
        return await self.driver.run(self.steps.now)

    async def close(self) -> None:
        """Give up every connection. Leases are left to run out."""
        await self.driver.close()
        if self.vital is not self.driver:
            await self.vital.close()
