"""Queries about a server, its settings and sessions, for the doctor."""

from __future__ import annotations

STATEMENT_SECONDS = 5

BOUNDS = f"""
SELECT set_config('statement_timeout', '{STATEMENT_SECONDS}s', true),
       set_config('transaction_read_only', 'on', true)"""


def bounded_on_mariadb(sql: str) -> str:
    """Limit the run time of a SELECT."""
    if not sql.lstrip().startswith("SELECT"):
        return sql
    return f"SET STATEMENT max_statement_time = {STATEMENT_SECONDS} FOR {sql.strip()}"


SERVER_SQLITE = "SELECT sqlite_version()"
GRANTS_MYSQL = "SHOW GRANTS"
SCHEMA_MYSQL = "SELECT COALESCE(:schema, DATABASE())"
BACKEND = "SELECT pg_backend_pid()"
NEWEST_MIGRATION = "SELECT max(version) FROM {migration}"
TABLE_EXISTS = {
    "postgresql": "SELECT to_regclass(:table) IS NOT NULL",
    "sqlite": "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = :table)",
}
TABLE_EXISTS_MYSQL = """
SELECT EXISTS (SELECT 1 FROM information_schema.tables
               WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :table)"""
SERVER = """
SELECT current_setting('server_version'), pg_is_in_recovery(), reset_val, quote_ident(current_database())
FROM pg_settings WHERE name = 'default_transaction_read_only'"""
SERVER_MYSQL = "SELECT VERSION(), @@global.read_only, @@max_allowed_packet"
BINLOG_MYSQL = "SELECT @@log_bin, @@global.binlog_format"
ISOLATION = """
SELECT reset_val, quote_ident(current_database()) FROM pg_settings
WHERE name = 'default_transaction_isolation'"""
UNSAFE_SETTINGS = """
SELECT name FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off'
   OR name = 'synchronous_commit' AND reset_val = 'off'
      AND source NOT IN ('database', 'user', 'database user', 'session', 'client')
ORDER BY name"""
UNSAFE_ROLES = """
SELECT quote_ident(role.rolname), quote_ident(base.datname)
FROM pg_db_role_setting AS s
LEFT JOIN pg_roles AS role ON role.oid = s.setrole
LEFT JOIN pg_database AS base ON base.oid = s.setdatabase,
    unnest(s.setconfig) AS given
WHERE lower(given) IN ('synchronous_commit=off', 'synchronous_commit=false', 'synchronous_commit=no',
                       'synchronous_commit=0')
  AND (s.setdatabase = 0 OR base.datname = current_database())
ORDER BY 1, 2"""
FLUSHES_MYSQL = "SELECT @@global.innodb_flush_log_at_trx_commit, @@global.sync_binlog, @@log_bin"
# Without the monitor role, the state of other roles' sessions is null.
OLD_SESSIONS = """
SELECT pid, usename, application_name, state, extract(epoch FROM clock_timestamp() - xact_start)
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
  AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
  AND xact_start < clock_timestamp() - make_interval(secs => :old)
ORDER BY xact_start LIMIT 5"""
MAY_MONITOR = """
SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'), quote_ident(current_user),
       EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND usename <> current_user
               AND pid <> pg_backend_pid())"""
OLD_PREPARED = """
SELECT gid, owner, extract(epoch FROM clock_timestamp() - prepared) FROM pg_prepared_xacts
WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => :old)
ORDER BY prepared LIMIT 5"""
UNREAD_SLOTS = """
SELECT slot_name, xmin IS NOT NULL, COALESCE(pg_wal_lsn_diff(
    CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END,
    restart_lsn), 0)
FROM pg_replication_slots WHERE NOT active AND NOT temporary ORDER BY slot_name LIMIT 50"""
OLD_STANDBYS = """
SELECT application_name, client_addr, age(backend_xmin) FROM pg_stat_replication
WHERE age(backend_xmin) > :behind ORDER BY age(backend_xmin) DESC LIMIT 5"""
OLD_SESSIONS_MYSQL = """
SELECT trx_mysql_thread_id, TIMESTAMPDIFF(SECOND, trx_started, NOW()) FROM information_schema.innodb_trx
WHERE trx_mysql_thread_id <> CONNECTION_ID() AND trx_mysql_thread_id > 0
  AND trx_started < NOW() - INTERVAL :old SECOND
ORDER BY trx_started LIMIT 5"""
NO_AUTOVACUUM = (
    "SELECT name FROM pg_settings WHERE name IN ('autovacuum', 'track_counts') AND setting = 'off'"
)
DEAD_ROWS = """
SELECT c.relname, c.reloptions, s.n_live_tup, s.n_dead_tup, GREATEST(s.last_vacuum, s.last_autovacuum)
FROM pg_class c LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.oid IN (SELECT to_regclass(name) FROM unnest(CAST(ARRAY[:names] AS text[])) AS name)"""
CURRENT_USER = {
    "postgresql": "SELECT current_user",
    "mysql": "SELECT CURRENT_USER()",
    "mariadb": "SELECT CURRENT_USER()",
}
TABLE_RIGHTS = """
SELECT name, privilege, has_table_privilege(CAST(to_regclass(name) AS oid), privilege)
FROM unnest(CAST(ARRAY[:names] AS text[])) AS name, unnest(CAST(ARRAY[:privileges] AS text[])) AS privilege
WHERE to_regclass(name) IS NOT NULL"""
SCHEMA_RIGHTS = "SELECT has_schema_privilege(CAST(:schema AS text), 'USAGE')"
