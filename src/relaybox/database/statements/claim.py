"""PostgreSQL's statements that claim due rows, or chosen ones.

They address rows by ctid. A row that changed since the snapshot has another ctid, so a claim locks exactly
the rows that it judged.

A claim stops when payloads and headers exceed :bytes. Their size needs decompression (an array holds its
elements uncompressed); the stored size is free to read and never larger. So only large rows that may fit by
their stored size are decompressed, and no payload goes through the sums.
"""

from __future__ import annotations

_STORED = "COALESCE(pg_column_size(payload), octet_length(payload_data)) + pg_column_size(headers)"
_SIZE = "pg_column_size(ARRAY[payload, headers]) + COALESCE(octet_length(payload_data), 0)"
_WEIGHED = {
    "weighed": f"{_STORED} AS stored, CASE WHEN {_STORED} <= 8192 THEN {_SIZE} END AS light",
    # An int, because a sum of ints is a bigint; a sum of bigints is a numeric, which is slower. A row that
    # does not fit by its stored size counts as the largest int.
    "size": "CASE WHEN light IS NOT NULL THEN light WHEN sum(stored) OVER line <= :bytes "  # noqa: S608
    "THEN (SELECT " + _SIZE + " FROM {event} WHERE ctid = tid) ELSE 2147483647 END AS size",
}

_DUE = _WEIGHED | {
    "chosen": "",
    "these": "destination = :destination AND status = 'pending'",
    "window": "LIMIT :limit",
    "enough": "LIMIT :limit",
    "id": "",
    "own_head": "",
    "free": "{free}",
}
# Worded differently from the index of pending rows, or the planner may use it instead of the ids. The window
# holds all chosen rows: keys that must wait must not fill it.
_CHOSEN = _WEIGHED | {
    "chosen": """chosen AS MATERIALIZED (
    SELECT CAST(value AS uuid) AS id FROM json_array_elements_text(CAST(:only AS json))
), """,
    "these": """id = ANY (ARRAY(SELECT id FROM chosen)) AND destination = :destination
      AND status NOT IN ('delivered', 'failed', 'discarded')""",
    "window": "",
    "enough": "",
    "id": "id, ",
    "own_head": " AND head.id IN (SELECT id FROM chosen)",
    "free": "({free} AND id IN (SELECT id FROM chosen))",
}

# Most claims: nothing to separate. ``since`` skips delivered rows that await a vacuum in the index.
_DUE_UNSUSPECTED = """
    SELECT ctid AS tid, %(weighed)s FROM {event}
    WHERE destination = :destination AND status = 'pending' AND next_attempt_at <= (SELECT {now})
      AND next_attempt_at >= COALESCE(CAST(:since AS timestamptz), '-infinity')
      AND (leased_until IS NULL OR leased_until <= (SELECT {now})) AND NOT {suspect} AND NOT {held}
      AND {unhurried}
    ORDER BY next_attempt_at, position LIMIT :limit
    FOR UPDATE OF {event_alias} SKIP LOCKED"""
_UNSUSPECTED = _WEIGHED | {"due": _DUE_UNSUSPECTED % _WEIGHED}

# All rows, or none if too large together. Without running sums, a claim of one row takes a fifth less.
_CLAIM_LIGHT = """
UPDATE {event} SET {lease}
WHERE ctid = ANY (CAST((
    SELECT CASE WHEN sum(COALESCE(light, 2147483647)) <= :bytes THEN array_agg(tid) END
    FROM (%(due)s) AS due) AS tid[]))
RETURNING {own_columns}"""

# Usually one sum shows that all rows fit; else running sums follow, unsorted, as any row may be left out. The
# first row always fits: its total is its own size.
_CLAIM_UNSUSPECTED = """
WITH due AS (%(due)s
), sized AS (
    SELECT tid, %(size)s FROM due WINDOW line AS (ROWS UNBOUNDED PRECEDING)
), summed AS (
    SELECT tid, size, sum(size) OVER (ROWS UNBOUNDED PRECEDING) AS total FROM sized
)
UPDATE {event} SET {lease}
WHERE ctid = ANY (CASE
    WHEN (SELECT sum(COALESCE(light, 2147483647)) FROM due) <= :bytes THEN ARRAY(SELECT tid FROM due)
    ELSE ARRAY(SELECT tid FROM summed WHERE total = size OR total <= :bytes)
END)
RETURNING {own_columns}"""

_CLAIM = """
WITH %(chosen)sdue AS MATERIALIZED (
    SELECT ctid AS tid, next_attempt_at, position, {suspicion} AS suspicion, %(weighed)s FROM {event}
    WHERE %(these)s AND next_attempt_at <= (SELECT {now})
      AND (leased_until IS NULL OR leased_until <= (SELECT {now})) AND {wanted} AND NOT {held} AND {unhurried}
    ORDER BY next_attempt_at, position LIMIT :limit
    FOR UPDATE OF {event_alias} SKIP LOCKED
), taken AS (
    SELECT tid, suspicion, first_value(suspicion) OVER line AS first, row_number() OVER line AS rank, %(size)s
    FROM due WINDOW line AS (ORDER BY next_attempt_at, position)
), summed AS (
    SELECT tid, rank, sum(size) OVER (ORDER BY rank) AS total FROM taken WHERE {together}
)
UPDATE {event} SET {lease}
WHERE ctid = ANY (ARRAY(SELECT tid FROM summed WHERE rank = 1 OR total <= :bytes))
RETURNING {own_columns}"""

_CLAIM_ORDERED = """
WITH %(chosen)sdue AS MATERIALIZED (
    SELECT ctid AS tid, ordering_key, position, next_attempt_at, {suspicion} AS suspicion FROM {event}
    WHERE %(these)s AND next_attempt_at <= (SELECT {now})
      AND (leased_until IS NULL OR leased_until <= (SELECT {now})) AND {wanted} AND NOT {held} AND {unhurried}
      AND current_setting('relaybox.locked', true) = :destination
    ORDER BY next_attempt_at, position %(window)s
), keys AS MATERIALIZED (
    SELECT ordering_key, count(*) AS due, min(next_attempt_at) AS since FROM due
    WHERE ordering_key IS NOT NULL GROUP BY ordering_key ORDER BY since, ordering_key
), visited AS MATERIALIZED (
    SELECT keys.ordering_key, keys.since, head.tid AS head, head.free AS goes, head.suspect AS doubted, run.*
    FROM keys CROSS JOIN LATERAL (
        SELECT ctid AS tid, %(id)sposition, {free} AS free, {suspect} AS suspect FROM {event}
        WHERE destination = :destination AND ordering_key = keys.ordering_key AND {open}
        ORDER BY position LIMIT 1) AS head
    LEFT JOIN LATERAL (
        SELECT ctid AS tid, position, %(free)s AS free, {suspicion} AS suspicion FROM {event}
        WHERE head.free%(own_head)s AND destination = :destination AND ordering_key = keys.ordering_key
          AND {open} AND position >= head.position
        ORDER BY position LIMIT least(CAST(:run AS bigint), greatest(
            keys.due, CAST(:limit AS bigint) / greatest(
                1, least(:spread, (SELECT count(*) FROM keys)))))) AS run ON true
    %(enough)s
), seen AS MATERIALIZED (
    SELECT tid, ordering_key, since, position, suspicion,
           bool_and(free AND (suspicion = 0 AND NOT doubted OR tid = head)) OVER (
               PARTITION BY ordering_key ORDER BY position) AS unbroken
    FROM visited WHERE tid IS NOT NULL
    UNION ALL
    SELECT tid, NULL, next_attempt_at, position, suspicion, true FROM due WHERE ordering_key IS NULL
), mine AS MATERIALIZED (
    SELECT ctid AS tid, %(weighed)s FROM {event}
    WHERE ctid = ANY (ARRAY(SELECT tid FROM seen WHERE unbroken))
    FOR UPDATE SKIP LOCKED
), line AS (
    SELECT seen.*, stored, light,
           ordering_key IS NULL AND mine.tid IS NOT NULL OR bool_and(mine.tid IS NOT NULL) OVER (
               PARTITION BY ordering_key ORDER BY position) AS whole
    FROM seen LEFT JOIN mine USING (tid) WHERE unbroken
), taken AS (
    SELECT tid, suspicion, first_value(suspicion) OVER line AS first, row_number() OVER line AS rank, %(size)s
    FROM line WHERE whole WINDOW line AS (ORDER BY since, ordering_key, position)
), summed AS (
    SELECT tid, rank, sum(size) OVER (ORDER BY rank) AS total FROM taken WHERE {together}
), locked AS MATERIALIZED (
    SELECT ctid AS head FROM {event}
    WHERE ctid = ANY (ARRAY(SELECT head FROM visited WHERE NOT goes)) FOR UPDATE SKIP LOCKED
), blocking AS (
    SELECT head FROM locked
    UNION ALL SELECT tid FROM mine WHERE tid = ANY (ARRAY(SELECT head FROM visited WHERE doubted))
), parked AS (
    UPDATE {event} SET next_attempt_at = NULL, updated_at = {now}
    WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM {event}
        WHERE ctid = ANY (ARRAY(
            SELECT due.tid FROM blocking JOIN visited USING (head) JOIN due USING (ordering_key)
            WHERE due.tid <> head))
        FOR UPDATE SKIP LOCKED))
    RETURNING 1
), claimed AS (
    UPDATE {event} SET {lease}
    WHERE ctid = ANY (ARRAY(SELECT tid FROM summed WHERE rank = 1 OR total <= :bytes))
    RETURNING {own_columns}
)
SELECT (SELECT count(*) FROM parked), claimed.* FROM (SELECT 1) AS one LEFT JOIN claimed ON true"""

POSTGRESQL_CLAIMS = {
    "claim": _CLAIM % _DUE,
    "claim_light": _CLAIM_LIGHT % _UNSUSPECTED,
    "claim_unsuspected": _CLAIM_UNSUSPECTED % _UNSUSPECTED,
    "claim_ordered": _CLAIM_ORDERED % _DUE,
    "claim_chosen": _CLAIM % _CHOSEN,
    "claim_chosen_ordered": _CLAIM_ORDERED % _CHOSEN,
}
