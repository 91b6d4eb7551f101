"""Checks of the database server: its version, whether it takes writes, its isolation and its durability."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from relaybox.operate.doctor.check import SERVERS, DatabaseContext, Results, check
from relaybox.operate.doctor.finding import Finding

OLDEST: Final = {"postgresql": (13,), "mariadb": (10, 6), "mysql": (8, 0), "sqlite": (3, 35)}
"""The oldest versions that are supported."""

NAMES = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL", "sqlite": "SQLite"}

PACKET = 16 * 1024 * 1024
"""What MariaDB must take in one statement: a settle of the most rows with the longest errors."""

_SERVER = """
SELECT current_setting('server_version'), pg_is_in_recovery(), reset_val, quote_ident(current_database())
FROM pg_settings WHERE name = 'default_transaction_read_only'"""
_SERVER_MYSQL = "SELECT VERSION(), @@global.read_only, @@max_allowed_packet"
_BINLOG = "SELECT @@log_bin, @@global.binlog_format"
_ISOLATION = """
SELECT reset_val, quote_ident(current_database()) FROM pg_settings
WHERE name = 'default_transaction_isolation'"""

FORGETS: Final = (
    "a crash may undo commits that were answered: an event is then lost, or it was sent and never was, or "
    "what was settled is sent once more"
)
ASYNCHRONOUS: Final = (
    "transactions that emit wait for the disk all the same, but not those that insert without `emit`, or set "
    "it to off afterwards; after a crash, a relay for which it is off sends again what it has settled lately"
)
DAMAGES: Final = "a crash of the machine may damage the database, and undo commits that were answered"

_UNSAFE = """
SELECT name FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off'
   OR name = 'synchronous_commit' AND reset_val = 'off'
      AND source NOT IN ('database', 'user', 'database user', 'session', 'client')
ORDER BY name"""
_UNSAFE_FOR = """
SELECT quote_ident(role.rolname), quote_ident(base.datname)
FROM pg_db_role_setting AS s
LEFT JOIN pg_roles AS role ON role.oid = s.setrole
LEFT JOIN pg_database AS base ON base.oid = s.setdatabase,
    unnest(s.setconfig) AS given
WHERE lower(given) IN ('synchronous_commit=off', 'synchronous_commit=false', 'synchronous_commit=no',
                       'synchronous_commit=0')
  AND (s.setdatabase = 0 OR base.datname = current_database())
ORDER BY 1, 2"""
_FLUSHES = "SELECT @@global.innodb_flush_log_at_trx_commit, @@global.sync_binlog, @@log_bin"


@check(needs="database")
async def database(context: DatabaseContext) -> Results:
    """Find a version that is too old, and what keeps a relay from writing."""
    match context.outbox.dialect:
        case "postgresql":
            looking = _postgresql(context)
        case "sqlite":
            looking = _sqlite(context)
        case _:
            looking = _mysql(context)
    async for finding in looking:
        yield finding


def outdated(dialect: str, version: str) -> Finding | None:
    """Return a finding if this version of a server is too old."""
    # MariaDB may begin with the version of MySQL that it would be: 5.5.5-10.11.6-MariaDB.
    text = version.removeprefix("5.5.5-") if dialect == "mariadb" else version
    match = re.match(r"(\d+)(?:\.(\d+))?", text)
    oldest = OLDEST[dialect]
    if match is None or tuple(int(part or 0) for part in match.groups())[: len(oldest)] >= oldest:
        return None
    name, wanted = NAMES[dialect], ".".join(map(str, oldest))
    title = f"{name} {match[0]} is older than what is supported"
    detail = f"the server says {version}; statements may fail there, or take other locks than they should"
    return Finding("error", title, detail, f"upgrade the server to {name} {wanted} or newer")


async def _postgresql(context: DatabaseContext) -> Results:
    [(version, standby, read_only, name)] = await context.ask(_SERVER)
    if finding := outdated("postgresql", version):
        yield finding
    if standby:
        fix = "connect to the primary: name its host, or add target_session_attrs=read-write to the URL"
        yield Finding("error", "the server is a standby", "nothing can be written there, or claimed", fix)
    elif read_only == "on":
        detail = "default_transaction_read_only is on for this role or database: nothing can be claimed"
        fix = f"ALTER DATABASE {name} SET default_transaction_read_only = off;"
        yield Finding("error", "transactions are read-only", detail, fix)


async def _mysql(context: DatabaseContext) -> Results:
    [(version, read_only, packet)] = await context.ask(_SERVER_MYSQL)
    if finding := outdated(context.outbox.dialect, version):
        yield finding
    if str(read_only).upper() not in ("0", "OFF", "NO_LOCK"):
        fix = "connect to the primary, or: SET GLOBAL read_only = OFF;"
        yield Finding("error", "the server is read-only", f"read_only = {read_only}", fix)
    needed = max(PACKET, 2 * context.settings.max_payload)
    if packet < needed:
        detail = f"max_allowed_packet = {packet:,}: large payloads, or many errors at once, cannot be written"
        fix = f"SET GLOBAL max_allowed_packet = {needed};"
        yield Finding("warning", "the server takes only short statements", detail, fix)


async def _sqlite(context: DatabaseContext) -> Results:
    [(version,)] = await context.ask("SELECT sqlite_version()")
    if finding := outdated("sqlite", version):
        yield finding
    for place in _closed(Path((sa.make_url(context.settings.database).database or "").removeprefix("file:"))):
        title = f"{place} cannot be written to"
        yield Finding("error", title, "nothing can be claimed or settled", f"chmod u+w {place}")


def _closed(path: Path) -> list[Path]:
    """Return which of a file and its directory, where the journal is, cannot be written to."""
    return [one for one in (path, path.absolute().parent) if one.exists() and not os.access(one, os.W_OK)]


@check(needs="database")
async def isolation(context: DatabaseContext) -> Results:
    """Find a default isolation that makes emits raise, or a log format that makes relays fail."""
    match context.outbox.dialect:
        case "postgresql":
            [(level, name)] = await context.ask(_ISOLATION)
            if level != "read committed":
                detail = (
                    f"default_transaction_isolation = {level!r}: relays set their own, but an emit with an "
                    "idempotency key, or an update of the application's, may raise an error to be retried"
                )
                fix = f"ALTER DATABASE {name} SET default_transaction_isolation = 'read committed';"
                yield Finding("info", f"transactions are {level} by default", detail, fix)
        case "mariadb" | "mysql":
            [(logs, form)] = await context.ask(_BINLOG)
            if logs and str(form).upper() == "STATEMENT":
                detail = "under READ COMMITTED, which relays need, InnoDB writes nothing with this format"
                fix = "SET GLOBAL binlog_format = 'ROW';"
                yield Finding("error", "binlog_format is STATEMENT", detail, fix)


@check(needs="database", on=SERVERS)
async def durability(context: DatabaseContext) -> Results:
    """Find settings by which a commit is confirmed before it is on disk: a crash then undoes it."""
    looking = _unsafe_postgresql if context.outbox.dialect == "postgresql" else _unsafe_mysql
    async for finding in looking(context):
        yield finding


async def _unsafe_postgresql(context: DatabaseContext) -> Results:
    for (name,) in await context.ask(_UNSAFE):
        fix = f"ALTER SYSTEM SET {name} = on;\nSELECT pg_reload_conf();"
        detail = ASYNCHRONOUS if name == "synchronous_commit" else DAMAGES
        yield Finding("warning", f"{name} is off on this server", detail, fix)
    for role, name in await context.ask(_UNSAFE_FOR):
        whose = f"ROLE {role}" if role else f"DATABASE {name}"
        where = f" IN DATABASE {name}" if role and name else ""
        title = f"synchronous_commit is off for {role or name}"
        fix = f"ALTER {whose}{where} RESET synchronous_commit;"
        yield Finding("warning", title, ASYNCHRONOUS, fix)


async def _unsafe_mysql(context: DatabaseContext) -> Results:
    [(flush, sync, logs)] = await context.ask(_FLUSHES)
    if int(flush) != 1:
        title = f"innodb_flush_log_at_trx_commit is {flush}"
        yield Finding("warning", title, FORGETS, "SET GLOBAL innodb_flush_log_at_trx_commit = 1;")
    # InnoDB undoes what is prepared and not in the binary log.
    if logs and int(sync) != 1:
        yield Finding("warning", f"sync_binlog is {sync}", FORGETS, "SET GLOBAL sync_binlog = 1;")
