"""What a search destination has not got yet: rows of some documents, and rows meant for one index only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

from relaybox.database.schema import MYSQL
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Row, Steps
from relaybox.stores.sql.search import shown
from relaybox.stores.sql.store import SqlStore

ANY_DATABASE = {
    # By document, status and index, so that a document with many events is one line.
    "of_documents": """
SELECT aggregate_id, status, {meant_for}, max({id_text}) FROM {event}
WHERE aggregate_type = :aggregate_type AND aggregate_id IN (:ids) AND destination = :destination
    AND status IN ('pending', 'failed')
GROUP BY 1, 2, 3""",
    "pending_for": "SELECT count(*) FROM {event} WHERE {pending_of} AND {meant_for} = :index",
    "failed_for": """
SELECT {id_text}, aggregate_id, error_message FROM {event} WHERE {failed_of} AND {meant_for} = :index
LIMIT :limit""",
    "waiting_for": """
SELECT {id_text}, aggregate_id, error_message FROM {event} WHERE {pending_of} AND {meant_for} = :index
    AND (next_attempt_at IS NULL OR last_attempt_at IS NOT NULL)
LIMIT :limit""",
    "open_for": """
SELECT {id_text}, aggregate_id, error_message FROM {event} WHERE {open_of} AND {meant_for} = :index
LIMIT :limit""",
    "sent_before": """
SELECT count(*) FROM {event} WHERE {pending_of} AND leased_until > {now} AND last_attempt_at <= {later}""",
}

_HEADER = "'$.\"relaybox-index\"'"
_WORDS = {
    "postgresql": {"meant_for": "headers ->> 'relaybox-index'", "id_text": "CAST(id AS text)"},
    "sqlite": {
        "meant_for": f"CASE WHEN json_valid(headers) THEN json_extract(headers, {_HEADER}) END",
        "id_text": "id",
    },
    "mysql": {
        "meant_for": f"CASE WHEN JSON_VALID(headers) THEN JSON_UNQUOTE(JSON_EXTRACT(headers, {_HEADER})) END",
        "id_text": "id",
    },
}
_STATUSES = {
    "pending_of": "destination = :destination AND status = 'pending'",
    "failed_of": "destination = :destination AND status = 'failed'",
    "open_of": "destination = :destination AND status IN ('pending', 'failed')",
}
# The columns that stand for partial indexes say the status too.
_MYSQL_STATUSES = {
    "pending_of": "due_destination = :destination",
    "failed_of": "failed_destination = :destination",
    "open_of": "(due_destination = :destination OR failed_destination = :destination)",
}


class OfDocument(NamedTuple):
    """Rows of one document that were not delivered; ``id`` is the newest one's."""

    document: str
    failed: bool
    only_for: str | None
    """The one index that they are for, where it is not all."""
    id: UUID


class ForIndex(NamedTuple):
    """A row that is for one index only."""

    id: UUID
    document: str
    error: str | None


class Undelivered:
    """Asks a store's database."""

    def __init__(self, store: SqlStore) -> None:
        self._driver = store.driver
        own = store.steps.statements
        self._statements = own.others(templates(own.dialect.name))

    async def of_documents(
        self, destination: str, aggregate_type: str, ids: Sequence[str]
    ) -> tuple[OfDocument, ...]:
        """What has not arrived of these documents."""
        words: dict[str, Any] = {"aggregate_type": aggregate_type, "ids": list(ids)}
        rows = await self._ask("of_documents", destination=destination, **words) if ids else []
        return tuple(
            OfDocument(str(shown(document)), status == "failed", shown(index), UUID(shown(id_)))
            for document, status, index, id_ in rows
        )

    async def pending_for(self, destination: str, index: str) -> int:
        """How many rows wait that are for this index only."""
        [[count]] = await self._ask("pending_for", destination=destination, index=index)
        return int(count)

    async def failed_for(self, destination: str, index: str, limit: int) -> tuple[ForIndex, ...]:
        """Rows for this index that failed."""
        return await self._rows("failed_for", destination, index, limit)

    async def waiting_for(self, destination: str, index: str, limit: int) -> tuple[ForIndex, ...]:
        """Rows for this index that are parked, or were tried before."""
        return await self._rows("waiting_for", destination, index, limit)

    async def open_for(self, destination: str, index: str, limit: int) -> tuple[ForIndex, ...]:
        """Rows for this index that are pending or failed."""
        return await self._rows("open_for", destination, index, limit)

    async def sent_before(self, destination: str, seconds: float) -> int:
        """How many rows are under way now that were claimed so many seconds ago, or earlier."""
        [[count]] = await self._ask("sent_before", destination=destination, seconds=-seconds)
        return int(count)

    async def _rows(self, name: str, destination: str, index: str, limit: int) -> tuple[ForIndex, ...]:
        rows = await self._ask(name, destination=destination, index=index, limit=limit)
        return tuple(ForIndex(UUID(shown(id_)), str(shown(own)), shown(error)) for id_, own, error in rows)

    async def _ask(self, name: str, **words: Any) -> list[Row]:
        query: Query = self._statements(name, **words)

        def steps() -> Steps[list[Row]]:
            [rows] = yield [query]
            return list(rows)

        return await self._driver.run(steps)


def templates(dialect: str) -> dict[str, str]:
    """The texts for one database."""
    family = "mysql" if dialect in MYSQL else dialect
    words = _WORDS[family] | (_MYSQL_STATUSES if family == "mysql" else _STATUSES)
    texts = ANY_DATABASE
    for word, meaning in words.items():
        texts = {name: text.replace(f"{{{word}}}", meaning) for name, text in texts.items()}
    return texts
