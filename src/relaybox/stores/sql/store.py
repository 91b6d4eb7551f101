"""The store of any SQL database: steps, driven on asynchronous connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from uuid import UUID

from relaybox.core.event import Delivery
from relaybox.core.outcome import Released, wait
from relaybox.database.statements.delivery import Statements
from relaybox.database.statements.destination import texts
from relaybox.database.steps import Steps
from relaybox.errors import Locked, RowsLocked
from relaybox.stores.sql.outcomes import storable
from relaybox.stores.sql.steps import Settled, StoreSteps
from relaybox.stores.store import Claim, DeadLetter, OnFailed, Settlement, Want

T = TypeVar("T")
P = ParamSpec("P")
Own = TypeVar("Own", bound="Topic")

ROWS_PER_SETTLE = 1000
"""Even with the longest errors, a settle stays below MariaDB's 16 MiB per statement."""


class Driver(Protocol):
    """Runs steps on a database; the only part of a store that knows the driver."""

    async def run(self, begin: Callable[[], Steps[T]], *, checked: bool = False, lane: str = "") -> T:
        """Drive the steps to their end; call ``begin`` again to retry after a deadlock.

        Raise ``Locked`` if another session holds a lock for too long and the steps do not handle it. A
        waiting ``lane`` leaves connections to the others. If a row edited by hand violates a constraint, run
        again without constraints, unless new rows must be ``checked``.
        """
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class Topic:
    """The statements of one topic, and the driver and ``lane`` that execute them."""

    def __init__(self, driver: Driver, sql: Statements, lane: str = "") -> None:
        self.sql = sql
        self.dialect = sql.dialect
        self._driver = driver
        self._lane = lane

    async def run(self, begin: Callable[[], Steps[T]], **options: Any) -> T:
        """Drive the steps, with the options of ``Driver.run``."""
        return await self._driver.run(begin, lane=self._lane, **options)


def driven(
    steps: Callable[Concatenate[Own, P], Steps[T]],
) -> Callable[Concatenate[Own, P], Coroutine[Any, Any, T]]:
    """Make a method that yields statements one that is awaited, and runs them on its topic's driver."""

    @wraps(steps)
    async def drive(self: Own, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(lambda: steps(self, *args, **kwargs))

    return drive


def walk_names(sql: Statements, *names: str) -> Steps[list[Any]]:
    """Return the destinations that these statements find, stepping from name to name."""
    found: dict[Any, None] = {}
    reached: dict[str, Any] = dict.fromkeys(names, "")
    while reached:
        results = yield [sql(name, after=last) for name, last in reached.items()]
        reached = {name: rows[0][0] for name, rows in zip(reached, results, strict=True) if rows}
        found |= dict.fromkeys(reached.values())
    return list(found)


class DestinationSteps:
    """Changes a destination's pause, circuit and rate limit by compare-and-set: one relay of several wins.

    ``rate_at`` is the time of the next free slot.
    """

    def __init__(self, statements: Statements) -> None:
        self._dialect = statements.dialect
        self._ensure = partial(statements, "ensure_destination")
        self._lock = partial(statements, "lock_destination")
        self._sql = statements.others(texts(self._dialect.name))

    def change(self, name: str, destination: str, *, make: bool = False, **values: Any) -> Steps[bool]:
        """Execute the named UPDATE; with ``make``, create a missing row first."""
        queries = [self._ensure(destination=destination)] if make else []
        queries.append(self._sql(name, destination=destination, **values))
        if not self._dialect.returning:
            queries.append(self._sql("changed"))
        results = yield queries
        return bool(results[-1] and results[-1][0][0])

    def reserve(self, destination: str, seconds: float) -> Steps[float]:
        """Reserve ``seconds`` of the line; return the seconds until they begin."""
        if self._dialect.one_statement:
            [[[left]]] = yield [self._sql("reserve", destination=destination, seconds=seconds)]
            return max(0.0, float(left) - seconds)
        # A separate lock statement, because MySQL's clock stands still while a statement waits.
        read = self._sql("read_line", destination=destination)
        _, rows = yield [self._lock(destination=destination), read]
        if not rows:
            _, rows = yield [self._ensure(destination=destination), read]
        # SQLite computes in milliseconds, which is too coarse for a line.
        free, now = (value and self._dialect.from_time(value) for value in rows[0])
        start = max(free or now, now)
        at = self._dialect.to_time(start + timedelta(seconds=seconds))
        yield [self._sql("move_line", destination=destination, at=at)]
        return float((start - now).total_seconds())


class SqlStore:
    """A ``Store`` on the database of its driver.

    ``vital`` has its own connection for lease extensions and heartbeats, which must not wait for claims.
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
        """Write the outcomes; return the ids of lost leases."""
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
        """Settle all rows at once; after a lock timeout only those that are not locked."""
        run = partial(self.driver.run, lane=settlements[0].delivery.destination)
        if wait:
            with suppress(Locked):
                return await run(partial(self.steps.settle, settlements, on_failed, dead_letter))
        return await run(partial(self.steps.settle_free, settlements, on_failed, dead_letter))

    async def extend(self, deliveries: Sequence[Delivery], lease: float) -> frozenset[UUID]:
        """Extend the leases to ``lease`` seconds from now; return the ids of lost leases."""
        if not deliveries:
            return frozenset()
        # One at a time, so that a heartbeat waits for at most one of them.
        async with self._extending:
            extended = await self.vital.run(lambda: self.steps.extend(deliveries, lease))
        if extended.left:
            raise RowsLocked(extended.left, extended.lost)
        return extended.lost

    async def hold_alone(self, delivery: Delivery, alone: bool) -> None:
        """Set whether the death of the relay that holds this row counts."""
        # Of no lane: the suspects of other destinations wait for it.
        await self.driver.run(partial(self.steps.hold_alone, delivery, alone))

    async def release(
        self, deliveries: Sequence[Delivery], *, on_failed: OnFailed = "block"
    ) -> frozenset[UUID]:
        """Release untried rows; return the ids of lost leases."""
        settlements = [Settlement(delivery, Released()) for delivery in deliveries]
        return await self.settle(settlements, on_failed=on_failed)

    async def open_circuit(
        self, destination: str, seconds: float, reason: str, *, probed: bool = False
    ) -> bool:
        """Open a closed circuit (if ``probed``, a half-open one); return whether this call did it."""
        values = {"seconds": wait(seconds), "reason": storable(reason)}
        state = "half_open" if probed else "closed"
        return await self._change("open", destination, make=True, state=state, **values)

    async def probe(self, destination: str, seconds: float) -> bool:
        """Half-open a circuit whose time is over; return whether this call did it."""
        return await self._change("probe", destination, seconds=wait(seconds))

    async def close_circuit(self, destination: str) -> bool:
        """Close a half-open circuit; return whether this call did it."""
        return await self._change("close", destination)

    async def pause(self, destination: str, by: str, reason: str) -> bool:
        """Pause until an operator resumes; return whether this call did it."""
        return await self._change("pause", destination, make=True, by=by, reason=storable(reason))

    async def _change(self, name: str, destination: str, **values: Any) -> bool:
        steps = partial(self._destinations.change, name, destination, **values)
        return await self.driver.run(steps, lane=destination)

    async def reserve(self, destination: str, count: int, rate: float) -> float:
        """Reserve the next ``count`` slots; return the seconds until the first."""
        steps = partial(self._destinations.reserve, destination, wait(count / rate))
        return await self.driver.run(steps, lane=destination)

    async def now(self) -> datetime:
        """Return the database's time."""
        return await self.driver.run(self.steps.now)

    async def close(self) -> None:
        """Close every connection; leases expire on their own."""
        await self.driver.close()
        if self.vital is not self.driver:
            await self.vital.close()
