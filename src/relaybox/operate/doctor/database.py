"""Checks of the database server: version, writes, isolation, durability, and the cleaning up of dead rows."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from relaybox.database.migrations import quoted
from relaybox.database.statements import server
from relaybox.operate.doctor.check import SERVERS, DatabaseContext, Finding, Results, Unseen, check

OLDEST: Final = {"postgresql": (13,), "mariadb": (10, 6), "mysql": (8, 0), "sqlite": (3, 35)}
"""The oldest versions that are supported."""

NAMES = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL", "sqlite": "SQLite"}

PACKET = 16 * 1024 * 1024
"""What MariaDB must take in one statement: a settle of the most rows with the longest errors."""

FORGETS: Final = (
    "a crash may undo commits that were answered: an event is then lost, or it was sent and never was, or "
    "what was settled is sent once more"
)
ASYNCHRONOUS: Final = (
    "transactions that emit wait for the disk all the same, but not those that insert without `emit`, or set "
    "it to off afterwards; after a crash, a relay for which it is off sends again what it has settled lately"
)
DAMAGES: Final = "a crash of the machine may damage the database, and undo commits that were answered"

OLD = 60.0
"""Seconds that a transaction may be open."""

BEHIND = 100_000
"""Transactions that a standby's oldest query may be behind."""

KEPT = 1024**3
"""Bytes of log that a slot without a reader may keep."""

GROWS = "nothing that died since can be cleaned up, and claims read ever more of it"

DEAD = 100_000
"""Dead rows that a table may have, or half as many as live ones if that is more."""

_OFF_FOR_TABLE = {f"autovacuum_enabled={off}" for off in ("false", "off", "no", "0")}


@check(needs="database")
def database(context: DatabaseContext) -> Results:
    """Find a version that is too old, and what keeps a relay from writing."""
    looks = {"postgresql": _postgresql, "sqlite": _sqlite}
    return looks.get(context.outbox.dialect, _mysql)(context)


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
    [(version, standby, read_only, name)] = await context.ask(server.SERVER)
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
    [(version, read_only, packet)] = await context.ask(server.SERVER_MYSQL)
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
    [(version,)] = await context.ask(server.SERVER_SQLITE)
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
            [(level, name)] = await context.ask(server.ISOLATION)
            if level != "read committed":
                detail = (
                    f"default_transaction_isolation = {level!r}: relays set their own, but an emit with an "
                    "idempotency key, or an update of the application's, may raise an error to be retried"
                )
                fix = f"ALTER DATABASE {name} SET default_transaction_isolation = 'read committed';"
                yield Finding("info", f"transactions are {level} by default", detail, fix)
        case "mariadb" | "mysql":
            [(logs, form)] = await context.ask(server.BINLOG_MYSQL)
            if logs and str(form).upper() == "STATEMENT":
                detail = "under READ COMMITTED, which relays need, InnoDB writes nothing with this format"
                fix = "SET GLOBAL binlog_format = 'ROW';"
                yield Finding("error", "binlog_format is STATEMENT", detail, fix)


@check(needs="database", on=SERVERS)
def durability(context: DatabaseContext) -> Results:
    """Find settings by which a commit is confirmed before it is on disk: a crash then undoes it."""
    return (_unsafe_postgresql if context.outbox.dialect == "postgresql" else _unsafe_mysql)(context)


async def _unsafe_postgresql(context: DatabaseContext) -> Results:
    for (name,) in await context.ask(server.UNSAFE_SETTINGS):
        fix = f"ALTER SYSTEM SET {name} = on;\nSELECT pg_reload_conf();"
        detail = ASYNCHRONOUS if name == "synchronous_commit" else DAMAGES
        yield Finding("warning", f"{name} is off on this server", detail, fix)
    for role, name in await context.ask(server.UNSAFE_ROLES):
        whose = f"ROLE {role}" if role else f"DATABASE {name}"
        where = f" IN DATABASE {name}" if role and name else ""
        title = f"synchronous_commit is off for {role or name}"
        fix = f"ALTER {whose}{where} RESET synchronous_commit;"
        yield Finding("warning", title, ASYNCHRONOUS, fix)


async def _unsafe_mysql(context: DatabaseContext) -> Results:
    [(flush, sync, logs)] = await context.ask(server.FLUSHES_MYSQL)
    if int(flush) != 1:
        title = f"innodb_flush_log_at_trx_commit is {flush}"
        yield Finding("warning", title, FORGETS, "SET GLOBAL innodb_flush_log_at_trx_commit = 1;")
    # InnoDB undoes what is prepared and not in the binary log.
    if logs and int(sync) != 1:
        yield Finding("warning", f"sync_binlog is {sync}", FORGETS, "SET GLOBAL sync_binlog = 1;")


@check(needs="database", on=SERVERS)
def transactions(context: DatabaseContext) -> Results:
    """Find what keeps dead rows from being cleaned up: old transactions, unread slots, old standbys."""
    return (_kept_postgresql if context.outbox.dialect == "postgresql" else _kept_mysql)(context)


async def _kept_mysql(context: DatabaseContext) -> Results:
    for thread, seconds in await context.ask(server.OLD_SESSIONS_MYSQL, old=OLD):
        title = f"a transaction is open for {seconds:,.0f} s"
        yield Finding("warning", title, f"by connection {thread}: {GROWS}", f"KILL {thread};")


async def _kept_postgresql(context: DatabaseContext) -> Results:
    for pid, user, program, state, seconds in await context.ask(server.OLD_SESSIONS, old=OLD):
        who = f"{user} ({program})" if program else str(user)
        idle = ", and does nothing" if str(state).startswith("idle in transaction") else ""
        title = f"a transaction is open for {seconds:,.0f} s"
        detail = f"by {who}, {state or 'in an unknown state'}{idle}: {GROWS}"
        yield Finding("warning", title, detail, f"SELECT pg_terminate_backend({pid});")
    [(monitor, role, others)] = await context.ask(server.MAY_MONITOR)
    if others and not monitor:
        fix = f"GRANT pg_read_all_stats TO {role};"
        yield Unseen(f"how old the transactions of other roles are: {fix} lets it be seen")
    for gid, owner, seconds in await context.ask(server.OLD_PREPARED, old=OLD):
        literal = _literal(gid)
        title = f"the transaction {literal} is prepared for {seconds:,.0f} s and not ended"
        fix = f"ROLLBACK PREPARED {literal};"
        yield Finding("warning", title, f"by {owner}, who may want to COMMIT PREPARED it: {GROWS}", fix)
    for name, holds, kept in await context.ask(server.UNREAD_SLOTS):
        if holds or kept >= KEPT:
            what = GROWS if holds else "the disk fills with log that is kept for it"
            detail = f"it keeps {kept / 1024**2:,.0f} MiB of log: {what}"
            fix = f"SELECT pg_drop_replication_slot({_literal(name)});"
            yield Finding("warning", f"nobody reads the replication slot {name}", detail, fix)
    for name, address, age in await context.ask(server.OLD_STANDBYS, behind=BEHIND):
        title = f"the standby {name or address} keeps {age:,} transactions from being cleaned up"
        detail = f"by hot_standby_feedback, for an old query of its own: {GROWS}"
        fix = "end the query on the standby, or there: ALTER SYSTEM SET hot_standby_feedback = off;"
        yield Finding("warning", title, detail, fix)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@check(on=("postgresql",))
async def vacuum(context: DatabaseContext) -> Results:
    """Find that autovacuum is off, for the server or a table, or does not keep up."""
    outbox = context.outbox
    for (setting,) in await context.ask(server.NO_AUTOVACUUM):
        detail = "dead rows are never cleaned up, and claims become slower with every event"
        fix = f"ALTER SYSTEM SET {setting} = on;\nSELECT pg_reload_conf();"
        yield Finding("error", f"{setting} is off on this server", detail, fix)
    tables = outbox.metadata().tables.values()
    names = {table.name: quoted(outbox, table.schema, table.name) for table in tables}
    for name, options, live, dead, at in await context.ask(server.DEAD_ROWS, names=list(names.values())):
        if _OFF_FOR_TABLE.intersection(options or ()):
            detail = "its dead rows are never cleaned up, and claims become slower with every event"
            fix = f"ALTER TABLE {names[name]} RESET (autovacuum_enabled);"
            yield Finding("error", f"autovacuum is off for {name}", detail, fix)
        if dead and dead > DEAD and dead > live / 2:
            when = "never" if at is None else f"last at {at:%Y-%m-%d %H:%M:%S %Z}"
            detail = f"beside {live:,} that live; it was vacuumed {when}"
            fix = f"VACUUM (ANALYZE) {names[name]};"
            yield Finding("warning", f"{name} has {dead:,} dead rows", detail, fix)
