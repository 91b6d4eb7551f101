"""Every SQL statement of an inbox; the words are those of ``delivery.py``."""

from __future__ import annotations

from relaybox.database.statements.delivery import Texts

ANY_DATABASE = {
    "forget": "DELETE FROM {inbox} WHERE consumer = :consumer AND message_id IN (:ids)",
    # Skip rows that a consumer has locked because it just received the message again.
    "old": """
SELECT consumer, message_id FROM {inbox} WHERE processed_at < {before}
ORDER BY processed_at LIMIT :limit {unless_locked}""",
}

# Returns a row only if the message is new. A concurrent INSERT waits until the first one ends.
NOT_MYSQL = ANY_DATABASE | {
    "mark": """
INSERT INTO {inbox} (consumer, message_id) VALUES (:consumer, :message_id)
ON CONFLICT DO NOTHING RETURNING 1""",
}

# The affected-row count does not help: it is one either way with the flag that SQLAlchemy and Django set. So
# updating an existing row leaves a number that no other statement leaves.
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
        return Texts(NOT_MYSQL, _LOCKING | {"before": "(SELECT {later})"})
    if dialect == "sqlite":
        return Texts(NOT_MYSQL, _LOCKING | {"unless_locked": ""})
    return Texts(MYSQL, _LOCKING)
