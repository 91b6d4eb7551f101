"""The suspects that a relay has in flight, and whose death counts.

A suspect may be what kills the process, or may only have been in flight when something else did. Suspects of
a lane are sent in groups, apart from all others: a group half as large with each death, until one is alone.
Lanes do so side by side, so that none of them waits for another's destination.

A death counts towards ``max_attempts`` only where one suspect alone was in flight in the whole process. The
database has to know that before the send begins (``Store.hold_alone``), and no longer when a second suspect
is sent: the one that enters then waits a moment for the first, which mostly has its answer by then, and else
takes the mark from it. So a slow innocent is never blamed for the killer of another lane.

The killer is blamed in the end, also where other lanes have suspects in flight at each death. Lanes enter in
another order in each life of the process, so of n lanes with suspects the killer's is the first in one life
of n on average. It then has the moment for itself; one that takes longer to kill gets twice as long with each
further death, up to ``LONGEST``. So a killer is failed after 6 + n * max_attempts deaths or so, and
nobody ever waits for longer than ``LONGEST``.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from relaybox.core.clock import Clock
from relaybox.core.event import Delivery
from relaybox.errors import Locked, StoreError
from relaybox.relay.batch import Batch
from relaybox.relay.observer import Observer
from relaybox.stores.store import Store

APART = 0.25
"""Seconds over which lanes come apart that begin to look at their suspects."""
PATIENCE = 0.5
"""Seconds that a suspect has to itself, before it shares the blame with the next one."""
DEATHS, LONGEST = 6, 32.0
"""After so many deaths it has twice as long with each one, but never longer than this."""


class Quarantine:
    """Lets the suspects of all lanes in, and tells the database whose death counts."""

    def __init__(self, store: Store, clock: Clock, observer: Observer) -> None:
        self._store = store
        self._clock = clock
        self._observer = observer
        self._door = asyncio.Lock()
        """Held while the database is asked, and for a moment; never while a destination is called."""
        self._inside: list[Batch] = []
        self._alone: Batch | None = None
        self._lanes: set[str] = set()

    async def enter(self, batch: Batch) -> None:
        """Return when these suspects may be sent."""
        first = batch.deliveries[0]
        if first.destination not in self._lanes:
            self._lanes.add(first.destination)
            await self._clock.sleep(APART * (first.lease_token.int % 1000) / 1000)
        async with self._door:
            await self._end_solitude()
            self._inside = [other for other in self._inside if not other.done.is_set()]
            if len(batch.deliveries) == 1 and not self._inside:
                # First: an error does not mean that the database knows nothing of it.
                self._alone = batch
                await self._hold(first, alone=True)
            self._inside.append(batch)

    async def _end_solitude(self) -> None:
        alone = self._alone
        if alone is None:
            return
        delivery = alone.deliveries[0]
        with suppress(TimeoutError):
            async with asyncio.timeout(patience(delivery.crashes)):
                await alone.done.wait()
        # Also where its lane has failed and left it to its lease.
        while alone.unsettled and not await self._hold(delivery, alone=False):
            await self._clock.sleep(PATIENCE)
        self._alone = None

    async def _hold(self, delivery: Delivery, *, alone: bool) -> bool:
        """False: the database cannot be asked now."""
        try:
            await self._store.hold_alone(delivery, alone)
        except StoreError as error:
            self._observer.trouble(delivery.destination, "hold alone", error)
            # What a stranger does to one row is not to hold up the others.
            return isinstance(error, Locked)
        return True


def patience(deaths: int) -> float:
    """Seconds that a suspect which died so often has to itself."""
    return min(PATIENCE * 2.0 ** min(max(deaths - DEATHS, 0), DEATHS), LONGEST)
