"""Every SQL statement of upkeep; the words are those of ``delivery.py``."""

from __future__ import annotations

from relaybox.database.statements.delivery import Texts

PROMPT = 3_600.0
"""Extra seconds to keep idempotency keys: a row final this soon after its emit needs no note at its key."""

# The leader's statements need a current term. The fence locks its row, in the same transaction.
LED = "EXISTS (SELECT 1 FROM {leader} WHERE name = 'upkeep' AND term = :term AND leads_until > {now})"
FENCE = "SELECT term FROM {leader} WHERE name = 'upkeep' AND term = :term AND leads_until > {now} {lock}"

# Rows whose MOMENT is older than :seconds, oldest first. MySQL and SQLite count them in another statement.
OLD_IN_POSTGRESQL = """
DELETE FROM {TABLE} WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {TABLE} WHERE MOMENT < (SELECT {later}) AND {led}
    ORDER BY MOMENT LIMIT :limit FOR UPDATE SKIP LOCKED)) RETURNING 1"""
OLD_IN_SQLITE = """
DELETE FROM {TABLE} WHERE rowid IN (
    SELECT rowid FROM {TABLE} WHERE MOMENT < {later} ORDER BY MOMENT LIMIT :limit)"""
OLD_IN_MYSQL = "DELETE FROM {TABLE} WHERE MOMENT < {later} ORDER BY MOMENT LIMIT :limit"


def prunings(text: str, **moments: str) -> dict[str, str]:
    """Return the statement for each table, whose rows have the age of that column."""
    return {name: text.replace("TABLE", name).replace("MOMENT", moment) for name, moment in moments.items()}


ANY_DATABASE = {
    "members": "SELECT name, seen_at FROM {relay}",
    "now": "SELECT {now}",
    "forget_members": "DELETE FROM {relay} WHERE name IN (:names) AND seen_at < {later}",
    "leave": "DELETE FROM {relay} WHERE name = :me",
    "open_election": """
INSERT INTO {leader} (name, relay, term, leads_until) VALUES ('upkeep', '', 0, {now}) {or_nothing}""",
    "lead": """
UPDATE {leader} SET term = term + CASE WHEN relay = :me AND leads_until > {now} THEN 0 ELSE 1 END,
    relay = :me, leads_until = {later}
WHERE name = 'upkeep' AND (relay = :me OR leads_until <= {now})""",
    "leading": "SELECT term FROM {leader} WHERE name = 'upkeep' AND relay = :me AND leads_until > {now}",
    "show_leader": """
UPDATE {relay} SET term = (SELECT l.term FROM {leader} l WHERE l.name = 'upkeep'),
    leads_until = (SELECT l.leads_until FROM {leader} l WHERE l.name = 'upkeep')
WHERE name = :me AND name = (SELECT l.relay FROM {leader} l WHERE l.name = 'upkeep')""",
    "current_term": "SELECT term FROM {leader} WHERE name = 'upkeep' AND leads_until > {now}",
    "resign": "UPDATE {leader} SET leads_until = {now} WHERE relay = :me AND leads_until > {now}",
    "hide_leader": "UPDATE {relay} SET leads_until = NULL WHERE name = :me",
    "fence": FENCE,
    "said": "SELECT destination, relay, setting, said_at FROM {setting} ORDER BY destination, relay",
    "known": "SELECT relay, destination FROM {setting}",
    # Keep all settings of a member: a partial set would look complete.
    "unsay": """
DELETE FROM {setting} WHERE destination = :destination AND relay = :relay AND said_at <= {later}
  AND NOT EXISTS (SELECT 1 FROM {relay} WHERE name = :relay)""",
    "fall_silent": "UPDATE {setting} SET said_at = :at WHERE relay = :me",
    "walk_events": "SELECT id, destination, status FROM {event} WHERE id > :after ORDER BY id LIMIT :limit",
    "walk_attempts": """
SELECT delivery_id, (SELECT e.id FROM {event} e WHERE e.id = a.delivery_id) FROM {attempt} a
WHERE delivery_id > :after ORDER BY delivery_id LIMIT :limit""",
    "unrouted": "{unrouted} {in_turn}",
    "unrouted_after": "{unrouted} AND {beyond} {in_turn}",
    "waiting": """
SELECT id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_data, payload_encoding,
    headers, ordering_key, idempotency_key, max_attempts, next_attempt_at > {now}
FROM {event} {by_id} WHERE {listed_ids} ORDER BY position""",
    "stuck": """
SELECT k.ordering_key FROM {keys}
WHERE (SELECT status = 'pending' AND next_attempt_at IS NULL AND {unleased} FROM {event}
    WHERE {head} = :destination AND ordering_key = k.ordering_key AND {open} ORDER BY position LIMIT 1)""",
}

NOT_MYSQL = {
    "be_seen": """
INSERT INTO {relay} (name, host, pid, version, seen_at) VALUES (:me, :host, :pid, :version, {now})
ON CONFLICT (name) DO UPDATE SET host = excluded.host, pid = excluded.pid, version = excluded.version,
    seen_at = excluded.seen_at""",
    "record": """
INSERT INTO {stats} (minute, destination, relay, delivered, retried, failed, lag)
VALUES (:minute, :destination, :relay, :delivered, :retried, :failed, :lag)
ON CONFLICT (minute, destination, relay) DO UPDATE SET delivered = excluded.delivered,
    retried = excluded.retried, failed = excluded.failed, lag = excluded.lag""",
    "say": """
INSERT INTO {setting} (destination, relay, setting, said_at) VALUES (:destination, :me, :setting, {now})
ON CONFLICT (destination, relay) DO UPDATE SET setting = excluded.setting, said_at = excluded.said_at""",
    # Parked rows stand at one end of the index of due rows.
    "parked": """
SELECT ordering_key FROM {event}
WHERE destination = :destination AND status = 'pending' AND next_attempt_at IS NULL
ORDER BY next_attempt_at, position LIMIT :limit""",
    "next_keys": """
WITH RECURSIVE k (ordering_key, number) AS (
    SELECT (SELECT ordering_key FROM {event} WHERE {keyed} AND ordering_key >= :first
        ORDER BY ordering_key LIMIT 1), 1
    UNION ALL
    SELECT (SELECT e.ordering_key FROM {event} e WHERE {keyed} AND e.ordering_key > k.ordering_key
        ORDER BY e.ordering_key LIMIT 1), number + 1
    FROM k WHERE k.ordering_key IS NOT NULL AND number < :limit)
SELECT ordering_key FROM k WHERE ordering_key IS NOT NULL ORDER BY number""",
    "kept": """
SELECT destination FROM {event} WHERE status = 'delivered' AND destination > :after
ORDER BY destination, delivered_at LIMIT 1""",
}

UNROUTED = """
SELECT id, next_attempt_at, position, event_type FROM {event} {by_due}
WHERE {due} = '' AND status = 'pending' AND {unleased}"""
# An unordered event stays scheduled; an ordered one becomes due now, in the order of routing.
ROUTED = """{routed_event},
    CASE WHEN s.ordering_key IS NULL THEN e.next_attempt_at ELSE {now} END, e.created_at"""
# A row that no relay sends is inserted as delivered; such a destination needs PostgreSQL.
ROUTED_OR_FINAL = """{routed_event},
    CASE WHEN s.final THEN NULL WHEN s.ordering_key IS NULL THEN e.next_attempt_at ELSE {now} END,
    e.created_at, CASE WHEN s.final THEN 'delivered' ELSE 'pending' END, CASE WHEN s.final THEN {now} END"""
ROUTED_EVENT = """s.copy, e.event_id, s.destination, e.aggregate_type, e.aggregate_id, e.event_type,
    e.payload, e.payload_data, e.payload_encoding, e.headers, s.ordering_key, e.idempotency_key,
    s.max_attempts"""

# After an event's last row is removed, only its idempotency key shows its age. The rows of an event share the
# first 16 digits of their ids.
REMOVED = "id, event_id, event_type, idempotency_key, created_at, updated_at"
FINAL_AT = """(SELECT max(CASE WHEN e.status IN ('pending', 'failed') THEN {now} ELSE e.updated_at END)
    FROM {event} e {by_id}
    WHERE e.id >= {first_of_event} AND e.id <= {last_of_event} AND e.event_id = i.event_id)"""
REMOVE = """
, gone AS (DELETE FROM {attempt} WHERE delivery_id = ANY (ARRAY(SELECT id FROM old)))
, late AS (UPDATE {idempotency} AS i SET created_at = old.updated_at FROM old
    WHERE old.updated_at > old.created_at + {prompt} * interval '1 second'
      AND i.event_type = old.event_type AND i.idempotency_key = old.idempotency_key
      AND i.event_id = old.event_id AND i.created_at < old.updated_at)
DELETE FROM {event} WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING delivered_at"""

# PostgreSQL removes in one statement. A clock read in a subquery can bound an index. While a long transaction
# delays vacuum, :since keeps each batch from scanning the rows removed before it.
POSTGRESQL = (
    ANY_DATABASE
    | NOT_MYSQL
    | prunings(OLD_IN_POSTGRESQL, inbox="processed_at", stats="minute", audit="at")
    | {
        "delivered": """
WITH old AS MATERIALIZED (
    SELECT {removed} FROM {event}
    WHERE destination = :destination AND status = 'delivered' AND delivered_at < (SELECT {later})
      AND delivered_at >= :since AND {led}
    ORDER BY delivered_at LIMIT :limit FOR UPDATE OF {event_alias} SKIP LOCKED){remove}""",
        "discarded": """
WITH old AS MATERIALIZED (
    SELECT {removed} FROM {event}
    WHERE id = ANY (CAST(:ids AS uuid[])) AND status = 'discarded' AND updated_at < {later} AND {led}
    FOR UPDATE OF {event_alias} SKIP LOCKED){remove}""",
        "forget_attempts": """
DELETE FROM {attempt} WHERE delivery_id = ANY (CAST(:ids AS uuid[])) AND {led}""",
        "keys": """
WITH old AS MATERIALIZED (
    SELECT ctid AS place, event_id, created_at FROM {idempotency}
    WHERE created_at < (SELECT {later}) AND created_at >= :since AND {led}
    ORDER BY created_at LIMIT :limit FOR UPDATE SKIP LOCKED
), seen AS MATERIALIZED (SELECT place, {final_at} AS final_at FROM old AS i
), judged AS MATERIALIZED (SELECT place, final_at, final_at >= {later} AS kept FROM seen
), kept AS (
    UPDATE {idempotency} AS i SET created_at = (SELECT final_at FROM judged WHERE place = i.ctid)
    WHERE ctid = ANY (ARRAY(SELECT place FROM judged WHERE kept))
), gone AS (
    DELETE FROM {idempotency} WHERE ctid = ANY (ARRAY(SELECT place FROM judged WHERE kept IS NOT TRUE))
    RETURNING 1
)
SELECT (SELECT count(*) FROM gone), count(*), max(created_at) FROM old""",
        "make_stuck_due": """
UPDATE {event} SET {make_due} WHERE id = ANY (ARRAY(
    SELECT id FROM {event} WHERE id = ANY (ARRAY({heads_of_keys})) AND {waiting} AND {unleased}
    FOR UPDATE SKIP LOCKED)) AND {waiting} RETURNING 1""",
        "route": """
WITH s AS MATERIALIZED (SELECT * FROM {targets}), taken AS MATERIALIZED (
    SELECT * FROM {event} WHERE id = ANY (ARRAY(SELECT id FROM s)) AND {still_unrouted} AND {led}
    ORDER BY id FOR UPDATE OF {event_alias} NOWAIT
), copies AS (
    INSERT INTO {event} ({inserted}, created_at, status, delivered_at)
    SELECT {routed_or_final} FROM s JOIN taken e ON e.id = s.id ORDER BY e.position, s.line
), forgotten AS (
    DELETE FROM {attempt} WHERE delivery_id = ANY (ARRAY(SELECT id FROM taken))
)
DELETE FROM {event} WHERE id = ANY (ARRAY(SELECT id FROM taken)) RETURNING id""",
        "unpark": """
UPDATE {event} SET {make_due} WHERE id = ANY (ARRAY(
    SELECT id FROM {event}
    WHERE destination = :destination AND status = 'pending' AND next_attempt_at IS NULL
      AND (leased_until IS NULL OR leased_until <= (SELECT {now}))
    ORDER BY next_attempt_at, position LIMIT :limit FOR UPDATE SKIP LOCKED)) AND {waiting} RETURNING 1""",
    }
)

STEPWISE = ANY_DATABASE | {
    "delivered": """
SELECT {removed}, delivered_at FROM {event}
WHERE destination = :destination AND status = 'delivered' AND delivered_at < {later}
  AND delivered_at >= :since
ORDER BY delivered_at LIMIT :limit {skip_locked}""",
    "discarded": """
SELECT {removed}, delivered_at FROM {event} {by_id}
WHERE id IN (:ids) AND status = 'discarded' AND updated_at < {later} {skip_locked}""",
    "find_keys": """
SELECT event_type, idempotency_key, created_at, {final_at}, {later} FROM {idempotency} i
WHERE created_at < {later} AND created_at >= :since
ORDER BY created_at LIMIT :limit {skip_locked}""",
    "keep_key": """
UPDATE {idempotency} SET created_at = :at
WHERE event_type = :event_type AND idempotency_key = :key AND created_at < :at""",
    "find_marks": """
SELECT consumer, message_id FROM {inbox} WHERE processed_at < {later}
ORDER BY processed_at LIMIT :limit {skip_locked}""",
    "make_stuck_due": """
SELECT e.id FROM ({heads_of_keys}) t {join} {event} e {by_id} ON e.id = t.id
WHERE e.status = 'pending' AND e.next_attempt_at IS NULL AND {unleased} {skip_locked}""",
    "make_due": "UPDATE {event} {by_id} SET {make_due} WHERE id IN (:ids)",
    "lock_unrouted": """
SELECT id FROM {event} {by_id} WHERE id IN (:ids) AND {still_unrouted} ORDER BY id {lock_now}""",
    "route": """
INSERT INTO {event} ({inserted}, created_at)
SELECT {routed} FROM {targets} {join} {event} e {by_id} ON e.id = s.id ORDER BY e.position, s.line""",
}

SQLITE = (
    STEPWISE
    | NOT_MYSQL
    | prunings(OLD_IN_SQLITE, stats="minute", audit="at")
    | {
        "changed": "SELECT changes()",
        "unpark": """
SELECT id FROM {event}
WHERE destination = :destination AND status = 'pending' AND next_attempt_at IS NULL AND {unleased}
ORDER BY next_attempt_at, position LIMIT :limit""",
        "remove": "DELETE FROM {event} WHERE id IN (:ids)",
        "forget_attempts": "DELETE FROM {attempt} WHERE delivery_id IN (:ids)",
        "forget_keys": """
DELETE FROM {idempotency} WHERE event_type = :of AND idempotency_key IN (:keys)""",
        "forget_marks": "DELETE FROM {inbox} WHERE consumer = :of AND message_id IN (:keys)",
    }
)

MYSQL = (
    STEPWISE
    | prunings(OLD_IN_MYSQL, stats="minute", audit="at")
    | {
        "be_seen": """
INSERT INTO {relay} (name, host, pid, version, seen_at) VALUES (:me, :host, :pid, :version, {now})
ON DUPLICATE KEY UPDATE host = VALUES(host), pid = VALUES(pid), version = VALUES(version),
    seen_at = VALUES(seen_at)""",
        "record": """
INSERT INTO {stats} (minute, destination, relay, delivered, retried, failed, lag)
VALUES (:minute, :destination, :relay, :delivered, :retried, :failed, :lag)
ON DUPLICATE KEY UPDATE delivered = VALUES(delivered), retried = VALUES(retried),
    failed = VALUES(failed), lag = VALUES(lag)""",
        "say": """
INSERT INTO {setting} (destination, relay, setting, said_at) VALUES (:destination, :me, :setting, {now})
ON DUPLICATE KEY UPDATE setting = VALUES(setting), said_at = VALUES(said_at)""",
        "parked": """
SELECT ordering_key FROM {event} {by_due}
WHERE due_destination = :destination AND status = 'pending' AND next_attempt_at IS NULL
ORDER BY position LIMIT :limit""",
        # MySQL cannot step from key to key.
        "keys_of_next_rows": """
SELECT DISTINCT ordering_key FROM (SELECT ordering_key FROM {event} {by_head}
    WHERE head_destination = :destination AND ordering_key >= :first
    ORDER BY ordering_key LIMIT :limit) t ORDER BY ordering_key""",
        # MySQL does not know that null times are in the order of position.
        "unpark": """
SELECT id FROM {event} {by_due}
WHERE due_destination = :destination AND status = 'pending' AND next_attempt_at IS NULL AND {unleased}
ORDER BY position LIMIT :limit FOR UPDATE SKIP LOCKED""",
        # With the status it would scan all pending rows.
        "kept": "SELECT destination FROM {event} WHERE destination > :after ORDER BY destination LIMIT 1",
        "changed": "SELECT ROW_COUNT()",
        "remove": "DELETE e FROM {event} e {by_id} WHERE e.id IN (:ids)",
        "forget_attempts": "DELETE a FROM {attempt} a {by_id} WHERE a.delivery_id IN (:ids)",
        "forget_keys": """
DELETE i FROM {idempotency} i {by_id} WHERE i.event_type = :of AND i.idempotency_key IN (:keys)""",
        "forget_marks": "DELETE i FROM {inbox} i {by_id} WHERE i.consumer = :of AND i.message_id IN (:keys)",
    }
)

# Does not name pending: its index would look like the shorter way to the planner.
STILL_UNROUTED = "destination = '' AND status NOT IN ('delivered', 'failed', 'discarded') AND {unleased}"
WORDS = {
    "remove": REMOVE,
    "removed": REMOVED,
    "prompt": f"{PROMPT:g}",
    "led": LED,
    "final_at": FINAL_AT,
    "unrouted": UNROUTED,
    "in_turn": "ORDER BY next_attempt_at, position LIMIT :limit",
    "routed": ROUTED,
    "routed_or_final": ROUTED_OR_FINAL,
    "routed_event": ROUTED_EVENT,
    "still_unrouted": STILL_UNROUTED,
    # In the words of the partial index of heads.
    "keyed": "{head} = :destination AND status IN ('pending', 'failed') AND ordering_key IS NOT NULL",
}
POSTGRESQL_WORDS = WORDS | {
    "first_of_event": "CAST(left(CAST(i.event_id AS text), 18) || '-0000-000000000000' AS uuid)",
    "last_of_event": "CAST(left(CAST(i.event_id AS text), 18) || '-ffff-ffffffffffff' AS uuid)",
    "beyond": "(next_attempt_at, position) > (:since, :position)",
    "listed_ids": "id = ANY (CAST(:ids AS uuid[]))",
    "targets": """json_to_recordset(CAST(:targets AS json)) AS s(id uuid, copy uuid, destination text,
        ordering_key text, max_attempts int, final boolean, line int)""",
}
SQLITE_WORDS = POSTGRESQL_WORDS | {
    "first_of_event": "substr(i.event_id, 1, 16) || '0000000000000000'",
    "last_of_event": "substr(i.event_id, 1, 16) || 'ffffffffffffffff'",
    "lock_now": "",
    "listed_ids": "id IN (:ids)",
    "targets": """(SELECT json_extract(value, '$.id') AS id, json_extract(value, '$.copy') AS copy,
    json_extract(value, '$.destination') AS destination,
    json_extract(value, '$.ordering_key') AS ordering_key,
    json_extract(value, '$.max_attempts') AS max_attempts, json_extract(value, '$.line') AS line
FROM json_each(:targets)) AS s""",
}
MYSQL_WORDS = WORDS | {
    "first_of_event": "CONCAT(LEFT(i.event_id, 16), '0000000000000000')",
    "last_of_event": "CONCAT(LEFT(i.event_id, 16), 'ffffffffffffffff')",
    "lock_now": "FOR UPDATE NOWAIT",
    # MySQL derives no index range from a comparison of rows.
    "beyond": "(next_attempt_at > :since OR next_attempt_at = :since AND position > :position)",
    "listed_ids": "id IN (:ids)",
    "targets": """JSON_TABLE(:targets, '$[*]' COLUMNS (
    id CHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$.id',
    copy CHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$.copy',
    destination VARCHAR(100) CHARACTER SET utf8mb4 PATH '$.destination',
    ordering_key VARCHAR(255) CHARACTER SET utf8mb4 PATH '$.ordering_key',
    max_attempts INT PATH '$.max_attempts', line INT PATH '$.line')) s""",
}

# The mark of a queued Celery task, so that only one is queued at a time.
TASK_MARK = Texts(
    {
        "make": """
INSERT INTO {leader} (name, relay, term, leads_until) VALUES (:mark, '', 0, {now}) {or_nothing}""",
        "mark": """
UPDATE {leader} SET term = term + 1, leads_until = {later} WHERE name = :mark AND leads_until <= {now}""",
        "clear": "UPDATE {leader} SET leads_until = {now} WHERE name = :mark AND leads_until > {now}",
    }
)


def texts(dialect: str) -> Texts:
    """Return the statements of upkeep for a database."""
    if dialect == "postgresql":
        return Texts(POSTGRESQL, POSTGRESQL_WORDS)
    return Texts(SQLITE, SQLITE_WORDS) if dialect == "sqlite" else Texts(MYSQL, MYSQL_WORDS)
