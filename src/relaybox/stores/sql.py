"""The store of every SQL database: the steps, driven on an asynchronous connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar
from uuid import UUID

from relaybox.event import Delivery
from relaybox.outcome import Released
from relaybox.store import Claim, OnFailed, Settlement, Want
from relaybox.stores.steps import Steps, StoreSteps

T = TypeVar("T")

ROWS_PER_SETTLE = 1000
"""With the longest errors these stay below the 16 MiB that MariaDB takes in one statement."""


class Driver(Protocol):
    """Runs steps on a database; the only part of a store that knows a driver."""

    async def run(self, begin: Callable[[], Steps[T]]) -> T:
        """Drive the steps to their end; ``begin`` is called again for another try after a deadlock."""
        ...

    async def close(self) -> None:
        """Give up every connection."""
        ...


class SqlStore:
    """A ``Store`` (see there) on whatever database its driver talks to."""

    def __init__(self, steps: StoreSteps, driver: Driver) -> None:
        self._steps = steps
        self._driver = driver

    async def claim(self, want: Want) -> Claim:
        """Lease due rows."""
        return await self._driver.run(lambda: self._steps.claim(want))

    async def settle(
        self, settlements: Sequence[Settlement], *, on_failed: OnFailed = "block"
    ) -> frozenset[UUID]:
        """Write the outcomes; the ids whose lease was lost come back."""
        lost: set[UUID] = set()
        for start in range(0, len(settlements), ROWS_PER_SETTLE):
            part = settlements[start : start + ROWS_PER_SETTLE]
            lost |= await self._driver.run(partial(self._steps.settle, part, on_failed))
        return frozenset(lost)

    async def extend(self, deliveries: Sequence[Delivery], lease: float) -> frozenset[UUID]:
        """Hold the leases for ``lease`` seconds from now; the ids whose lease was lost come back."""
        if not deliveries:
            return frozenset()
        return await self._driver.run(lambda: self._steps.extend(deliveries, lease))

    async def release(
        self, deliveries: Sequence[Delivery], *, on_failed: OnFailed = "block"
    ) -> frozenset[UUID]:
        """Give untried rows back; the ids whose lease was lost come back."""
        settlements = [Settlement(delivery, Released()) for delivery in deliveries]
        return await self.settle(settlements, on_failed=on_failed)

    async def close(self) -> None:
        """Give up every connection. Leases are left to run out."""
        await self._driver.close()
