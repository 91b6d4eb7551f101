"""The questions of operators, as text to be reviewed. What they change stands in ``change.py``."""

from __future__ import annotations

from collections.abc import Iterable

from relaybox.database.schema import MYSQL
from relaybox.database.statements import change
from relaybox.database.statements.delivery import Texts

NEXT_NAME = """
SELECT destination FROM {event} WHERE {condition} AND destination > :after ORDER BY destination LIMIT 1"""

QUESTIONS = {
    "named": "SELECT name FROM {destination}",
    "unrouted": "SELECT destination FROM {event} WHERE {due} = '' AND status = 'pending' LIMIT 1",
    "places": """
SELECT name, paused_at, paused_until, paused_by, pause_reason, circuit, circuit_until, circuit_reason, {now}
FROM {destination}""",
    "relays": """
SELECT name, host, pid, version, started_at, seen_at, leads_until, {now} FROM {relay}
ORDER BY seen_at DESC LIMIT 100""",
    "content": "SELECT payload, payload_data, payload_encoding, headers FROM {event} WHERE id = :id",
    "attempts": """
SELECT attempt, failed_at, relay, error_message FROM {attempt} WHERE delivery_id = :id ORDER BY attempt""",
    "forget_attempts_of": """
DELETE FROM {attempt} WHERE delivery_id = (SELECT id FROM {event} WHERE id = :id AND status = 'failed')""",
    "forget": "DELETE FROM {event} WHERE id = :id AND status = 'failed'",
    "head": """
SELECT {entry}, {now} FROM {event} WHERE {head} = :destination AND ordering_key = :key AND {open}
ORDER BY position LIMIT 1""",
    # The status in words that are no index's.
    "first_of_key": """
SELECT {entry}, {now} FROM {event} WHERE {head} = :destination AND ordering_key = :key AND {open}
    AND (status = 'failed') = :failed AND {unleased}
ORDER BY position LIMIT :limit""",
}


def next_names(dialect: str) -> dict[str, str]:
    """Return a statement for each index that begins with destinations, from one name to the next."""
    statuses = () if dialect in MYSQL else ("pending", "failed", "delivered")
    conditions = [f"status = '{status}'" for status in statuses] or ["destination IS NOT NULL"]
    return {condition: NEXT_NAME.replace("{condition}", condition) for condition in conditions}


def texts(dialect: str, columns: Iterable[str]) -> Texts:
    """Return the statements for a database, with those of changes. ``columns`` are those of an entry."""
    changes = change.texts(dialect)
    questions = QUESTIONS | next_names(dialect) | dict(changes.statements)
    return Texts(questions, {**changes.words, "entry": ", ".join(columns)})
