"""The questions of ``Admin`` about what was recorded, as its base class: charts, failures, operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from uuid import UUID

from relaybox.errors import ConfigError, StoreError
from relaybox.operate.admin_actions import AdminActions
from relaybox.operate.health import Health, Problem, judge, patience
from relaybox.operate.history import LOOKED_AT, Failures, Series, grouped, make_series, step_of
from relaybox.stores.journal import AuditRow, Operation
from relaybox.stores.sql.ledger.journal import SqlJournal

T = TypeVar("T")

MOST = 10_000
"""The most rows of one page."""


@dataclass(frozen=True, slots=True)
class Rows(Generic[T]):
    """Rows, newest first, and the cursor of the next page; ``None`` at the end."""

    rows: tuple[T, ...]
    cursor: Any


class AdminRecords(AdminActions):
    """What ``Admin`` answers from records beside the deliveries."""

    @property
    def journal(self) -> SqlJournal:
        """Return the records besides the rows, for code that runs operations."""
        return self._ledger.journal

    async def series(self, hours: float, destination: str | None = None) -> Series:
        """Return the last hours in at most 180 points. Emitted rows are not known per destination."""
        await self._configured.check_known(destination)
        step = step_of(hours)
        now, settled, levels = await self._ledger.history.steps(hours * 3600, step, destination)
        return make_series(now, settled, levels, hours, step)

    async def failures(self, destination: str | None = None, *, limit: int = 50) -> Failures:
        """Group the newest 10,000 failed deliveries by error."""
        check_limit(limit)
        await self._configured.check_known(destination)
        found, capped = await self._ledger.history.failed_rows(destination, LOOKED_AT)
        return await grouped(found, capped, limit)

    async def audits(self, limit: int = 50, cursor: int | None = None) -> Rows[AuditRow]:
        """Return what operators did, newest first."""
        check_limit(limit)
        rows = await self._ledger.journal.audits(limit, cursor)
        return Rows(rows, rows[-1].id if len(rows) == limit else None)

    async def operations(self, limit: int = 50) -> tuple[Operation, ...]:
        """Return bulk actions in the background, running and ended, newest first."""
        check_limit(limit)
        return await self._ledger.journal.operations(limit)

    async def operation(self, id_: UUID) -> Operation | None:
        """Return one background operation."""
        return await self._ledger.journal.operation(id_)

    async def cancel(self, id_: UUID) -> bool:
        """End an operation after its current batch. Return True if it was running."""
        cancelled = await self._ledger.journal.cancel(id_)
        if cancelled:
            await self.note("cancel", {"operation": id_})
        return cancelled

    async def health(self, stalled_after: float = 60.0) -> Health:
        """Check that deliveries flow. A database that does not answer is reported, not raised."""
        try:
            sent = [
                one for one in self._destinations.values() if one.name not in self._configured.handed_over
            ]
            relayed = {one.name: patience(one.rate_limit, stalled_after) for one in sent}
            flows = await self._ledger.history.flows(relayed)
            overview = self._ledger.overview
            places, relays = await overview.states(), await overview.relays()
        except (StoreError, OSError) as error:
            return Health(False, (Problem(None, f"the database does not answer: {error}", None),))
        return judge(flows, places, relays, relayed)


def check_limit(limit: int) -> None:
    """Raise if a page cannot have so many rows."""
    if not 1 <= limit <= MOST:
        raise ConfigError(f"limit = {limit}: use 1 to {MOST:,}")
