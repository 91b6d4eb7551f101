"""The statements of samples, as text to be reviewed. Each reads a bounded part of an index."""

from __future__ import annotations

from relaybox.database.schema import MYSQL, Tables
from relaybox.database.statements.delivery import Texts
from relaybox.database.statements.journal import words
from relaybox.database.statements.upkeep import LED

ANY_DATABASE = {
    "fence": """
SELECT term FROM {leader} WHERE name = 'upkeep' AND term = :term AND leads_until > {now} {lock}""",
    "next_pending": """
SELECT {pending_name} FROM {event} WHERE {any_pending} AND {pending_name} > :after
ORDER BY {pending_name} LIMIT 1""",
    "next_failed": """
SELECT {failed_name} FROM {event} WHERE {any_failed} AND {failed_name} > :after
ORDER BY {failed_name} LIMIT 1""",
    # The oldest is looked for among the first of those that are due or scheduled, and of those parked.
    "measure": """
SELECT (SELECT count(*) FROM (SELECT 1 AS one FROM {event} {by_due}
        WHERE {pending_of} ORDER BY next_attempt_at, position LIMIT :cap) AS p),
    (SELECT count(*) FROM (SELECT 1 AS one FROM {event} {by_failed}
        WHERE {failed_of} ORDER BY position LIMIT :cap) AS f),
    (SELECT min(created_at) FROM (SELECT created_at FROM {event} {by_due}
        WHERE {pending_of} AND next_attempt_at IS NOT NULL
        ORDER BY next_attempt_at, position LIMIT 1000) AS d),
    (SELECT min(created_at) FROM (SELECT created_at FROM {event} {by_due}
        WHERE {pending_of} AND next_attempt_at IS NULL
        ORDER BY {parked_order} LIMIT 1000) AS k),
    {now}""",
}
_NOT_MYSQL = {
    "keep": """
INSERT INTO {sample} (minute, destination, pending, failed, oldest_seconds, position)
VALUES (:minute, :destination, :pending, :failed, :oldest_seconds, :position)
ON CONFLICT (minute, destination) DO UPDATE SET pending = excluded.pending, failed = excluded.failed,
    oldest_seconds = excluded.oldest_seconds, position = excluded.position""",
}
_POSTGRESQL = {
    # Where the sequence may not be read, what the newest rows say.
    "position": """
SELECT COALESCE(
    (SELECT CASE WHEN has_sequence_privilege(s.id, 'SELECT,USAGE') THEN pg_sequence_last_value(s.id) END
     FROM (SELECT CAST(pg_get_serial_sequence(:table, 'position') AS regclass) AS id) AS s),
    (SELECT max(position) FROM (SELECT position FROM {event} ORDER BY id DESC LIMIT 1000) AS newest)),
    {now}""",
    "sample": """
DELETE FROM {sample} WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {sample} WHERE minute < (SELECT {later}) AND {led}
    ORDER BY minute LIMIT :limit FOR UPDATE SKIP LOCKED)) RETURNING 1""",
    "operation": """
DELETE FROM {operation} WHERE id = ANY (ARRAY(
    SELECT id FROM {operation} WHERE started_at < {later} AND {led}
    ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED)) RETURNING 1""",
}
_SQLITE = {
    "position": "SELECT (SELECT value FROM {counter}), {now}",
    "sample": """
DELETE FROM {sample} WHERE rowid IN (
    SELECT rowid FROM {sample} WHERE minute < {later} ORDER BY minute LIMIT :limit)""",
    "operation": """
DELETE FROM {operation} WHERE id IN (
    SELECT id FROM {operation} WHERE started_at < {later} ORDER BY id LIMIT :limit)""",
    "changed": "SELECT changes()",
}
_MYSQL = {
    "keep": """
INSERT INTO {sample} (minute, destination, pending, failed, oldest_seconds, position)
VALUES (:minute, :destination, :pending, :failed, :oldest_seconds, :position)
ON DUPLICATE KEY UPDATE pending = VALUES(pending), failed = VALUES(failed),
    oldest_seconds = VALUES(oldest_seconds), position = VALUES(position)""",
    "position": "SELECT (SELECT max(position) FROM {event}), {now}",
    "sample": "DELETE FROM {sample} WHERE minute < {later} ORDER BY minute LIMIT :limit",
    "operation": "DELETE FROM {operation} WHERE started_at < {later} ORDER BY id LIMIT :limit",
    "changed": "SELECT ROW_COUNT()",
}


_WORDS = {
    "pending_name": "destination",
    "any_pending": "status = 'pending'",
    "parked_order": "next_attempt_at, position",
}
_MYSQL_WORDS = {
    "pending_name": "due_destination",
    "any_pending": "due_destination IS NOT NULL",
    "parked_order": "position",
}


def texts(dialect: str, tables: Tables) -> Texts:
    """Return the statements for a database."""
    counter = tables.event.name.removesuffix("outbox_event") + "outbox_position"
    shared = words(dialect) | {"led": LED, "counter": f'"{counter}"'}
    if dialect in MYSQL:
        return Texts(ANY_DATABASE | _MYSQL, shared | _MYSQL_WORDS)
    own = _POSTGRESQL if dialect == "postgresql" else _SQLITE
    return Texts(ANY_DATABASE | _NOT_MYSQL | own, shared | _WORDS)
