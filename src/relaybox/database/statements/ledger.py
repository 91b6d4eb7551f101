"""SQL statements of operators' queries and changes.

A change checks rows under their locks and writes the audit row in the same transaction. PostgreSQL needs one
statement; elsewhere it is ``…_lock``, ``…_write`` and ``audit``.
"""

from __future__ import annotations

from collections.abc import Iterable

from relaybox.database.schema import MYSQL
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
    # Words the status unlike any partial index, so that the planner keeps the index of keys.
    "first_of_key": """
SELECT {entry}, {now} FROM {event} WHERE {head} = :destination AND ordering_key = :key AND {open}
    AND (status = 'failed') = :failed AND {unleased}
ORDER BY position LIMIT :limit""",
}

WORDS = {
    "settled_lease": "leased_until = NULL, lease_token = NULL, lease_owner = NULL, updated_at = {now}",
    "backs_off": "(next_attempt_at > {now} AND last_attempt_at IS NOT NULL)",
    # Does not name the open statuses: their index would look like the shorter way to the planner.
    "open_and_free": "status NOT IN ('delivered', 'discarded') AND {unleased}",
    # A row that failed again has another error. The CASE keeps the planner on the index of ids.
    "as_seen": """CASE WHEN status IN (:statuses) AND destination IN (:destinations)
    THEN status <> 'failed' OR updated_at <= :seen END""",
    "retry_where": "status NOT IN ('delivered', 'discarded') AND {unleased} AND {as_seen} "
    "AND (next_attempt_at IS NULL AND status = 'failed' OR {backs_off})",
    # MySQL reads values that it has just set, so ``status`` comes last.
    "retry_set": """attempts = CASE WHEN status = 'failed' THEN 0 ELSE attempts END,
    crashes = CASE WHEN status = 'failed' THEN 0 ELSE crashes END,
    error_message = CASE WHEN status = 'failed' THEN NULL ELSE error_message END,
    next_attempt_at = {least}(created_at, {now}), updated_at = {now}, status = 'pending'""",
    "discard_where": "{open_and_free} AND {as_seen}",
    "discard_set": "next_attempt_at = NULL, {settled_lease}, status = 'discarded'",
    "move_where": "destination = :from_ AND {open_and_free}",
    # A scheduled event stays scheduled; a row that waited for its old destination becomes due.
    "move_set": """destination = :to, ordering_key = CASE WHEN :ordered THEN ordering_key END,
    next_attempt_at = CASE WHEN status = 'failed' THEN NULL
        WHEN last_attempt_at IS NULL AND next_attempt_at IS NOT NULL THEN next_attempt_at
        ELSE {least}(created_at, {now}) END,
    attempts = CASE WHEN status = 'failed' THEN attempts ELSE 0 END,
    crashes = CASE WHEN status = 'failed' THEN crashes ELSE 0 END, {settled_lease}""",
    "resume_where": "name = :destination AND (paused_at IS NOT NULL OR circuit <> 'closed')",
    "resume_set": """paused_at = NULL, paused_until = NULL, paused_by = NULL, pause_reason = NULL,
    circuit = 'closed', circuit_until = NULL, circuit_reason = NULL, updated_at = {now}""",
    "pause_where": "name = :destination",
    "pause_set": """paused_at = {now}, paused_until = :until, paused_by = :actor, pause_reason = :reason,
    updated_at = {now}""",
    "copy": """copy, event_id, target, aggregate_type, aggregate_id, event_type, payload, payload_data,
    payload_encoding, {replay_headers}, CASE WHEN keyed THEN ordering_key END, idempotency_key,
    max_attempts""",
    "audited": """audited AS (
    INSERT INTO {audit} (actor, action, details, affected)
    SELECT :actor, :action, CAST(:details AS jsonb), count(*) FROM changed HAVING count(*) > 0
)""",
}

_POSTGRESQL_WORDS = {
    "records": """json_to_recordset(CAST(:records AS json))
    AS s(id uuid, copy uuid, origin text, target text, keyed boolean, handed_over boolean)""",
    "replay_headers": """CASE jsonb_typeof(headers) WHEN 'object' THEN headers - 'relaybox-shadow'
    ELSE headers END || jsonb_build_object('relaybox-replay', origin)""",
}
_MYSQL_WORDS = {
    "records": """JSON_TABLE(:records, '$[*]' COLUMNS (
    id CHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$.id',
    copy CHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$.copy',
    origin VARCHAR(36) PATH '$.origin', target VARCHAR(100) PATH '$.target', keyed INT PATH '$.keyed')) s""",
    "replay_headers": """JSON_SET(JSON_REMOVE(headers, '$."relaybox-shadow"'),
    '$."relaybox-replay"', origin)""",
}
_SQLITE_WORDS = {
    "records": """(SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.copy') AS copy,
    json_extract(value, '$.origin') AS origin, json_extract(value, '$.target') AS target,
    json_extract(value, '$.keyed') AS keyed FROM json_each(:records)) AS s""",
    "replay_headers": _MYSQL_WORDS["replay_headers"],
}

CHANGE_ROWS = """
WITH locked AS MATERIALIZED (
    SELECT id FROM {event} WHERE id IN (:ids) AND {ACTION_where} ORDER BY id FOR UPDATE
), changed AS (
    UPDATE {event} SET {ACTION_set} WHERE id = ANY (ARRAY(SELECT id FROM locked)) RETURNING id
), {audited}
SELECT id FROM changed"""
CHANGE_DESTINATION = """
WITH changed AS (
    UPDATE {destination} SET {ACTION_set} WHERE {ACTION_where} RETURNING name
), {audited}
SELECT name FROM changed"""
LOCK_ROWS = "SELECT id FROM {event} {by_id} WHERE id IN (:ids) AND {ACTION_where} ORDER BY id {lock}"
WRITE_ROWS = "UPDATE {event} {by_id} SET {ACTION_set} WHERE id IN (:ids)"
LOCK_DESTINATION = "SELECT name FROM {destination} WHERE {ACTION_where} {lock}"
WRITE_DESTINATION = "UPDATE {destination} SET {ACTION_set} WHERE {ACTION_where}"
ROWS = ("retry", "discard", "move")
DESTINATIONS = ("pause", "resume")

POSTGRESQL = {
    **{name: CHANGE_ROWS.replace("ACTION", name) for name in ROWS},
    **{name: CHANGE_DESTINATION.replace("ACTION", name) for name in DESTINATIONS},
    "replay": """
WITH s AS MATERIALIZED (SELECT * FROM {records}), final AS MATERIALIZED (
    SELECT s.copy, s.origin, s.target, s.keyed, s.handed_over, e.* FROM s, {event} AS e
    WHERE e.id = ANY (ARRAY(SELECT id FROM s)) AND e.id = s.id AND e.status <> 'pending' AND {as_seen}
    ORDER BY e.id FOR UPDATE OF e
), changed AS (
    INSERT INTO {event} ({inserted}, status, delivered_at)
    SELECT {copy}, CASE WHEN handed_over THEN NULL ELSE {now} END,
        CASE WHEN handed_over THEN 'delivered' ELSE 'pending' END, CASE WHEN handed_over THEN {now} END
    FROM final ORDER BY position RETURNING id
), {audited}
SELECT id FROM changed""",
}
STEPWISE = {
    **{f"{name}_lock": LOCK_ROWS.replace("ACTION", name) for name in ROWS},
    **{f"{name}_write": WRITE_ROWS.replace("ACTION", name) for name in ROWS},
    **{f"{name}_lock": LOCK_DESTINATION.replace("ACTION", name) for name in DESTINATIONS},
    **{f"{name}_write": WRITE_DESTINATION.replace("ACTION", name) for name in DESTINATIONS},
    "replay_lock": """
SELECT s.copy FROM {records} {join} {event} e {by_id} ON e.id = s.id
WHERE e.status <> 'pending' AND {as_seen} ORDER BY e.id {lock}""",
    "replay_write": """
INSERT INTO {event} ({inserted}) SELECT {copy}, {now} FROM {records} {join} {event} e {by_id} ON e.id = s.id
WHERE e.status <> 'pending' AND {as_seen} ORDER BY e.position""",
    "audit": """
INSERT INTO {audit} (actor, action, details, affected) VALUES (:actor, :action, :details, :affected)""",
}


def next_names(dialect: str) -> dict[str, str]:
    """Return one statement per index that begins with destinations, to step from name to name."""
    statuses = () if dialect in MYSQL else ("pending", "failed", "delivered")
    conditions = [f"status = '{status}'" for status in statuses] or ["destination IS NOT NULL"]
    return {condition: NEXT_NAME.replace("{condition}", condition) for condition in conditions}


def texts(dialect: str, columns: Iterable[str]) -> Texts:
    """Return the ledger's statements for a database; ``columns`` are those of an entry."""
    words = WORDS | {"entry": ", ".join(columns)}
    questions = QUESTIONS | next_names(dialect)
    if dialect == "postgresql":
        return Texts(questions | POSTGRESQL, words | _POSTGRESQL_WORDS)
    return Texts(questions | STEPWISE, words | (_MYSQL_WORDS if dialect in MYSQL else _SQLITE_WORDS))
