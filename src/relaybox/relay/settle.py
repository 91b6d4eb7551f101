"""The last step: outcomes are written, all that gathered since the last time in one statement."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from relaybox.config import Destination
from relaybox.crashpoint import reached
from relaybox.errors import StoreError
from relaybox.event import Delivery
from relaybox.outcome import Retried, wait
from relaybox.relay.shared import Shared
from relaybox.store import DeadLetter, Settlement

GAP, GAP_WHERE_ORDERED = 0.05, 0.02
"""Seconds between the beginnings of two settles, unless there is enough for the next one. Where events are
ordered, the next of a key waits for the settle."""
ENOUGH = 500


class Settler:
    """Writes what became of one destination's deliveries."""

    def __init__(
        self,
        destination: Destination,
        shared: Shared,
        dead_letter: DeadLetter | None,
        settled: Callable[[Sequence[Delivery]], None],
        made_due: Callable[[], None],
    ) -> None:
        self._destination = destination
        self._store = shared.store
        self._observer = shared.observer
        self._clock = shared.clock
        self._pause = partial(shared.pause, destination.poll_interval)
        self._dead_letter = dead_letter
        self._settled = settled
        self._made_due = made_due
        self._waiting: list[Settlement] = []
        self._news = asyncio.Event()
        self._enough = asyncio.Event()
        self._gap = GAP_WHERE_ORDERED if destination.ordered else GAP
        self._began = -math.inf
        self.in_trouble = False
        """Whether the database has not taken the last outcomes yet: a claim might get the same rows again."""

    def add(self, settlement: Settlement) -> None:
        """Settle this with the next statement."""
        self._waiting.append(settlement)
        count = len(self._waiting)
        if count == 1:
            self._news.set()
        # A suspect is in flight alone, and the next one waits for it.
        if count >= ENOUGH or settlement.delivery.crashes > 1:
            self._enough.set()

    async def run(self) -> None:
        """Settle whatever is added, for ever."""
        while True:
            await self._news.wait()
            await self._gather()
            self._news.clear()
            self._enough.clear()
            self._began = self._clock.now()
            settlements, self._waiting = self._waiting, []
            reached("settle")
            await self._settle(settlements)
            reached("settled")
            self._settled([delivery for delivery, _ in settlements])

    async def _gather(self) -> None:
        """Right after the last settle, let some more come: many small statements are the dearest."""
        left = self._began + self._gap - self._clock.now()
        if left > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._enough.wait()

    async def _settle(self, settlements: Sequence[Settlement]) -> None:
        """Until the database takes it: what was delivered must not be delivered again."""
        destination = self._destination
        while True:
            try:
                lost = await self._store.settle(
                    settlements,
                    on_failed=destination.on_failed or "skip",
                    dead_letter=self._dead_letter,
                    made_due=self._made_due,
                )
            except StoreError as error:
                self.in_trouble = True
                self._observer.trouble(destination.name, "settle", error)
                await self._clock.sleep(self._pause())
            else:
                if self.in_trouble or self._has_short_waits(settlements):
                    self._made_due()
                self.in_trouble = False
                self._observer.settled(destination.name, settlements, lost)
                return

    def _has_short_waits(self, settlements: Sequence[Settlement]) -> bool:
        """Whether a key is to be tried again sooner than the lane would look by itself."""
        if self._destination.ordered:
            for _, outcome in settlements:
                # Without a call: this is asked for every event.
                if outcome.__class__ is Retried and wait(outcome.after) < self._destination.poll_interval:
                    return True
        return False
