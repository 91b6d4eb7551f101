"""A test event on a schedule, which proves the whole path: emitted, claimed, sent, acknowledged, settled.

The leader sends it, and looks at its row until it is delivered; only then, or when it failed, it sends the
next. A new leader goes on with it, so that an outage leaves one behind and not hundreds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol
from uuid import UUID

from relaybox.core.clock import Clock
from relaybox.stores.ledger import Entry

LOOK = 1.0
"""Seconds between two looks."""
GRACE = 30.0
"""Seconds beyond its time after which an acknowledgement that has not come is overdue."""

log = logging.getLogger(__name__)


class Service(Protocol):
    """What is done with the rows of test events; ``operate.canary`` does it."""

    async def send(self) -> UUID:
        """Write another; its id."""
        ...

    async def look(self, id_: UUID) -> Entry | None:
        """The row of that id."""
        ...

    async def left(self) -> Entry | None:
        """One that was sent before, by whomever, and is not delivered."""
        ...

    async def forget(self, id_: UUID) -> None:
        """Delete one that failed."""
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
        """Why the last one failed, until one is acknowledged."""
        self._service = service
        self._every = every
        self._clock = clock
        self._acknowledged = acknowledged
        self._wake = wake
        self._event: UUID | None = None
        self._sure = False
        """Whether there is none but ``_event``."""
        self._sent = 0.0
        self._next = 0.0
        self._well: float | None = None
        """When the path was last known to work, or this relay began to prove it."""

    @property
    def overdue(self) -> float | None:
        """For how many seconds nothing was acknowledged, if that is longer than it may be."""
        seconds = self.unproven
        return seconds if seconds > self._every + GRACE else None

    @property
    def unproven(self) -> float:
        """For how many seconds nothing was acknowledged."""
        return 0.0 if self._well is None else self._clock.now() - self._well

    def rest(self) -> None:
        """Another relay leads: its test events count."""
        self._event = self._well = self.refused = None
        self._sure = False

    async def look(self) -> None:
        """See what became of the last one, and send the next when it is time."""
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
        """Go on with what another leader left, or this one wrote without hearing that it did."""
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
        # What somebody discarded proves nothing: the next one is to.
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
            # It is deleted when it is delivered.
            seconds = self._well - self._sent
        self._acknowledged(self.destination, max(0.0, seconds))
