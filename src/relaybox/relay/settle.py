"""The last step: write outcomes. One statement writes all that gathered since the last one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Outcome, Retried, wait
from relaybox.core.settings import Destination
from relaybox.errors import RowsLocked, StoreError
from relaybox.relay.batch import Batch, InFlight
from relaybox.relay.crashpoint import reached
from relaybox.relay.shared import Shared
from relaybox.stores.store import DeadLetter, Settlement, bury

GAP, GAP_WHERE_ORDERED = 0.05, 0.02
"""Seconds between the starts of two settles, unless ``ENOUGH`` outcomes wait. With ordering the gap is
shorter, because the next delivery of a key waits for the settle."""
ENOUGH = 500


class Settler:
    """Writes the outcomes of one destination's deliveries."""

    def __init__(
        self,
        destination: Destination,
        shared: Shared,
        dead_letter: DeadLetter | None,
        in_flight: InFlight,
        made_due: Callable[[], None],
    ) -> None:
        self._destination = destination
        self._shared = shared
        self._dead_letter = dead_letter
        self._in_flight = in_flight
        self._made_due = made_due
        self._waiting: list[Settlement] = []
        self._news = asyncio.Event()
        self._enough = asyncio.Event()
        self._began = -math.inf
        self.in_trouble = False
        """True while the last outcomes could not be written: a claim might get the same rows again."""
        self._locked: dict[int, Settlement] = {}
        """By position, the outcomes of rows that another session has locked."""
        self._any_locked = asyncio.Event()

    @property
    def waits(self) -> bool:
        """True if some outcomes cannot be written now."""
        return self.in_trouble or bool(self._locked)

    def known(self, delivery: Delivery) -> Delivered | Failed | None:
        """Return the outcome that a claimed row already has, so that it is not sent; else None.

        The row used up its attempts, or it was delivered but stayed locked until its lease ended.
        """
        if delivery.exhausted:
            return bury(delivery)
        known = self._locked.get(delivery.position)
        return known.outcome if known is not None and isinstance(known.outcome, Delivered) else None

    def add(self, settlement: Settlement) -> None:
        """Add an outcome to the next statement."""
        self._waiting.append(settlement)
        count = len(self._waiting)
        if count == 1:
            self._news.set()
        # Settle a suspect at once: the next one waits for it.
        if count >= ENOUGH or settlement.delivery.crashes > 1:
            self._enough.set()

    def add_unsent(self, batch: Batch, delivery: Delivery, outcome: Outcome) -> None:
        """Add the outcome of a delivery that is not sent, unless its lease is lost."""
        reached("answered")
        batch.answered.add(delivery.position)
        self._in_flight.answered += 1
        if delivery.position in batch.unsettled:
            self.add(Settlement(delivery, outcome))

    async def run(self) -> None:
        """Settle the outcomes that are added, forever."""
        # A lane that failed has left its unwritten outcomes: those leases expire.
        self.in_trouble = False
        while True:
            await self._news.wait()
            await self._gather()
            self._news.clear()
            self._enough.clear()
            self._began = self._shared.clock.now()
            settlements, self._waiting = self._waiting, []
            reached("settle")
            await self._settle(settlements)

    async def run_locked(self) -> None:
        """Settle locked rows once they are free. Other rows do not wait for them."""
        while True:
            await self._any_locked.wait()
            await self._shared.clock.sleep(self._shared.pause(self._destination.poll_interval))
            try:
                await self._write(list(self._locked.values()), wait=False)
            except StoreError as error:
                self._shared.observer.trouble(self._destination.name, "settle", error)
            if not self._locked:
                self._any_locked.clear()

    async def _gather(self) -> None:
        """Right after a settle, wait for more outcomes: many small statements cost the most."""
        gap = GAP_WHERE_ORDERED if self._destination.ordered else GAP
        left = self._began + gap - self._shared.clock.now()
        if left > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._enough.wait()

    async def _settle(self, settlements: Sequence[Settlement]) -> None:
        """Write until the database accepts it; otherwise delivered events would be delivered again."""
        while True:
            try:
                await self._write(settlements)
            except StoreError as error:
                self.in_trouble = True
                self._shared.observer.trouble(self._destination.name, "settle", error)
                await self._shared.clock.sleep(self._shared.pause(self._destination.poll_interval))
            else:
                if self.in_trouble or self._has_short_waits(settlements):
                    self._made_due()
                self.in_trouble = False
                return

    async def _write(self, settlements: Sequence[Settlement], *, wait: bool = True) -> None:
        """Write outcomes, and keep those of rows that other sessions have locked for later."""
        destination = self._destination
        try:
            lost = await self._shared.store.settle(
                settlements,
                on_failed=destination.on_failed or "skip",
                dead_letter=self._dead_letter,
                made_due=self._made_due,
                wait=wait,
            )
        except RowsLocked as error:
            lost = error.lost
            if wait:
                self._shared.observer.trouble(destination.name, "settle", error)
            locked = {s.delivery.position: s for s in settlements if s.delivery.id in error.rows}
            # A retry must not replace an outcome that was added meanwhile: that one has a later lease.
            self._locked = self._locked | locked if wait else locked | self._locked
            self._any_locked.set()
            settlements = [s for s in settlements if s.delivery.id not in error.rows]
        if not settlements:
            return
        reached("settled")
        self._shared.observer.settled(destination.name, settlements, lost)
        if self._locked:
            for settlement in settlements:
                if self._locked.get(settlement.delivery.position) is settlement:
                    del self._locked[settlement.delivery.position]
        self._in_flight.drop([delivery for delivery, _ in settlements])

    def _has_short_waits(self, settlements: Sequence[Settlement]) -> bool:
        """True if a delivery is due again sooner than the lane's next poll, so that its key waits for it."""
        if self._destination.ordered:
            for _, outcome in settlements:
                # ``isinstance`` would be a call for each event.
                if outcome.__class__ is Retried and wait(outcome.after) < self._destination.poll_interval:
                    return True
        return False
