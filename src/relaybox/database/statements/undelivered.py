"""Questions about what a search destination has not got yet."""

from __future__ import annotations

from relaybox.database.schema import MYSQL
from relaybox.database.statements.delivery import Texts

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


def texts(dialect: str) -> Texts:
    """Return the statements for a database."""
    if dialect in MYSQL:
        return Texts(ANY_DATABASE, _WORDS["mysql"] | _MYSQL_STATUSES)
    return Texts(ANY_DATABASE, _WORDS[dialect] | _STATUSES)
