"""The last step: outcomes are written, all that gathered since the last time in one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from relaybox.config import Destination
from relaybox.errors import StoreError
from relaybox.event import Delivery
from relaybox.observe import Observer
from relaybox.relay.clock import Clock
from relaybox.store import DeadLetter, Settlement, Store


class Settler:
    """Writes what became of one destination's deliveries."""

    def __init__(
        self,
        destination: Destination,
        store: Store,
        observer: Observer,
        clock: Clock,
        dead_letter: DeadLetter | None,
        settled: Callable[[Sequence[Delivery]], None],
    ) -> None:
        self._destination = destination
        self._store = store
        self._observer = observer
        self._clock = clock
        self._dead_letter = dead_letter
        self._settled = settled
        self._waiting: list[Settlement] = []
        self._news = asyncio.Event()

    def add(self, settlement: Settlement) -> None:
        """Settle this with the next statement."""
        self._waiting.append(settlement)
        self._news.set()

    async def run(self) -> None:
        """Settle whatever is added, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            settlements, self._waiting = self._waiting, []
            await self._settle(settlements)
            self._settled([delivery for delivery, _ in settlements])

    async def _settle(self, settlements: Sequence[Settlement]) -> None:
        """Until the database takes it: what was delivered must not be delivered again."""
        destination = self._destination
        while True:
            try:
                lost = await self._store.settle(
                    settlements,
                    on_failed=destination.on_failed or "skip",
                    dead_letter=self._dead_letter,
                )
            except StoreError as error:
                self._observer.trouble(destination.name, "settle", error)
                await self._clock.sleep(2 * destination.poll_interval)
            else:
                self._observer.settled(destination.name, settlements, lost)
                return
