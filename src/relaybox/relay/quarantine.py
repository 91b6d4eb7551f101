"""Decide which suspects may be in flight together, and for which one the death of the process counts.

A suspect was in flight when the process died. It may have killed the process, or something else did. A lane
sends its suspects in groups, apart from all other deliveries. With each death the group is half as large,
until a suspect is alone. Lanes do so side by side, so that no lane waits for another's destination.

A death counts towards ``max_attempts`` only if one suspect alone was in flight in the whole process. The
database has to know that before the send begins (``Store.hold_alone``), and must forget it before a second
suspect is sent. Decision 13 explains why a killer is blamed in the end, and how long a suspect waits.
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
"""Seconds over which the lanes spread the start of their first suspects."""
PATIENCE = 0.5
"""Seconds that a suspect is alone in flight before the next one may enter."""
DEATHS, LONGEST = 6, 32.0
"""After ``DEATHS`` deaths, each further one doubles that time, up to ``LONGEST`` seconds."""


class Quarantine:
    """Lets the suspects of all lanes enter, and marks the one for which a death counts in the database."""

    def __init__(self, store: Store, clock: Clock, observer: Observer) -> None:
        self._store = store
        self._clock = clock
        self._observer = observer
        self._door = asyncio.Lock()
        """Held while the database is asked and while a suspect has its time alone; never for a whole send."""
        self._inside: list[Batch] = []
        self._alone: Batch | None = None
        self._lanes: set[str] = set()

    async def enter(self, batch: Batch) -> None:
        """Wait until these suspects may be sent."""
        first = batch.deliveries[0]
        if first.destination not in self._lanes:
            self._lanes.add(first.destination)
            await self._clock.sleep(APART * (first.lease_token.int % 1000) / 1000)
        async with self._door:
            await self._end_solitude()
            self._inside = [other for other in self._inside if not other.done.is_set()]
            if len(batch.deliveries) == 1 and not self._inside:
                # Before the call: the database may have stored the mark even if the call fails.
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
        # Also if its lane has failed and the lease runs out.
        while alone.unsettled and not await self._hold(delivery, alone=False):
            await self._clock.sleep(PATIENCE)
        self._alone = None

    async def _hold(self, delivery: Delivery, *, alone: bool) -> bool:
        """Set or remove the mark; False if the database is away."""
        try:
            await self._store.hold_alone(delivery, alone)
        except StoreError as error:
            self._observer.trouble(delivery.destination, "hold alone", error)
            # A row that another session has locked must not hold up the other suspects.
            return isinstance(error, Locked)
        return True


def patience(deaths: int) -> float:
    """Return the seconds that a suspect is alone in flight after so many deaths."""
    return min(PATIENCE * 2.0 ** min(max(deaths - DEATHS, 0), DEATHS), LONGEST)
