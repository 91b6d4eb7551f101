"""How far a backfill is, kept as an operation."""

from __future__ import annotations

from relaybox.database.statements.delivery import Texts
from relaybox.database.statements.journal import words

ANY_DATABASE = {
    "lock_destination": "SELECT name FROM {destination} WHERE name = :destination {lock}",
    "backfills": """
SELECT id, state, details, done, skipped, started_at, updated_at, {now} FROM {operation}
WHERE action = :action ORDER BY id DESC LIMIT :limit""",
    "held": """
SELECT id, state, details, done, skipped, started_at, updated_at, {now} FROM {operation}
WHERE id = :id {lock}""",
    "begin": """
INSERT INTO {operation} (id, action, actor, details, total)
VALUES (:id, :action, :actor, {details}, :total)""",
    "take_over": """
UPDATE {operation} SET state = 'running', actor = :actor, details = {details}, total = :total,
    updated_at = {now}, finished_at = NULL, error = NULL WHERE id = :id""",
    "advance": """
UPDATE {operation} SET details = {details}, done = :done, skipped = :skipped, updated_at = {now}
WHERE id = :id""",
    "live": "UPDATE {operation} SET updated_at = {now} WHERE id = :id",
    "end": """
UPDATE {operation} SET state = :state, error = :error, updated_at = {now}, finished_at = {now}
WHERE id = :id""",
    "pending": """
SELECT count(*) FROM (SELECT 1 FROM {event} WHERE {pending_of} LIMIT :limit) AS bounded""",
    "changed": """
SELECT aggregate_id, headers FROM {event}
WHERE aggregate_type = :aggregate_type AND aggregate_id IN (:ids) AND created_at >= :since""",
}


def texts(dialect: str) -> Texts:
    """Return the statements for a database."""
    return Texts(ANY_DATABASE, words(dialect))
