"""Every statement of an inbox, as text to be reviewed; the words are those of ``delivery.py``."""

from __future__ import annotations

from relaybox.database.statements.delivery import Texts

ANY_DATABASE = {
    "forget": "DELETE FROM {inbox} WHERE consumer = :consumer AND message_id IN (:ids)",
    # Those that a consumer's transaction has locked, because it has just met one again, can wait.
    "old": """
SELECT consumer, message_id FROM {inbox} WHERE processed_at < {before}
ORDER BY processed_at LIMIT :limit {unless_locked}""",
}

# It answers with a row only where it was the first. A concurrent one waits for the other's end.
NOT_MYSQL = ANY_DATABASE | {
    "mark": """
INSERT INTO {inbox} (consumer, message_id) VALUES (:consumer, :message_id)
ON CONFLICT DO NOTHING RETURNING 1""",
}

# How many rows were affected says nothing: with the flag that SQLAlchemy and Django set it is one either way.
# So the update of a row that was there leaves a number behind, which no other statement has left.
MYSQL = ANY_DATABASE | {
    "mark": """
INSERT INTO {inbox} (consumer, message_id) VALUES (:consumer, :message_id)
ON DUPLICATE KEY UPDATE consumer = IF(LAST_INSERT_ID(:number) = 0, '', consumer)""",
    "was_there": "SELECT LAST_INSERT_ID() = :number",
    "forget": "DELETE i FROM {inbox} i {by_id} WHERE i.consumer = :consumer AND i.message_id IN (:ids)",
}

_LOCKING = {"before": "{later}", "unless_locked": "FOR UPDATE SKIP LOCKED"}


def texts(dialect: str) -> Texts:
    """Return the statements for a database."""
    if dialect == "postgresql":
        # A clock that is read in a subquery can bound an index.
        return Texts(NOT_MYSQL, _LOCKING | {"before": "(SELECT {later})"})
    if dialect == "sqlite":
        return Texts(NOT_MYSQL, _LOCKING | {"unless_locked": ""})
    return Texts(MYSQL, _LOCKING)
