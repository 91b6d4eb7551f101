"""Whether the search index is up to date, read from the tables of the outbox."""

from collections.abc import Iterable
from typing import Any, Literal
from uuid import UUID

import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from relaybox.database.schema import Tables
from relaybox.operate.admin import Admin


class Sync(BaseModel):
    """Whether the index has the latest change of a document, and if not, why."""

    state: Literal["synced", "syncing", "failed"] = "synced"
    reason: str = ""
    delivery: UUID | None = None


class Engine(BaseModel):
    """The search engine as the outbox sees it."""

    name: str
    up: bool
    reason: str
    waiting: int
    failed: int


async def syncs(session: AsyncSession, tables: Tables, ids: Iterable[UUID]) -> dict[str, Sync]:
    """How it is with each of these documents; one without a row was delivered long ago."""
    event, destination = tables.event.c, tables.destination.c
    latest = (
        sa.select(event.id, event.aggregate_id, event.status, event.error_message, destination.circuit)
        .add_columns(destination.circuit_reason)
        .join_from(tables.event, tables.destination, destination.name == event.destination, isouter=True)
        .where(event.aggregate_type == "Document", event.destination == "search")
        .where(event.aggregate_id.in_([str(one) for one in ids]))
        .distinct(event.aggregate_id)
        .order_by(event.aggregate_id, event.position.desc())
    )
    return {row.aggregate_id: _sync(row) for row in await session.execute(latest)}


def _sync(row: Any) -> Sync:
    if row.status in ("delivered", "discarded"):
        return Sync(delivery=row.id)
    if row.status == "failed":
        return Sync(state="failed", reason=f"The engine refused it: {row.error_message}", delivery=row.id)
    held = row.circuit_reason if row.circuit in ("open", "half_open") else row.error_message
    return Sync(state="syncing", reason=f"Waits for the engine: {held}" if held else "", delivery=row.id)


async def why_text(admin: Admin, delivery: UUID) -> str:
    """The whole story of a delivery, in a sentence."""
    return " ".join([f"The change {reason.text}." for reason in await admin.why(delivery)])


async def engine_state(admin: Admin, name: str, down: str | None) -> Engine:
    """Return what waits for it; ``down`` is what a search would say."""
    [search] = [one for one in (await admin.stats()).destinations if one.name == "search"]
    counts, place = search.counts, search.place
    held = place.circuit_reason if place and place.circuit != "closed" else None
    return Engine(
        name=name,
        up=down is None,
        reason=held or down or "",
        waiting=counts.due + counts.scheduled + counts.parked + counts.sending,
        failed=counts.failed,
    )
