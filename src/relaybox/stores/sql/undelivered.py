"""Finds rows that a search destination has not received: by document, and by index."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from relaybox.database.statements.journal import undelivered_texts
from relaybox.database.steps import Row, ask
from relaybox.stores.sql.rows import shown
from relaybox.stores.sql.store import SqlStore


class OfDocument(NamedTuple):
    """Undelivered rows of one document; ``id`` is that of the newest."""

    document: str
    failed: bool
    only_for: str | None
    """The only index that they are for; None for all."""
    id: UUID


ForIndex: TypeAlias = tuple[UUID, str, str | None]
"""A row for one index only: its id, its document and its error."""


class Undelivered:
    """Queries undelivered rows in a store's database."""

    def __init__(self, store: SqlStore) -> None:
        self._driver = store.driver
        own = store.steps.statements
        self._statements = own.others(undelivered_texts(own.dialect.name))

    async def of_documents(
        self, destination: str, aggregate_type: str, ids: Sequence[str]
    ) -> tuple[OfDocument, ...]:
        """Return the undelivered rows of these documents."""
        words: dict[str, Any] = {"aggregate_type": aggregate_type, "ids": list(ids)}
        rows = await self._ask("of_documents", destination=destination, **words) if ids else []
        return tuple(
            OfDocument(str(shown(document)), status == "failed", shown(index), UUID(shown(id_)))
            for document, status, index, id_ in rows
        )

    async def pending_for(self, destination: str, index: str) -> int:
        """Count pending rows that are only for this index."""
        [[count]] = await self._ask("pending_for", destination=destination, index=index)
        return int(count)

    async def failed_for(self, destination: str, index: str, limit: int) -> tuple[ForIndex, ...]:
        """Return failed rows for this index."""
        return await self._rows("failed_for", destination, index, limit)

    async def waiting_for(self, destination: str, index: str, limit: int) -> tuple[ForIndex, ...]:
        """Return rows for this index that are parked, or were tried before."""
        return await self._rows("waiting_for", destination, index, limit)

    async def open_for(self, destination: str, index: str, limit: int) -> tuple[ForIndex, ...]:
        """Return pending or failed rows for this index."""
        return await self._rows("open_for", destination, index, limit)

    async def sent_before(self, destination: str, seconds: float) -> int:
        """Count rows in flight that were claimed at least ``seconds`` ago."""
        [[count]] = await self._ask("sent_before", destination=destination, seconds=-seconds)
        return int(count)

    async def _rows(self, name: str, destination: str, index: str, limit: int) -> tuple[ForIndex, ...]:
        rows = await self._ask(name, destination=destination, index=index, limit=limit)
        return tuple((UUID(shown(id_)), str(shown(own)), shown(error)) for id_, own, error in rows)

    async def _ask(self, name: str, **words: Any) -> list[Row]:
        [rows] = await self._driver.run(partial(ask, [self._statements(name, **words)]))
        return rows
