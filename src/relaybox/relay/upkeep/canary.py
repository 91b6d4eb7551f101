"""A test event on a schedule, which proves the whole path: emitted, claimed, sent, acknowledged, settled.

The leader sends it, and checks its row until it is delivered or failed; only then it sends the next. A new
leader continues with it, so that an outage leaves one test event behind and not hundreds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol
from uuid import UUID

from relaybox.core.clock import Clock
from relaybox.stores.ledger import Entry

LOOK = 1.0
"""Seconds between two checks."""
GRACE = 30.0
"""Seconds beyond the interval after which a missing acknowledgement is overdue."""

log = logging.getLogger(__name__)


class Service(Protocol):
    """Writes, reads and deletes the rows of test events; ``operate.admin`` implements it."""

    async def send(self) -> UUID:
        """Write a new test event and return its id."""
        ...

    async def look(self, id_: UUID) -> Entry | None:
        """Return the row with that id."""
        ...

    async def left(self) -> Entry | None:
        """Return an undelivered test event of this or an earlier leader."""
        ...

    async def forget(self, id_: UUID) -> None:
        """Delete a test event that failed."""
        ...


class Canary:
    """Sends test events while this relay leads; ``acknowledged`` gets the destination and the seconds."""

    def __init__(
        self,
        service: Service,
        destination: str,
        every: float,
        clock: Clock,
        acknowledged: Callable[[str, float], None],
        wake: Callable[[Iterable[str]], None],
    ) -> None:
        self.destination = destination
        self.refused: str | None = None
        """Why the last test event failed, until one is acknowledged."""
        self._service = service
        self._every = every
        self._clock = clock
        self._acknowledged = acknowledged
        self._wake = wake
        self._event: UUID | None = None
        self._sure = False
        """True if there is certainly no other test event than ``_event``."""
        self._sent = 0.0
        self._next = 0.0
        self._well: float | None = None
        """When the path was last known to work, or this relay began to prove it."""

    @property
    def overdue(self) -> float | None:
        """Return the seconds without an acknowledgement if they are too many, else None."""
        seconds = self.unproven
        return seconds if seconds > self._every + GRACE else None

    @property
    def unproven(self) -> float:
        """Return the seconds without an acknowledgement."""
        return 0.0 if self._well is None else self._clock.now() - self._well

    def rest(self) -> None:
        """Forget everything, because another relay leads and sends the test events."""
        self._event = self._well = self.refused = None
        self._sure = False

    async def look(self) -> None:
        """Check the last test event, and send the next if it is due."""
        now = self._clock.now()
        if self._well is None:
            self._well = self._next = now
        if not self._sure:
            await self._adopt(now)
        if self._event is not None:
            await self._follow(self._event, now)
        if self._event is None and now >= self._next:
            await self._send(now)

    async def _adopt(self, now: float) -> None:
        """Continue with a test event of another leader, or one from a failed call that was still written."""
        entry = await self._service.left()
        if entry is not None:
            self._event = entry.id
            self._sent = now - (entry.seen_at - entry.created_at).total_seconds()
        self._sure = True

    async def _send(self, now: float) -> None:
        self._next = now + self._every
        self._sent = now
        self._sure = False
        self._event = await self._service.send()
        self._sure = True
        self._wake([self.destination])

    async def _follow(self, event: UUID, now: float) -> None:
        entry = await self._service.look(event)
        if entry is not None and entry.status == "failed":
            self._fail(entry)
            if now < self._next:
                return
            await self._service.forget(event)
        elif entry is not None and entry.status == "pending":
            return
        elif entry is None or entry.status == "delivered":
            self._acknowledge(entry)
        # A discarded test event proves nothing, so send another.
        self._event = None

    def _fail(self, entry: Entry) -> None:
        reason = " ".join((entry.error_message or "no error on record").split())
        if self.refused is None:
            log.warning("the test event for %s failed: %s", self.destination, reason)
        self.refused = reason

    def _acknowledge(self, entry: Entry | None) -> None:
        self._well = self._clock.now()
        self.refused = None
        if entry is not None and entry.delivered_at is not None:
            seconds = (entry.delivered_at - entry.created_at).total_seconds()
        else:
            # Without retention the row is deleted on delivery.
            seconds = self._well - self._sent
        self._acknowledged(self.destination, max(0.0, seconds))
