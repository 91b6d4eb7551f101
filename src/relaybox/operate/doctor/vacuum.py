"""Checks of vacuum: what keeps the database from cleaning up dead rows, and whether it does."""

from __future__ import annotations

from relaybox.database.migrations import quoted
from relaybox.database.steps import Row
from relaybox.operate.doctor.check import SERVERS, DatabaseContext, Results, check
from relaybox.operate.doctor.finding import Finding, Unseen

OLD = 60.0
"""Seconds that a transaction may be open."""

BEHIND = 100_000
"""Transactions that a standby's oldest query may be behind."""

KEPT = 1024**3
"""Bytes of log that a slot without a reader may keep."""

# The state of other roles' sessions is null unless the role is a monitor.
_SESSIONS = """
SELECT pid, usename, application_name, state, extract(epoch FROM clock_timestamp() - xact_start)
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
  AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
  AND xact_start < clock_timestamp() - make_interval(secs => :old)
ORDER BY xact_start LIMIT 5"""
_MONITOR = """
SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'), quote_ident(current_user),
       EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND usename <> current_user
               AND pid <> pg_backend_pid())"""
_PREPARED = """
SELECT gid, owner, extract(epoch FROM clock_timestamp() - prepared) FROM pg_prepared_xacts
WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => :old)
ORDER BY prepared LIMIT 5"""
_SLOTS = """
SELECT slot_name, xmin IS NOT NULL, COALESCE(pg_wal_lsn_diff(
    CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END,
    restart_lsn), 0)
FROM pg_replication_slots WHERE NOT active AND NOT temporary ORDER BY slot_name LIMIT 50"""
_STANDBYS = """
SELECT application_name, client_addr, age(backend_xmin) FROM pg_stat_replication
WHERE age(backend_xmin) > :behind ORDER BY age(backend_xmin) DESC LIMIT 5"""
_INNODB = """
SELECT trx_mysql_thread_id, TIMESTAMPDIFF(SECOND, trx_started, NOW()) FROM information_schema.innodb_trx
WHERE trx_mysql_thread_id <> CONNECTION_ID() AND trx_mysql_thread_id > 0
  AND trx_started < NOW() - INTERVAL :old SECOND
ORDER BY trx_started LIMIT 5"""

GROWS = "nothing that died since can be cleaned up, and claims read ever more of it"

DEAD = 100_000
"""Dead rows that a table may have, or half as many as live ones if that is more."""

_OFF_ON_SERVER = (
    "SELECT name FROM pg_settings WHERE name IN ('autovacuum', 'track_counts') AND setting = 'off'"
)
_TABLES = """
SELECT c.relname, c.reloptions, s.n_live_tup, s.n_dead_tup, GREATEST(s.last_vacuum, s.last_autovacuum)
FROM pg_class c LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.oid IN (SELECT to_regclass(name) FROM unnest(CAST(ARRAY[:names] AS text[])) AS name)"""
_OFF_FOR_TABLE = (
    "autovacuum_enabled=false",
    "autovacuum_enabled=off",
    "autovacuum_enabled=no",
    "autovacuum_enabled=0",
)


@check(needs="database", on=SERVERS)
async def transactions(context: DatabaseContext) -> Results:
    """Find what keeps dead rows from being cleaned up: old transactions, unread slots, old standbys."""
    if context.outbox.dialect != "postgresql":
        for thread, seconds in await context.ask(_INNODB, old=OLD):
            title = f"a transaction is open for {seconds:,.0f} s"
            yield Finding("warning", title, f"by connection {thread}: {GROWS}", f"KILL {thread};")
        return
    for row in await context.ask(_SESSIONS, old=OLD):
        yield _session(row)
    [(monitor, role, others)] = await context.ask(_MONITOR)
    if others and not monitor:
        fix = f"GRANT pg_read_all_stats TO {role};"
        yield Unseen(f"how old the transactions of other roles are: {fix} lets it be seen")
    for gid, owner, seconds in await context.ask(_PREPARED, old=OLD):
        literal = _literal(gid)
        title = f"the transaction {literal} is prepared for {seconds:,.0f} s and not ended"
        fix = f"ROLLBACK PREPARED {literal};"
        yield Finding("warning", title, f"by {owner}, who may want to COMMIT PREPARED it: {GROWS}", fix)
    for row in await context.ask(_SLOTS):
        if finding := _slot(row):
            yield finding
    for name, address, age in await context.ask(_STANDBYS, behind=BEHIND):
        title = f"the standby {name or address} keeps {age:,} transactions from being cleaned up"
        detail = f"by hot_standby_feedback, for an old query of its own: {GROWS}"
        fix = "end the query on the standby, or there: ALTER SYSTEM SET hot_standby_feedback = off;"
        yield Finding("warning", title, detail, fix)


def _session(row: Row) -> Finding:
    pid, user, program, state, seconds = row
    who = f"{user} ({program})" if program else str(user)
    title = f"a transaction is open for {seconds:,.0f} s"
    idle = ", and does nothing" if str(state).startswith("idle in transaction") else ""
    detail = f"by {who}, {state or 'in an unknown state'}{idle}: {GROWS}"
    return Finding("warning", title, detail, f"SELECT pg_terminate_backend({pid});")


def _slot(row: Row) -> Finding | None:
    name, holds, kept = row
    if not holds and kept < KEPT:
        return None
    title = f"nobody reads the replication slot {name}"
    what = GROWS if holds else "the disk fills with log that is kept for it"
    detail = f"it keeps {kept / 1024**2:,.0f} MiB of log: {what}"
    return Finding("warning", title, detail, f"SELECT pg_drop_replication_slot({_literal(name)});")


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@check(on=("postgresql",))
async def vacuum(context: DatabaseContext) -> Results:
    """Find that autovacuum is off, for the server or a table, or does not keep up."""
    outbox = context.outbox
    for (setting,) in await context.ask(_OFF_ON_SERVER):
        detail = "dead rows are never cleaned up, and claims become slower with every event"
        fix = f"ALTER SYSTEM SET {setting} = on;\nSELECT pg_reload_conf();"
        yield Finding("error", f"{setting} is off on this server", detail, fix)
    tables = outbox.metadata().tables.values()
    names = {table.name: quoted(outbox, table.schema, table.name) for table in tables}
    for name, options, live, dead, at in await context.ask(_TABLES, names=list(names.values())):
        if any(option in _OFF_FOR_TABLE for option in options or ()):
            detail = "its dead rows are never cleaned up, and claims become slower with every event"
            fix = f"ALTER TABLE {names[name]} RESET (autovacuum_enabled);"
            yield Finding("error", f"autovacuum is off for {name}", detail, fix)
        if dead and dead > DEAD and dead > live / 2:
            when = "never" if at is None else f"last at {at:%Y-%m-%d %H:%M:%S %Z}"
            detail = f"beside {live:,} that live; it was vacuumed {when}"
            fix = f"VACUUM (ANALYZE) {names[name]};"
            yield Finding("warning", f"{name} has {dead:,} dead rows", detail, fix)
