"""The store of every SQL database: the steps, driven on an asynchronous connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Protocol, TypeVar
from uuid import UUID

from relaybox.event import Delivery
from relaybox.outcome import Released, wait
from relaybox.store import Claim, DeadLetter, OnFailed, Settlement, Want
from relaybox.stores.destinations import DestinationSteps
from relaybox.stores.steps import Steps, StoreSteps

T = TypeVar("T")

ROWS_PER_SETTLE = 1000
"""With the longest errors these stay below the 16 MiB that MariaDB takes in one statement."""


class Driver(Protocol):
    """Runs steps on a database; the only part of a store that knows a driver."""

    async def run(self, begin: Callable[[], Steps[T]], *, checked: bool = False) -> T:
        """Drive the steps to their end; ``begin`` is called again for another try after a deadlock.

        Where a row that somebody edited breaks a constraint, and the database can, they are driven once more
        without constraints, unless they are to be ``checked`` in any case: they write new rows.
        """
        ...

    async def close(self) -> None:
        """Give up every connection."""
        ...


class SqlStore:
    """A ``Store`` (see there) on whatever database its driver talks to."""

    def __init__(self, steps: StoreSteps, driver: Driver) -> None:
        self.steps = steps
        self.driver = driver
        self._destinations = DestinationSteps(steps.statements)

    async def claim(self, want: Want) -> Claim:
        """Lease due rows."""
        return await self.driver.run(lambda: self.steps.claim(want))

    async def settle(
        self,
        settlements: Sequence[Settlement],
        *,
        on_failed: OnFailed = "block",
        dead_letter: DeadLetter | None = None,
        made_due: Callable[[], None] | None = None,
    ) -> frozenset[UUID]:
        """Write the outcomes; the ids whose lease was lost come back."""
        lost: frozenset[UUID] = frozenset()
        due = False
        for start in range(0, len(settlements), ROWS_PER_SETTLE):
            part = settlements[start : start + ROWS_PER_SETTLE]
            settled = await self.driver.run(partial(self.steps.settle, part, on_failed, dead_letter))
            lost |= settled.lost
            due |= settled.due
        if due and made_due is not None:
            made_due()
        return lost

    async def extend(self, deliveries: Sequence[Delivery], lease: float) -> frozenset[UUID]:
        """Hold the leases for ``lease`` seconds from now; the ids whose lease was lost come back."""
        if not deliveries:
            return frozenset()
        return await self.driver.run(lambda: self.steps.extend(deliveries, lease))

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
        return await self.driver.run(steps)

    async def probe(self, destination: str, seconds: float) -> bool:
        """Make a circuit whose time is over half-open; whether this call did it."""
        return await self.driver.run(partial(self._destinations.probe, destination, seconds))

    async def close_circuit(self, destination: str) -> bool:
        """Close a half-open circuit; whether this call did it."""
        return await self.driver.run(partial(self._destinations.close_circuit, destination))

    async def pause(self, destination: str, by: str, reason: str) -> bool:
        """Pause until somebody resumes it; whether this call did it."""
        return await self.driver.run(partial(self._destinations.pause, destination, by, reason))

    async def reserve(self, destination: str, count: int, rate: float) -> float:
        """Take the next ``count`` places in the line; in how many seconds the first of them comes."""
        return await self.driver.run(partial(self._destinations.reserve, destination, wait(count / rate)))

    async def now(self) -> datetime:
        """The time by the database's clock."""
        return await self.driver.run(self.steps.now)

    async def close(self) -> None:
        """Give up every connection. Leases are left to run out."""
        await self.driver.close()
