"""Queries about rows that a search destination has not received yet."""

from __future__ import annotations

from relaybox.database.schema import MYSQL
from relaybox.database.statements.delivery import Texts
from relaybox.database.statements.journal import words

ANY_DATABASE = {
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
_MEANT_FOR = {
    "postgresql": "headers ->> 'relaybox-index'",
    "sqlite": f"CASE WHEN json_valid(headers) THEN json_extract(headers, {_HEADER}) END",
}
_MEANT_FOR_MYSQL = f"CASE WHEN JSON_VALID(headers) THEN JSON_UNQUOTE(JSON_EXTRACT(headers, {_HEADER})) END"
_OPEN = "destination = :destination AND status IN ('pending', 'failed')"
_OPEN_MYSQL = "(due_destination = :destination OR failed_destination = :destination)"


def texts(dialect: str) -> Texts:
    """Return the statements for a database."""
    own = {
        "meant_for": _MEANT_FOR.get(dialect, _MEANT_FOR_MYSQL),
        "open_of": _OPEN_MYSQL if dialect in MYSQL else _OPEN,
    }
    return Texts(ANY_DATABASE, words(dialect) | own)
