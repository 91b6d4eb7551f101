"""SQL statements of the journal, samples, backfills and reindexes; each reads a bounded part of an index."""

from __future__ import annotations

from relaybox.core.fingerprint import LOOKED_AT
from relaybox.database.schema import MYSQL, Tables
from relaybox.database.statements.delivery import Texts
from relaybox.database.statements.upkeep import (
    FENCE,
    LED,
    OLD_IN_MYSQL,
    OLD_IN_POSTGRESQL,
    OLD_IN_SQLITE,
    prunings,
)

WORDS = {
    # Computes the step once per minute, not once per bucket.
    "minutes": "(SELECT {step} AS step, lag FROM {stats} WHERE {lately} {apart}) AS s",
    "lately": "minute >= (SELECT {later}) AND (:anywhere OR destination = :destination)",
    "operation_columns": """id, action, actor, details, state, total, capped, done, skipped, started_at,
    updated_at, finished_at, error, {now}""",
}

ANY_DATABASE = {
    "moment": "SELECT {now}",
    "settled": """
SELECT {step}, sum(delivered), sum(retried), sum(failed) FROM {stats} WHERE {lately} GROUP BY 1""",
    "lags": "SELECT step, {bucket}, sum({times}) FROM {minutes}, {buckets} GROUP BY 1, 2",
    "levels": """
SELECT {step}, max(pending), max(oldest_seconds), max(position), max(minute) FROM {sample}
WHERE minute >= (SELECT {later}) AND destination = :destination GROUP BY 1""",
    # Due since the row was last changed, if that is later: a retry keeps a row's old place in the line.
    "flow": """
SELECT EXISTS (SELECT 1 FROM {event} WHERE {pending_of}),
    (SELECT min(CASE WHEN updated_at > next_attempt_at THEN updated_at ELSE next_attempt_at END) FROM (
        SELECT next_attempt_at, updated_at, leased_until FROM {event} {by_due}
        WHERE {pending_of} AND next_attempt_at <= (SELECT {now})
        ORDER BY next_attempt_at, position LIMIT 1000) AS due
     WHERE leased_until IS NULL OR leased_until <= {now}),
    {now}""",
    "settling": """
SELECT DISTINCT destination FROM {stats}
WHERE minute >= (SELECT {later}) AND delivered + retried + failed > 0""",
    "next_failed": """
SELECT {failed_name} FROM {event} WHERE {any_failed} AND {failed_name} > :after
ORDER BY {failed_name} LIMIT 1""",
    "failed_rows": """
SELECT event_type, error, count(*), min(updated_at), max(updated_at), max(id) FROM (
    SELECT event_type, {error} AS error, updated_at, {id_text} AS id FROM {event} {by_failed}
    WHERE {failed_of} ORDER BY position DESC LIMIT :limit) AS newest
GROUP BY event_type, error""",
    "audits": """
SELECT id, at, actor, action, details, affected FROM {audit} WHERE id < :before
ORDER BY id DESC LIMIT :limit""",
    "note": """
INSERT INTO {audit} (actor, action, details, affected) VALUES (:actor, :action, {details}, :affected)""",
    "begin": """
INSERT INTO {operation} (id, action, actor, details, total, capped)
VALUES (:id, :action, :actor, {details}, :total, :capped)""",
    "advance": """
UPDATE {operation} SET done = :done, skipped = :skipped, updated_at = {now}
WHERE id = :id AND state = 'running'""",
    "state": "SELECT state FROM {operation} WHERE id = :id",
    "finish": """
UPDATE {operation} SET done = :done, skipped = :skipped, updated_at = {now}, finished_at = {now},
    error = :error, state = CASE WHEN state = 'running' THEN :state ELSE state END
WHERE id = :id""",
    "operations": "SELECT {operation_columns} FROM {operation} ORDER BY id DESC LIMIT :limit",
    "one_operation": "SELECT {operation_columns} FROM {operation} WHERE id = :id",
    "running": "SELECT id FROM {operation} WHERE id = :id AND state = 'running' {lock}",
    "cancel": """
UPDATE {operation} SET state = 'cancelled', finished_at = CASE WHEN updated_at < {later} THEN {now} END
WHERE id = :id AND state = 'running' {returning}""",
}

_NOT_MYSQL = {
    "pending_of": "destination = :destination AND status = 'pending'",
    "pending_name": "destination",
    "any_pending": "status = 'pending'",
    "parked_order": "next_attempt_at, position",
    "failed_of": "destination = :destination AND status = 'failed'",
    "failed_name": "destination",
    "any_failed": "status = 'failed'",
    "error": f"substr(error_message, 1, {LOOKED_AT})",
    "by_failed": "",
    "returning": "RETURNING id",
}
_POSTGRESQL = _NOT_MYSQL | {
    "step": "CAST(extract(epoch FROM minute) AS bigint) / CAST(:step AS integer)",
    "apart": "OFFSET 0",
    "buckets": "jsonb_each_text(lag) AS k(bucket, times)",
    "bucket": "bucket",
    "times": "CAST(times AS bigint)",
    "id_text": "CAST(id AS text)",
    "details": "CAST(:details AS jsonb)",
}
_SQLITE = _NOT_MYSQL | {
    "step": "CAST(strftime('%s', minute) AS INTEGER) / :step",
    "apart": "",
    "buckets": "json_each(lag) AS k",
    "bucket": "k.key",
    "times": "k.value",
    "id_text": "id",
    "details": ":details",
}
# The columns that replace partial indexes imply the status.
_MYSQL = {
    "pending_of": "due_destination = :destination",
    "pending_name": "due_destination",
    "any_pending": "due_destination IS NOT NULL",
    "parked_order": "position",
    "failed_of": "failed_destination = :destination",
    "failed_name": "failed_destination",
    "any_failed": "failed_destination IS NOT NULL",
    # As bytes, so that errors that differ only in case stay apart.
    "error": f"CAST(SUBSTR(error_message, 1, {LOOKED_AT}) AS BINARY)",
    "by_failed": "",
    "returning": "",
    "step": "TIMESTAMPDIFF(SECOND, '1970-01-01', minute) DIV :step",
    "apart": "",
    "buckets": "JSON_TABLE(JSON_KEYS(s.lag), '$[*]' COLUMNS (bucket VARCHAR(5) PATH '$')) k",
    "bucket": "bucket",
    "times": "CAST(JSON_EXTRACT(s.lag, CONCAT('$.\"', bucket, '\"')) AS SIGNED)",
    "id_text": "id",
    "details": ":details",
}

BACKFILLS = {
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

SAMPLES = {
    "fence": FENCE,
    "next_pending": """
SELECT {pending_name} FROM {event} WHERE {any_pending} AND {pending_name} > :after
ORDER BY {pending_name} LIMIT 1""",
    "next_failed": ANY_DATABASE["next_failed"],
    # Looks for the oldest among the first 1000 due or scheduled rows, and the first 1000 parked ones.
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
_KEEP_SAMPLE = {
    "keep": """
INSERT INTO {sample} (minute, destination, pending, failed, oldest_seconds, position)
VALUES (:minute, :destination, :pending, :failed, :oldest_seconds, :position)
ON CONFLICT (minute, destination) DO UPDATE SET pending = excluded.pending, failed = excluded.failed,
    oldest_seconds = excluded.oldest_seconds, position = excluded.position""",
}
_SAMPLES_POSTGRESQL = _KEEP_SAMPLE | {
    # If the role may not read the sequence, use the newest rows.
    "position": """
SELECT COALESCE(
    (SELECT CASE WHEN has_sequence_privilege(s.id, 'SELECT,USAGE') THEN pg_sequence_last_value(s.id) END
     FROM (SELECT CAST(pg_get_serial_sequence(:table, 'position') AS regclass) AS id) AS s),
    (SELECT max(position) FROM (SELECT position FROM {event} ORDER BY id DESC LIMIT 1000) AS newest)),
    {now}""",
    **prunings(OLD_IN_POSTGRESQL, sample="minute"),
    "operation": """
DELETE FROM {operation} WHERE id = ANY (ARRAY(
    SELECT id FROM {operation} WHERE started_at < {later} AND {led}
    ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED)) RETURNING 1""",
}
_SAMPLES_SQLITE = _KEEP_SAMPLE | {
    "position": "SELECT (SELECT value FROM {counter}), {now}",
    **prunings(OLD_IN_SQLITE, sample="minute"),
    "operation": """
DELETE FROM {operation} WHERE id IN (
    SELECT id FROM {operation} WHERE started_at < {later} ORDER BY id LIMIT :limit)""",
    "changed": "SELECT changes()",
}
_SAMPLES_MYSQL = {
    "keep": """
INSERT INTO {sample} (minute, destination, pending, failed, oldest_seconds, position)
VALUES (:minute, :destination, :pending, :failed, :oldest_seconds, :position)
ON DUPLICATE KEY UPDATE pending = VALUES(pending), failed = VALUES(failed),
    oldest_seconds = VALUES(oldest_seconds), position = VALUES(position)""",
    "position": "SELECT (SELECT max(position) FROM {event}), {now}",
    **prunings(OLD_IN_MYSQL, sample="minute"),
    "operation": "DELETE FROM {operation} WHERE started_at < {later} ORDER BY id LIMIT :limit",
    "changed": "SELECT ROW_COUNT()",
}


def texts(dialect: str) -> Texts:
    """Return the journal's statements for a database."""
    return Texts(ANY_DATABASE, words(dialect))


def backfill_texts(dialect: str) -> Texts:
    """Return the statements of backfills, which are stored as operations."""
    return Texts(BACKFILLS, words(dialect))


def sample_texts(dialect: str, tables: Tables) -> Texts:
    """Return the statements of samples for a database."""
    counter = tables.event.name.removesuffix("outbox_event") + "outbox_position"
    own = {"postgresql": _SAMPLES_POSTGRESQL, "sqlite": _SAMPLES_SQLITE}.get(dialect, _SAMPLES_MYSQL)
    return Texts(SAMPLES | own, words(dialect) | {"led": LED, "counter": f'"{counter}"'})


def words(dialect: str) -> dict[str, str]:
    """Return the words of the journal for a database."""
    if dialect in MYSQL:
        return WORDS | _MYSQL
    return WORDS | (_POSTGRESQL if dialect == "postgresql" else _SQLITE)


UNDELIVERED = {
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
_OPEN_OF = "destination = :destination AND status IN ('pending', 'failed')"
_OPEN_OF_MYSQL = "(due_destination = :destination OR failed_destination = :destination)"


def undelivered_texts(dialect: str) -> Texts:
    """Return the queries about rows that a search destination has not received yet."""
    own = {
        "meant_for": _MEANT_FOR.get(dialect, _MEANT_FOR_MYSQL),
        "open_of": _OPEN_OF_MYSQL if dialect in MYSQL else _OPEN_OF,
    }
    return Texts(UNDELIVERED, words(dialect) | own)
