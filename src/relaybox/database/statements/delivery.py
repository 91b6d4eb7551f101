"""Every SQL statement of the delivery path, and how its parameters are bound.

``{word}`` is a table's quoted name or a piece of SQL, from ``WORDS`` or ``dialects.py``. ``:name`` is a
parameter; ``IN (:ids)`` takes a list. Lists of records travel as one JSON document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

from relaybox.database.dialects import Dialect
from relaybox.database.schema import Tables
from relaybox.database.statements.claim import POSTGRESQL_CLAIMS

ParamStyle: TypeAlias = Literal["format", "qmark", "numeric"]

INSERTED = (
    "id",
    "event_id",
    "destination",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "payload",
    "payload_data",
    "payload_encoding",
    "headers",
    "ordering_key",
    "idempotency_key",
    "max_attempts",
    "next_attempt_at",
)
"""The columns that ``emit`` writes, in the order of a row's values."""

FINAL = ("status", "delivered_at")
"""The columns that it also writes if Debezium reads the row."""

WORDS = {
    "inserted": ", ".join(INSERTED),
    "inserted_values": ", ".join(f":{name}" for name in INSERTED[:-1]),
    "final": ", ".join(FINAL),
    "first_due": "COALESCE(:next_attempt_at, {now})",
    # Makes an emitting transaction wait for the disk, even if the application's others do not: a sent event
    # must survive a server crash.
    "awaited": """CASE WHEN current_setting('synchronous_commit') = 'off'
    THEN set_config('synchronous_commit', 'local', true) END""",
    "columns": "{own_columns}, destination, lease_token, lease_owner",
    "own_columns": (
        "id, event_id, aggregate_type, aggregate_id, event_type, payload, payload_data, payload_encoding, "
        "headers, ordering_key, position, idempotency_key, attempts, max_attempts, crashes, created_at"
    ),
    "open": "status IN ('pending', 'failed') AND (status = 'pending' OR :block) AND ordering_key IS NOT NULL",
    # Two leases that expired unsettled make a row a suspect until it is settled. ``crashes`` is 1000 higher
    # while a death of the relay would count (see ``hold_alone``).
    "suspect": "(crashes > 1 OR crashes = 1 AND lease_token IS NOT NULL)",
    "deaths": """CASE WHEN crashes < 1000 THEN crashes WHEN crashes < 2000 THEN crashes - 1000
        ELSE 998 END""",
    # For a suspect, how many relays died while they held it; for any other row 0.
    "suspicion": """CASE WHEN {suspect} THEN {deaths} + CASE WHEN lease_token IS NULL THEN 0 ELSE 1 END
        ELSE 0 END""",
    # The same rule as ``ordering.together``.
    "together": """suspicion = first
        AND rank <= least(:limit, CASE first WHEN 0 THEN :limit ELSE 64 >> least(first, 6) END)""",
    "wanted": "(:suspects OR NOT {suspect})",
    # A claim need not wait for the disk: a server crash only loses the lease, and the rows are claimed again.
    # The rows themselves are on disk, because their emitter waited.
    "unhurried": "(SELECT set_config('synchronous_commit', 'off', true)) = 'off'",
    "unleased": "(leased_until IS NULL OR leased_until <= {now})",
    "free": """(status = 'pending' AND (next_attempt_at IS NULL OR next_attempt_at <= {now}) AND {unleased}
        AND {wanted})""",
    "paused": "(paused_at IS NOT NULL AND (paused_until IS NULL OR paused_until > {now}))",
    # A probe passes a circuit, but not a pause.
    "stopped": "({paused} OR (circuit <> 'closed' AND NOT :probe))",
    "held": "EXISTS (SELECT 1 FROM {destination} WHERE name = :destination AND {stopped})",
    # A claim that dies gives its attempts back, unless it was held alone. The numbers are capped to fit their
    # columns: one row edited by hand must not fail a whole claim.
    "lease": """attempts = {least}(attempts, 2147483646)
        + CASE WHEN lease_token IS NOT NULL AND crashes < 1000 THEN 0 ELSE 1 END,
    crashes = {least}({deaths}, 998) + CASE WHEN lease_token IS NULL THEN 0 ELSE 1 END,
    leased_until = {later}, lease_token = :token, lease_owner = :owner,
    last_attempt_at = {now}, updated_at = {now}""",
    "window": "id, ordering_key, position, 1, {suspicion}",
    "due_rows": "FROM {event} {by_due} WHERE {in_line}",
    "candidate": "id, ordering_key, position, {free}, {suspicion}",
    "locked_rows": """FROM {event} {by_id}
WHERE id IN (:ids) AND status IN ('pending', 'failed') ORDER BY id {skip_locked}""",
    "in_line": """\
{due} = :destination AND status = 'pending' AND next_attempt_at <= {now} AND {unleased} AND {wanted}
  AND NOT {held}
ORDER BY next_attempt_at, position LIMIT :limit""",
    "settlement": """{set}status = s.status,
    {set}attempts = e.attempts - CASE WHEN e.attempts > 0 THEN s.given_back ELSE 0 END,
    {set}crashes = CASE WHEN s.cut_off = 1 THEN {least}({deaths}, 998) + 1
        WHEN s.seconds IS NULL THEN {deaths} ELSE 0 END,
    {set}next_attempt_at = CASE WHEN s.status <> 'pending' THEN NULL
        WHEN s.seconds IS NULL THEN e.next_attempt_at ELSE {item_later} END,
    {set}delivered_at = CASE WHEN s.status = 'delivered' THEN {now} END,
    {set}error_message = COALESCE(s.error, e.error_message),
    {set}leased_until = NULL, {set}lease_token = NULL, {set}lease_owner = NULL, {set}updated_at = {now}""",
    "mine": "e.id = s.id AND e.lease_token = s.token AND e.status = 'pending'",
    "mine_now": "SELECT e.id FROM {items} STRAIGHT_JOIN {event} e {by_id} ON {mine}",
    "copied": ", ".join(INSERTED[:-1]),
    "copy": """copy, event_id, :dead_letter, aggregate_type, aggregate_id, event_type, payload, payload_data,
    payload_encoding, {dead_letter_headers}, CASE WHEN :ordered THEN ordering_key END, idempotency_key,
    :max_attempts""",
    "heads_of_keys": """SELECT (SELECT id FROM {event}
        WHERE {head} = :destination AND ordering_key = k.ordering_key AND {open}
        ORDER BY position LIMIT 1) AS id FROM {keys}""",
    # The first row of each key that is not being settled.
    "next_of_keys": """SELECT k.ordering_key, (SELECT id FROM {event}
        WHERE {head} = :destination AND ordering_key = k.ordering_key AND {open}""",
    "first_of_key": "ORDER BY position LIMIT 1) AS id FROM {keys}",
    "make_due": "next_attempt_at = {least}(created_at, {now}), updated_at = {now}",
    "parked": "status = 'pending' AND next_attempt_at IS NULL",
    "listed": "e.id = ANY (ARRAY(SELECT id FROM s)) AND e.id = s.id AND e.lease_token = s.token",
    "held_by": "unnest(CAST(:ids AS uuid[]), CAST(:tokens AS uuid[])) AS s(id, token)",
    "listed_held": "e.id = ANY (CAST(:ids AS uuid[])) AND e.id = s.id AND e.lease_token = s.token",
    "of_lease": "e.id = ANY (CAST(:ids AS uuid[])) AND e.lease_token = :token",
    "unless_all": "count(*), CASE WHEN count(*) < :count THEN string_agg(CAST(id AS text), ',') END",
    "waiting": "status NOT IN ('delivered', 'failed', 'discarded') AND next_attempt_at IS NULL",
}

ANY_DATABASE = {
    "now": "SELECT {now}",
    "insert": "INSERT INTO {event} ({inserted}) VALUES",
    "first_row": "({inserted_values}, {first_due})",
    "inserted_row": "({inserted_values}, {first_due})",
    # A duplicate writes nothing and is not an error; a concurrent one waits for the first to end.
    "remember_key": """
INSERT INTO {idempotency} (event_type, idempotency_key, event_id) VALUES (:event_type, :key, :event_id)
{or_nothing_but_the_key}""",
    "recall_key": """
SELECT event_id FROM {idempotency} WHERE event_type = :event_type AND idempotency_key = :key {latest}""",
    "ensure_destination": "INSERT INTO {destination} (name) VALUES (:destination) {or_nothing}",
    "read_destination": """
SELECT paused_at, paused_until, pause_reason, circuit, circuit_until, circuit_reason, {now}
FROM {destination} WHERE name = :destination""",
    "hold_alone": """
UPDATE {event} {by_id} SET crashes = {deaths} + CASE WHEN :alone THEN 1000 ELSE 0 END
WHERE id = :id AND lease_token = :token""",
    # Runs before the settle, which clears the tokens: a lost lease leaves no record either.
    "record_attempts": """
INSERT INTO {attempt} (delivery_id, attempt, relay, error_message)
SELECT s.id, s.attempt, s.relay, s.error FROM {items}
WHERE s.error IS NOT NULL AND s.token = (SELECT e.lease_token FROM {event} e WHERE e.id = s.id)
{or_replace_attempt}""",
}

STEPWISE = ANY_DATABASE | {
    "lock_destination": "SELECT name FROM {destination} WHERE name = :destination {lock}",
    # Sizes only of locked rows: a size may require reading the payload.
    "due": "SELECT {window} {due_rows}",
    "due_locked": "SELECT {window}, {size} {due_rows} {skip_locked}",
    "due_of_chosen": """
SELECT {window} FROM {chosen} {join} {event} {by_id} ON id = chosen_id WHERE {in_line}""",
    "heads": "{heads_of_keys}",
    # One key with its own limit, so that a long key costs no more than a short one.
    "run": """
SELECT * FROM (SELECT {candidate} FROM {event}
    WHERE {head} = :destination AND ordering_key = :key AND position >= :start AND {open}
    ORDER BY position LIMIT :share) AS run""",
    "lock": "SELECT {candidate}, {size} {locked_rows}",
    "lock_heads": "SELECT {candidate} {locked_rows}",
    "lease": "UPDATE {event} {by_id} SET {lease} WHERE id IN (:ids)",
    "fail_unreadable": """
UPDATE {event} {by_id} SET status = 'failed', error_message = :error, next_attempt_at = NULL,
    leased_until = NULL, lease_token = NULL, lease_owner = NULL, updated_at = {now} WHERE {this}""",
    "park": "UPDATE {event} {by_id} SET next_attempt_at = NULL, updated_at = {now} WHERE id IN (:ids)",
    "read": "SELECT {columns} FROM {event} {by_id} WHERE id IN (:ids) ORDER BY position",
    "copy_failed": """
INSERT INTO {event} ({copied}) SELECT {copy} FROM {items} {join} {event} e {by_id} ON {mine}
WHERE s.copy IS NOT NULL ORDER BY e.position""",
}

SQLITE = STEPWISE | {
    "settle": "UPDATE {event} AS e SET {settlement} FROM {items} WHERE {mine} RETURNING id",
    "forget_attempts": """
DELETE FROM {attempt} WHERE delivery_id IN (SELECT e.id FROM {items} CROSS JOIN {event} AS e WHERE {mine})""",
    "delete": """
DELETE FROM {event} WHERE id IN (SELECT e.id FROM {items} CROSS JOIN {event} AS e WHERE {mine})
RETURNING id""",
    "extend": "UPDATE {event} AS e SET leased_until = {later} FROM {items} WHERE {mine} RETURNING id, 1",
    "make_heads_due": "UPDATE {event} SET {make_due} WHERE id IN ({heads_of_keys}) AND {parked}",
}

# MySQL's UPDATE returns nothing: lock and read the rows that are still ours first.
MYSQL = STEPWISE | {
    "lock_rows": "SELECT id FROM {event} {by_id} WHERE id IN (:ids) ORDER BY id {lock}",
    "rows_there": "SELECT id FROM {event} {by_id} WHERE id IN (:ids)",
    "rows_free": "SELECT id FROM {event} {by_id} WHERE id IN (:ids) ORDER BY id {skip_locked}",
    "next_of_keys": "{next_of_keys} AND id NOT IN (:ids) {first_of_key}",
    "mine": "{mine_now} ORDER BY e.id {lock}",
    "mine_now": "{mine_now}",
    "mine_free": "{mine_now} ORDER BY e.id {skip_locked}",
    "settle": "UPDATE {items} STRAIGHT_JOIN {event} e {by_id} ON {mine} SET {settlement}",
    "forget_attempts": """
DELETE a FROM {items} STRAIGHT_JOIN {event} e {by_id} ON {mine}
STRAIGHT_JOIN {attempt} a {by_id} ON a.delivery_id = e.id""",
    "delete": "DELETE e FROM {items} STRAIGHT_JOIN {event} e {by_id} ON {mine}",
    "extend": "UPDATE {event} {by_id} SET leased_until = {later} WHERE id IN (:ids)",
    # An UPDATE of two tables locks what it reads, so the heads are read first (see steps.py). Then it does
    # not wait for locked heads that are not parked.
    "parked_heads": """
SELECT e.id FROM ({heads_of_keys}) t {join} {event} e {by_id} ON e.id = t.id
WHERE e.status = 'pending' AND e.next_attempt_at IS NULL""",
    "make_due": "UPDATE {event} {by_id} SET {make_due} WHERE id IN (:ids) AND {parked}",
}

LOCK_SECONDS = 2
"""How long a statement waits for a lock."""
STATEMENT_SECONDS = 55
"""How long a statement may run: less than a store waits for an answer."""

# Without statistics, or with a plan made for a small table, PostgreSQL may scan the table or sort all due
# rows. It may also compare all rows of a batch with each other. The first settings prevent that. Their high
# costs would trigger jit, which takes longer than the statement. The timeouts bound waits for a lock, a
# statement and a stopped process. A statement must end before the client hangs up, or the server keeps the
# connection.
_PINNED = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_nestloop": "off",
    "jit": "off",
    "lock_timeout": f"{LOCK_SECONDS}s",
    "statement_timeout": f"{STATEMENT_SECONDS}s",
    "idle_in_transaction_session_timeout": "5s",
}
# With these settings all parameters get the same plan, and planning takes longer than running.
_OF_A_SESSION = {"plan_cache_mode": "force_generic_plan", "default_transaction_isolation": "read committed"}
# Lets a server in a lock wait notice that its client is gone; PostgreSQL 14, not on every system.
_NOTICE_HANG_UP = {"client_connection_check_interval": "5s"}


def _settings(settings: Mapping[str, str], local: str) -> str:
    calls = (f"set_config('{name}', '{value}', {local})" for name, value in settings.items())
    return f"SELECT {', '.join(calls)}"


_DELIVER = """
WITH done AS (
    UPDATE {event} AS e SET status = 'delivered', next_attempt_at = NULL, delivered_at = {now},
        crashes = {deaths}, leased_until = NULL, lease_token = NULL, lease_owner = NULL, updated_at = {now}
    %s RETURNING e.id
)
SELECT {unless_all} FROM done"""
_DELETE = """
WITH gone AS (
    DELETE FROM {event} AS e %s RETURNING e.id
), forgotten AS (
    DELETE FROM {attempt} WHERE delivery_id = ANY (ARRAY(SELECT id FROM gone))
)
SELECT {unless_all} FROM gone"""

POSTGRESQL = (
    ANY_DATABASE
    | POSTGRESQL_CLAIMS
    | {
        # pin_plan holds for its transaction, pin_session for a session that is only ours.
        "pin_plan": _settings(_PINNED, "true"),
        "pin_session": _settings(_PINNED | _OF_A_SESSION, "false"),
        "pin_plan_and_notice_hang_up": _settings(_PINNED | _NOTICE_HANG_UP, "true"),
        "pin_session_and_notice_hang_up": _settings(_PINNED | _OF_A_SESSION | _NOTICE_HANG_UP, "false"),
        "notice_hang_up": _settings(_NOTICE_HANG_UP, "true"),
        "first_row": "({inserted_values}, CASE WHEN {awaited} = '' THEN NULL ELSE {first_due} END)",
        "insert_final": "INSERT INTO {event} ({inserted}, {final}) VALUES",
        "final_row": "({inserted_values}, CAST(:next_attempt_at AS timestamptz), 'delivered', {now})",
        # Statements off the delivery path are planned for their own parameters.
        "unpin_plan": "SELECT set_config('plan_cache_mode', 'auto', true)",
        # The next claim proceeds only if this took the lock: a missing row may appear right after it.
        "lock_destination": """
SELECT set_config('relaybox.locked', name, true)
FROM (SELECT name FROM {destination} WHERE name = :destination FOR UPDATE) AS locked""",
        # Held until the transaction ends. Claims never take it, so they do not wait for outcomes. A claim
        # that parks a row locks the head's row: the head's settle waits, and then sees the parked row.
        "lock_settles": """
SELECT pg_advisory_xact_lock(hashtextextended(:destination, CAST(CAST('{event}' AS regclass) AS bigint)))""",
        # Only pending rows have a token. Adding that condition, or an index's own words for parked, would let
        # the planner scan all pending rows instead of the ids.
        "settle": """
WITH s AS MATERIALIZED (SELECT * FROM {items})
UPDATE {event} AS e SET {settlement} FROM s WHERE {listed} RETURNING e.id""",
        "deliver": _DELIVER % "FROM {held_by} WHERE {listed_held}",
        "deliver_lease": _DELIVER % "WHERE {of_lease}",
        "lock_rows": """
SELECT id FROM {event} WHERE id = ANY (CAST(:ids AS uuid[])) ORDER BY id FOR UPDATE""",
        "rows_there": "SELECT id FROM {event} WHERE id = ANY (CAST(:ids AS uuid[]))",
        "rows_free": """
SELECT id FROM {event} WHERE id = ANY (CAST(:ids AS uuid[])) ORDER BY id FOR UPDATE SKIP LOCKED""",
        "next_of_keys": "{next_of_keys} AND id <> ALL (CAST(:ids AS uuid[])) {first_of_key}",
        "delete": _DELETE % "USING {held_by} WHERE {listed_held}",
        "delete_lease": _DELETE % "WHERE {of_lease}",
        # Locks all rows of the next settle, in its order, so that none is taken over in between.
        "copy_failed": """
WITH s AS MATERIALIZED (SELECT * FROM {items}), failed AS MATERIALIZED (
    SELECT s.copy, s.error, e.* FROM s, {event} AS e WHERE {listed} ORDER BY e.id FOR UPDATE OF e
)
INSERT INTO {event} ({copied}) SELECT {copy} FROM failed WHERE copy IS NOT NULL ORDER BY position""",
        "extend": """
WITH s AS MATERIALIZED (SELECT * FROM {items}), held AS MATERIALIZED (
    SELECT e.id FROM s, {event} AS e WHERE {listed}
), free AS MATERIALIZED (
    SELECT e.id FROM s, {event} AS e WHERE {listed} FOR UPDATE OF e SKIP LOCKED
), extended AS (
    UPDATE {event} SET leased_until = {later} WHERE id = ANY (ARRAY(SELECT id FROM free))
)
SELECT id, id IN (SELECT id FROM free) FROM held""",
        # Returns whether any head can be claimed now: one that was never parked is already due.
        "make_heads_due": """
WITH heads AS MATERIALIZED (
    SELECT id, {waiting} AS waits, status = 'pending' AND next_attempt_at <= {now} AND {unleased} AS due
    FROM {event} WHERE id = ANY (ARRAY({heads_of_keys}))
), made AS (
    UPDATE {event} SET {make_due} WHERE id = ANY (ARRAY(
        SELECT id FROM {event} WHERE id = ANY (ARRAY(SELECT id FROM heads WHERE waits)) AND {waiting}
        ORDER BY id FOR UPDATE)) AND {waiting}
    RETURNING 1
)
SELECT EXISTS (SELECT FROM heads WHERE due) OR EXISTS (SELECT FROM made)""",
    }
)

TEMPLATES = {"postgresql": POSTGRESQL, "mysql": MYSQL, "mariadb": MYSQL, "sqlite": SQLITE}


class Texts(NamedTuple):
    """Statements by name, and the words that only they use."""

    statements: Mapping[str, str]
    words: Mapping[str, str] = {}


class Query(NamedTuple):
    """One statement and its parameters, ready for a driver."""

    sql: str
    params: tuple[Any, ...]


class Statements:
    """The statements of one outbox on one database, for one parameter style."""

    def __init__(
        self, tables: Tables, dialect: Dialect, style: ParamStyle, texts: Texts | None = None
    ) -> None:
        self.tables = tables
        self.dialect = dialect
        self.style = style
        texts = texts or Texts(TEMPLATES[dialect.name])
        words = WORDS | dict(dialect.words) | _table_names(tables, dialect) | dict(texts.words)
        self.by_due = _expand(words["by_due"], words)
        self._sql = {name: _expand(sql, words).strip() for name, sql in texts.statements.items()}

    def others(self, texts: Texts) -> Statements:
        """Return other statements for the same tables, database and driver."""
        return Statements(self.tables, self.dialect, self.style, texts)

    def __call__(self, name: str, **params: Any) -> Query:
        """Return the named statement with these parameters."""
        sizes = tuple((key, len(value)) for key, value in params.items() if type(value) is list)
        sql, order = compile_parameters(self._sql[name], self.style, sizes)
        values: list[Any] = []
        for key in order:
            value = params[key]
            values.extend(value) if type(value) is list else values.append(value)
        return Query(sql, tuple(values))

    def texts(self) -> Iterator[str]:
        """Yield the statements, compiled as if no parameter is a list."""
        for sql in self._sql.values():
            yield compile_parameters(sql, self.style, ())[0]

    def union(self, name: str, records: Sequence[dict[str, Any]]) -> Query:
        """Combine the named SELECT, once per record, into one statement."""
        queries = [self(name, **record) for record in records]
        sql = " UNION ALL ".join(query.sql for query in queries)
        return Query(sql, tuple(value for query in queries for value in query.params))

    def insert(self, rows: Sequence[tuple[Any, ...]], *, final: bool = False) -> Query:
        """Return one INSERT of rows in the order of ``INSERTED``; ``final`` rows count as delivered."""
        insert, first, other = ("insert", "first_row", "inserted_row")
        if final:
            insert, first, other = ("insert_final", "final_row", "final_row")
        sql = _insert(self._sql[insert], self._sql[first], self._sql[other], len(rows), self.style)
        return Query(sql, rows[0] if len(rows) == 1 else tuple(value for row in rows for value in row))


@lru_cache(maxsize=1024)
def _insert(insert: str, first: str, other: str, count: int, style: ParamStyle) -> str:
    return compile_parameters(f"{insert} {', '.join([first, *[other] * (count - 1)])}", style, ())[0]


def _table_names(tables: Tables, dialect: Dialect) -> dict[str, str]:
    def quoted(*parts: str | None) -> str:
        return ".".join(f"{dialect.quote}{part}{dialect.quote}" for part in parts if part is not None)

    every = {field.name: getattr(tables, field.name) for field in fields(tables)}
    names = {word: quoted(table.schema, table.name) for word, table in every.items()}
    of = {index.columns[0].name: index.name for index in tables.event.indexes}
    indexes = {f"{word}_index": quoted(of[f"{word}_destination"]) for word in ("due", "head")}
    return names | indexes | {"event_alias": quoted(tables.event.name)}


def _expand(sql: str, words: dict[str, str]) -> str:
    while "{" in sql:
        sql = sql.format_map(words)
    return sql


@lru_cache(maxsize=4096)
def compile_parameters(
    sql: str, style: ParamStyle, sizes: tuple[tuple[str, int], ...]
) -> tuple[str, tuple[str, ...]]:
    """Return the text with the driver's placeholders, and the order of the named values."""
    if style == "format":
        # Drivers of this style treat every percent sign as a placeholder.
        sql = sql.replace("%", "%%")
    lengths = dict(sizes)
    order: list[str] = []
    count = 0

    def placeholder(match: re.Match[str]) -> str:
        nonlocal count
        name = match[1]
        order.append(name)
        marks = []
        for _ in range(lengths.get(name, 1)):
            count += 1
            marks.append({"format": "%s", "qmark": "?", "numeric": f"${count}"}[style])
        return ", ".join(marks)

    return re.sub(r"(?<!:):([a-z_]+)", placeholder, sql), tuple(order)
