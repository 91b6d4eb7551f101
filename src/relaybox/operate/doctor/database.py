"""Checks of the database: server, role's privileges, notifications, clock, and dead rows."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import sqlalchemy as sa

from relaybox.core.text import at
from relaybox.database.migrations import Outbox, quoted
from relaybox.database.roles import CHANGE, of_relay
from relaybox.database.schema import MYSQL
from relaybox.database.statements import server
from relaybox.operate.doctor.check import SERVERS, DatabaseContext, Finding, Level, Results, Unseen, check

OLDEST: Final = {"postgresql": (13,), "mariadb": (10, 6), "mysql": (8, 0), "sqlite": (3, 35)}

NAMES = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL", "sqlite": "SQLite"}

PACKET = 16 * 1024 * 1024
"""Bytes that MariaDB must take in one statement: a settle of the most rows with the longest errors."""

FORGETS: Final = (
    "a crash may undo commits that were answered: an event is then lost, or it was sent and never was, or "
    "what was settled is sent once more"
)
ASYNCHRONOUS: Final = (
    "transactions that emit wait for the disk all the same, but not those that insert without `emit`, or set "
    "it to off afterwards; after a crash, a relay for which it is off sends again what it has settled lately"
)
DAMAGES: Final = "a crash of the machine may damage the database, and undo commits that were answered"

_GRANT = re.compile(r"GRANT (.+?) ON (?:TABLE )?(\S+) TO ")

READ, NEEDED = "SELECT", CHANGE.split(", ")

CHANNEL = "relaybox_doctor"
"""Its own channel, so that no relay is woken; always the same, because a pooler may keep a LISTEN."""

NOTIFY_SECONDS = 3.0

NOTICEABLE = 5.0
"""Seconds of difference that show in the ids and times that this host makes."""

REFUSED = 300.0
"""Seconds of difference at which receivers refuse signatures with this host's time."""

OLD = 60.0
"""Seconds that a transaction may be open."""

BEHIND = 100_000
"""Transactions that a standby's oldest query may be behind."""

KEPT = 1024**3
"""Bytes of log that a slot without a reader may keep."""

GROWS = "nothing that died since can be cleaned up, and claims read ever more of it"
UNCLEANED = "dead rows are never cleaned up, and claims become slower with every event"

DEAD = 100_000
"""Dead rows that a table may have, or half as many as live ones if that is more."""

_OFF_FOR_TABLE = {f"autovacuum_enabled={off}" for off in ("false", "off", "no", "0")}


@check(needs="database")
def database(context: DatabaseContext) -> Results:
    """Find a version that is too old, and reasons why a relay cannot write."""
    return {"postgresql": _postgresql, "sqlite": _sqlite}.get(context.outbox.dialect, _mysql)(context)


def outdated(dialect: str, version: str) -> Finding | None:
    """Return a finding if this server version is too old."""
    # MariaDB may prefix a MySQL version for compatibility: 5.5.5-10.11.6-MariaDB.
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
    """Return which of a file and its directory, which holds the journal, are not writable."""
    return [one for one in (path, path.absolute().parent) if one.exists() and not os.access(one, os.W_OK)]


@check(needs="database")
async def isolation(context: DatabaseContext) -> Results:
    """Find a default isolation that makes emits raise, or a log format that makes relays fail."""
    match context.outbox.dialect:
        case "postgresql":
            [(level, name)] = await context.ask(server.ISOLATION)
            if level != "read committed":
                some = "an emit with an idempotency key, or an update of the application's,"
                but = f"relays set their own, but {some} may raise an error to be retried"
                fix = f"ALTER DATABASE {name} SET default_transaction_isolation = 'read committed';"
                detail = f"default_transaction_isolation = {level!r}: {but}"
                yield Finding("info", f"transactions are {level} by default", detail, fix)
        case "mariadb" | "mysql":
            [(logs, form)] = await context.ask(server.BINLOG_MYSQL)
            if logs and str(form).upper() == "STATEMENT":
                detail = "under READ COMMITTED, which relays need, InnoDB writes nothing with this format"
                fix = "SET GLOBAL binlog_format = 'ROW';"
                yield Finding("error", "binlog_format is STATEMENT", detail, fix)


@check(needs="database", on=SERVERS)
def durability(context: DatabaseContext) -> Results:
    """Find settings that confirm a commit before it is on disk, so that a crash can undo it."""
    return (_unsafe_postgresql if context.outbox.dialect == "postgresql" else _unsafe_mysql)(context)


async def _unsafe_postgresql(context: DatabaseContext) -> Results:
    for (name,) in await context.ask(server.UNSAFE_SETTINGS):
        fix = f"ALTER SYSTEM SET {name} = on;\nSELECT pg_reload_conf();"
        detail = ASYNCHRONOUS if name == "synchronous_commit" else DAMAGES
        yield Finding("warning", f"{name} is off on this server", detail, fix)
    for role, name in await context.ask(server.UNSAFE_ROLES):
        whose = f"ROLE {role}" if role else f"DATABASE {name}"
        where = f" IN DATABASE {name}" if role and name else ""
        fix = f"ALTER {whose}{where} RESET synchronous_commit;"
        yield Finding("warning", f"synchronous_commit is off for {role or name}", ASYNCHRONOUS, fix)


async def _unsafe_mysql(context: DatabaseContext) -> Results:
    [(flush, sync, logs)] = await context.ask(server.FLUSHES_MYSQL)
    # InnoDB rolls back prepared transactions that are not in the binary log.
    set_to = {"innodb_flush_log_at_trx_commit": flush, "sync_binlog": sync if logs else 1}
    for name, value in set_to.items():
        if int(value) != 1:
            yield Finding("warning", f"{name} is {value}", FORGETS, f"SET GLOBAL {name} = 1;")


@check(on=SERVERS)
async def privileges(context: DatabaseContext) -> Results:
    """Find privileges that a relay needs and the connected role lacks; a read-only role is not a relay's."""
    [(role,)] = await context.ask(server.CURRENT_USER[context.outbox.dialect])
    tables = context.outbox.tables()
    every = [getattr(tables, field.name) for field in fields(tables)]
    needed = {table.name: of_relay(tables, table).split(", ") for table in every}
    held = await _held(context, needed)
    known = {table: of for table, of in needed.items() if table in held}
    missing = {table: [one for one in of if one not in held[table]] for table, of in known.items()}
    lacking = {table: of for table, of in missing.items() if of}
    changes = any(one != READ for of in held.values() for one in of)
    if lacking and not changes and all(READ not in of for of in lacking.values()):
        yield Unseen(f"{role} may only read: it cannot show whether a relay's role has its rights")
    elif lacking:
        yield _lacks(context.outbox, str(role), lacking)


async def _held(context: DatabaseContext, needed: Collection[str]) -> Mapping[str, Collection[str]]:
    outbox = context.outbox
    if outbox.dialect in MYSQL:
        rows = await context.ask(server.GRANTS_MYSQL)
        [(name,)] = await context.ask(server.SCHEMA_MYSQL, schema=outbox.schema)
        return parse_grants([str(row[0]) for row in rows], str(name), needed)
    if outbox.schema and (await context.ask(server.SCHEMA_RIGHTS, schema=outbox.schema))[0][0] is False:
        return dict.fromkeys(needed, ())
    names = {quoted(outbox, outbox.schema, table): table for table in needed}
    rows = await context.ask(server.TABLE_RIGHTS, names=list(names), privileges=NEEDED)
    # The schema check reports a missing table.
    held = defaultdict[str, set[str]](set)
    for name, privilege, may in rows:
        held[names[name]] |= {privilege} if may else set()
    return held


def parse_grants(lines: Iterable[str], schema: str, tables: Iterable[str]) -> dict[str, set[str]]:
    """Return the privileges on these tables from the lines of SHOW GRANTS."""
    held: dict[str, set[str]] = {table: set() for table in tables}
    for match in filter(None, map(_GRANT.match, lines)):
        place, _, table = match[2].replace("`", "").partition(".")
        if place != "*" and not _like(place).fullmatch(schema):
            continue
        every = match[1].startswith("ALL PRIVILEGES")
        granted = {one for one in NEEDED if every or one in re.findall(r"[A-Z]+", match[1])}
        for name in held if table == "*" else held.keys() & {table}:
            held[name] |= granted
    return held


def _like(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for a MySQL pattern of database names."""
    parts = re.split(r"(\\[_%]|[_%])", pattern)
    words = {"_": ".", "%": ".*"}
    return re.compile("".join(words.get(part, re.escape(part.removeprefix("\\"))) for part in parts))


def _lacks(outbox: Outbox, role: str, lacking: Mapping[str, list[str]]) -> Finding:
    user, at, host = role.partition("@")
    whom = quoted(outbox, role)
    if at and outbox.dialect in MYSQL:
        whom = f"{quoted(outbox, user)}@{quoted(outbox, host)}"
    grants = [f"{', '.join(of)} ON {quoted(outbox, outbox.schema, name)}" for name, of in lacking.items()]
    if outbox.dialect == "postgresql" and outbox.schema:
        grants.insert(0, f"USAGE ON SCHEMA {quoted(outbox, outbox.schema)}")
    fix = "\n".join(f"GRANT {rights} TO {whom};" for rights in grants)
    detail = "; ".join(f"no {', '.join(of)} on {table}" for table, of in lacking.items())
    return Finding("error", f"{role} lacks rights that a relay needs", detail, fix)


@check(needs="database", on=("postgresql",))
async def listener(context: DatabaseContext) -> Results:
    """Find that a NOTIFY on one connection does not reach another, and whether a pooler is the cause."""
    if not context.settings.notify:
        return
    import psycopg

    try:
        heard, pooled = await _round_trip(context.settings.database)
    except psycopg.Error as error:
        yield Unseen(" ".join(str(error).split()))
        return
    waits = "relays find events by polling, each poll_interval, instead of at once"
    if pooled and not heard:
        title = "a transaction pooler stands before the database"
        detail = f"what a session has set is lost between transactions, and so is LISTEN: {waits}"
        address = "the server's own address (on PgBouncer: or one with pool_mode = session)"
        fix = f"give the relay {address}, or set notify = false to be content with polling"
        yield Finding("warning", title, detail, fix)
    elif not heard:
        title = "a notification that was sent did not arrive"
        fix = "give the relay a connection on which LISTEN works, or set notify = false"
        yield Finding("warning", title, f"within {NOTIFY_SECONDS:g} s: {waits}", fix)


async def _round_trip(url: str) -> tuple[bool, bool]:
    """Return whether it was heard, and whether there is a pooler: it invents the process number."""
    from psycopg import AsyncConnection
    from psycopg.conninfo import conninfo_to_dict

    from relaybox.database.drivers.notify import NOTIFY, listen

    usual = {"connect_timeout": 5, "prepare_threshold": None}
    options: dict[str, Any] = {**usual, **conninfo_to_dict(url), "autocommit": True}
    async with await AsyncConnection.connect(**options) as ear:
        cursor = await ear.execute(server.BACKEND)
        pooled = await cursor.fetchone() != (ear.info.backend_pid,)
        await ear.execute(listen(CHANNEL))
        word = uuid4().hex
        async with await AsyncConnection.connect(**options) as mouth:
            await mouth.execute(NOTIFY, (CHANNEL, word))
        async with aclosing(ear.notifies(timeout=NOTIFY_SECONDS)) as notifications:
            async for notification in notifications:
                if notification.payload == word:
                    return True, pooled
    return False, pooled


@check(needs="database")
async def clock(context: DatabaseContext) -> Results:
    """Find that this host's clock, which ids, signatures and logs use, differs from the database's."""
    begun, here = time.monotonic(), context.clock()
    there = await context.store.now()
    # Half the round trip is the best guess of when the database read its clock.
    passed = time.monotonic() - begun
    skew = here + passed / 2 - there.timestamp()
    if abs(skew) < NOTICEABLE + passed:
        return
    level: Level = "warning"
    effect = "leases do not depend on it, but the order of ids and the times in signatures and logs do"
    if abs(skew) >= REFUSED:
        level, effect = "error", "receivers refuse signatures whose time is 5 minutes off"
    title = f"this host's clock is {abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} the database's"
    detail = f"here it is {at(datetime.fromtimestamp(here, UTC))}, there {at(there)}; {effect}"
    fix = "timedatectl set-ntp true   # on whichever host is wrong; `chronyc tracking` says which"
    yield Finding(level, title, detail, fix)


@check(needs="database", on=SERVERS)
def transactions(context: DatabaseContext) -> Results:
    """Find what prevents the cleanup of dead rows: old transactions, unread slots, old standbys."""
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
        fix = f"ALTER SYSTEM SET {setting} = on;\nSELECT pg_reload_conf();"
        yield Finding("error", f"{setting} is off on this server", UNCLEANED, fix)
    tables = outbox.metadata().tables.values()
    names = {table.name: quoted(outbox, table.schema, table.name) for table in tables}
    rows = await context.ask(server.DEAD_ROWS, names=list(names.values()))
    for name, options, live, dead, vacuumed in rows:
        if _OFF_FOR_TABLE.intersection(options or ()):
            fix = f"ALTER TABLE {names[name]} RESET (autovacuum_enabled);"
            yield Finding("error", f"autovacuum is off for {name}", f"its {UNCLEANED}", fix)
        if dead and dead > DEAD and dead > live / 2:
            when = "never" if vacuumed is None else f"last at {at(vacuumed)}"
            detail = f"beside {live:,} that live; it was vacuumed {when}"
            fix = f"VACUUM (ANALYZE) {names[name]};"
            yield Finding("warning", f"{name} has {dead:,} dead rows", detail, fix)
