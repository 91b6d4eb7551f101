"""The statements of what is on record besides the rows, as text to be reviewed."""

from __future__ import annotations

from relaybox.core.fingerprint import LOOKED_AT
from relaybox.database.schema import MYSQL as MYSQL_DIALECTS
from relaybox.database.statements.delivery import Texts

WORDS = {
    # Which step it is, is told of each minute once, and not of each of its buckets.
    "minutes": "(SELECT {step} AS step, lag FROM {stats} WHERE {lately} {apart}) AS s",
    # A clock that is read in a subquery can bound an index.
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
    # Due since it was last touched, if that was later: a retry gives a row its old place in the line.
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
# The columns that stand for partial indexes say the status too.
_MYSQL = {
    "pending_of": "due_destination = :destination",
    "failed_of": "failed_destination = :destination",
    "failed_name": "failed_destination",
    "any_failed": "failed_destination IS NOT NULL",
    # Bytes: texts that differ in their case only are two.
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


def texts(dialect: str) -> Texts:
    """Return the statements for a database."""
    return Texts(ANY_DATABASE, words(dialect))


def words(dialect: str) -> dict[str, str]:
    """Return the words of a database, which other statements about operations and samples share."""
    if dialect in MYSQL_DIALECTS:
        return WORDS | _MYSQL
    return WORDS | (_POSTGRESQL if dialect == "postgresql" else _SQLITE)
