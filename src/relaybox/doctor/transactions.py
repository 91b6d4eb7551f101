"""What keeps the database from cleaning up dead rows: whoever may still want to see them."""

from __future__ import annotations

from relaybox.doctor.check import DatabaseContext, Results
from relaybox.doctor.finding import Finding, Unseen
from relaybox.stores.steps import Row

OLD = 60.0
"""Seconds that an open transaction may be old before it is told."""

BEHIND = 100_000
"""Transactions that a standby's oldest query may be behind."""

KEPT = 1024**3
"""Bytes of log that a slot without a reader may keep."""

# What another role's sessions do is hidden from a role that is no monitor: their state is null then.
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


async def look(context: DatabaseContext) -> Results:
    """Old transactions, prepared ones, slots without a reader, and standbys that ask for old rows."""
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
        literal = "'" + gid.replace("'", "''") + "'"
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
    literal = "'" + name.replace("'", "''") + "'"
    return Finding("warning", title, detail, f"SELECT pg_drop_replication_slot({literal});")
