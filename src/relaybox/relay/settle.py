"""The last step: outcomes are written, all that gathered since the last time in one statement."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Retried, wait
from relaybox.core.settings import Destination
from relaybox.errors import RowsLocked, StoreError
from relaybox.relay.crashpoint import reached
from relaybox.relay.shared import Shared
from relaybox.stores.store import DeadLetter, Settlement, bury

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
        self._locked: dict[int, Settlement] = {}
        """By position, what could not be settled because another session has locked it."""
        self._any_locked = asyncio.Event()

    @property
    def waits(self) -> bool:
        """Whether some outcomes cannot be written now."""
        return self.in_trouble or bool(self._locked)

    def known(self, delivery: Delivery) -> Delivered | Failed | None:
        """The outcome of a row that met a lock before: when it was to be failed, or, after it was delivered,
        when it was to be settled, until its lease ended.
        """
        if delivery.exhausted:
            return bury(delivery)
        known = self._locked.get(delivery.position)
        return known.outcome if known is not None and isinstance(known.outcome, Delivered) else None

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
        """Settle whatever is added, forever."""
        # A lane that failed has left what it could not write to the leases.
        self.in_trouble = False
        while True:
            await self._news.wait()
            await self._gather()
            self._news.clear()
            self._enough.clear()
            self._began = self._clock.now()
            settlements, self._waiting = self._waiting, []
            reached("settle")
            await self._settle(settlements)

    async def run_locked(self) -> None:
        """Settle what somebody had locked, once it is free. The others do not wait for it meanwhile."""
        while True:
            await self._any_locked.wait()
            await self._clock.sleep(self._pause())
            try:
                await self._write(list(self._locked.values()), wait=False)
            except StoreError as error:
                self._observer.trouble(self._destination.name, "settle", error)
            if not self._locked:
                self._any_locked.clear()

    async def _gather(self) -> None:
        """Right after the last settle, let some more come: many small statements are the dearest."""
        left = self._began + self._gap - self._clock.now()
        if left > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._enough.wait()

    async def _settle(self, settlements: Sequence[Settlement]) -> None:
        """Until the database takes it: what was delivered must not be delivered again."""
        while True:
            try:
                await self._write(settlements)
            except StoreError as error:
                self.in_trouble = True
                self._observer.trouble(self._destination.name, "settle", error)
                await self._clock.sleep(self._pause())
            else:
                if self.in_trouble or self._has_short_waits(settlements):
                    self._made_due()
                self.in_trouble = False
                return

    async def _write(self, settlements: Sequence[Settlement], *, wait: bool = True) -> None:
        """Write them, except what other sessions have locked: that is kept for later."""
        destination = self._destination
        try:
            lost = await self._store.settle(
                settlements,
                on_failed=destination.on_failed or "skip",
                dead_letter=self._dead_letter,
                made_due=self._made_due,
                wait=wait,
            )
        except RowsLocked as error:
            lost = error.lost
            if wait:
                self._observer.trouble(destination.name, "settle", error)
            locked = {s.delivery.position: s for s in settlements if s.delivery.id in error.rows}
            # What is tried again is older than what came to be locked meanwhile, under a later lease.
            self._locked = self._locked | locked if wait else locked | self._locked
            self._any_locked.set()
            settlements = [s for s in settlements if s.delivery.id not in error.rows]
        if not settlements:
            return
        reached("settled")
        self._observer.settled(destination.name, settlements, lost)
        if self._locked:
            for settlement in settlements:
                if self._locked.get(settlement.delivery.position) is settlement:
                    del self._locked[settlement.delivery.position]
        self._settled([delivery for delivery, _ in settlements])

    def _has_short_waits(self, settlements: Sequence[Settlement]) -> bool:
        """Whether a key is to be tried again sooner than the lane would look by itself."""
        if self._destination.ordered:
            for _, outcome in settlements:
                # Without a call: this is asked for every event.
                if outcome.__class__ is Retried and wait(outcome.after) < self._destination.poll_interval:
                    return True
        return False
