"""Whether the database forgets commits in a crash: an event that was sent would then never have been."""

from __future__ import annotations

from typing import Final

from relaybox.doctor.check import DatabaseContext, Results
from relaybox.doctor.finding import Finding

FORGETS: Final = (
    "a crash may undo commits that were answered: an event is then lost, or it was sent and never was, or "
    "what was settled is sent once more"
)
ASYNCHRONOUS: Final = (
    "transactions that emit wait for the disk all the same, but not those that insert without `emit`, or set "
    "it to off afterwards; after a crash, a relay for which it is off sends again what it has settled lately"
)
DAMAGES: Final = "a crash of the machine may damage the database, and undo commits that were answered"

_SERVER = """
SELECT name FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off'
   OR name = 'synchronous_commit' AND reset_val = 'off'
      AND source NOT IN ('database', 'user', 'database user', 'session', 'client')
ORDER BY name"""
_OF_SOME = """
SELECT quote_ident(role.rolname), quote_ident(base.datname)
FROM pg_db_role_setting AS s
LEFT JOIN pg_roles AS role ON role.oid = s.setrole
LEFT JOIN pg_database AS base ON base.oid = s.setdatabase,
    unnest(s.setconfig) AS given
WHERE lower(given) IN ('synchronous_commit=off', 'synchronous_commit=false', 'synchronous_commit=no',
                       'synchronous_commit=0')
  AND (s.setdatabase = 0 OR base.datname = current_database())
ORDER BY 1, 2"""
_MYSQL = "SELECT @@global.innodb_flush_log_at_trx_commit, @@global.sync_binlog, @@log_bin"


async def look(context: DatabaseContext) -> Results:
    """What the server, the database or a role has set so that a commit is answered before it is on disk."""
    looking = _postgresql if context.outbox.dialect == "postgresql" else _mysql
    async for finding in looking(context):
        yield finding


async def _postgresql(context: DatabaseContext) -> Results:
    for (name,) in await context.ask(_SERVER):
        fix = f"ALTER SYSTEM SET {name} = on;\nSELECT pg_reload_conf();"
        detail = ASYNCHRONOUS if name == "synchronous_commit" else DAMAGES
        yield Finding("warning", f"{name} is off on this server", detail, fix)
    for role, database in await context.ask(_OF_SOME):
        whose = f"ROLE {role}" if role else f"DATABASE {database}"
        where = f" IN DATABASE {database}" if role and database else ""
        title = f"synchronous_commit is off for {role or database}"
        fix = f"ALTER {whose}{where} RESET synchronous_commit;"
        yield Finding("warning", title, ASYNCHRONOUS, fix)


async def _mysql(context: DatabaseContext) -> Results:
    [(flush, sync, logs)] = await context.ask(_MYSQL)
    if int(flush) != 1:
        title = f"innodb_flush_log_at_trx_commit is {flush}"
        yield Finding("warning", title, FORGETS, "SET GLOBAL innodb_flush_log_at_trx_commit = 1;")
    # InnoDB undoes what is prepared and not in the binary log.
    if logs and int(sync) != 1:
        yield Finding("warning", f"sync_binlog is {sync}", FORGETS, "SET GLOBAL sync_binlog = 1;")
