"""The test events that a relay sends on a schedule, as rows of the outbox."""

from __future__ import annotations

from uuid import UUID

from relaybox.operate.admin import Admin
from relaybox.operate.admin_actions import CANARY
from relaybox.stores.ledger import Choice, Entry, Filter
from relaybox.stores.sql.ledger import SqlLedger

OPEN: tuple[Choice, ...] = ("pending", "sending", "failed")


class Rows:
    """The test events that relays sent to a destination."""

    def __init__(self, admin: Admin, ledger: SqlLedger, destination: str) -> None:
        self._admin = admin
        self._ledger = ledger
        self._destination = destination

    async def send(self) -> UUID:
        """Write a test event and return its id."""
        return await self._admin.test(self._destination, audited=False)

    async def look(self, id_: UUID) -> Entry | None:
        """Return the row with that id."""
        return next(iter(await self._ledger.entries.find(id_, exact=True)), None)

    async def left(self) -> Entry | None:
        """Return an undelivered test event of any relay."""
        for status in OPEN:
            filter = Filter(status, self._destination, aggregate_type="relaybox", aggregate_id=CANARY)
            if entries := (await self._admin.events(filter, limit=1)).entries:
                return entries[0]
        return None

    async def forget(self, id_: UUID) -> None:
        """Delete a failed test event."""
        await self._ledger.changes.forget(id_)
