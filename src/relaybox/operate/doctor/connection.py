"""Checks of the connection to the database: the role's privileges, notifications, this host's clock."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import fields
from typing import Any
from uuid import uuid4

from relaybox.database.migrations import Outbox, quoted
from relaybox.database.roles import CHANGE
from relaybox.database.schema import MYSQL
from relaybox.database.statements import server
from relaybox.operate.doctor.check import SERVERS, DatabaseContext, Finding, Level, Results, Unseen, check

_GRANT = re.compile(r"GRANT (.+?) ON (?:TABLE )?(\S+) TO ")

READ, NEEDED = "SELECT", CHANGE.split(", ")

CHANNEL = "relaybox_doctor"
"""Its own, so that no relay is woken; always the same, because a pooler may keep a LISTEN."""

NOTIFY_SECONDS = 3.0
"""How long a notification has to arrive."""

_OPTIONS = {"connect_timeout": 5, "autocommit": True, "prepare_threshold": None}

NOTICEABLE = 5.0
"""Seconds of difference that show in the ids and times that this host makes."""

REFUSED = 300.0
"""Seconds of difference for which receivers refuse signatures with this host's time."""


@check(on=SERVERS)
async def privileges(context: DatabaseContext) -> Results:
    """Find what a relay needs and the connected role lacks; a role that only reads is not a relay's."""
    [(role,)] = await context.ask(server.CURRENT_USER[context.outbox.dialect])
    tables = context.outbox.tables()
    every = [getattr(tables, field.name) for field in fields(tables)]
    needed = {table.name: [READ] if table is tables.migration else NEEDED for table in every}
    held = await _held(context, needed)
    lacking = {
        table: missing
        for table, of in needed.items()
        if table in held and (missing := [one for one in of if one not in held[table]])
    }
    if not lacking:
        return
    changes = any(one != READ for of in held.values() for one in of)
    if not changes and all(READ not in of for of in lacking.values()):
        yield Unseen(f"{role} may only read: whether a relay's role has its rights cannot be told from it")
    else:
        yield _lacks(context.outbox, str(role), lacking)


async def _held(context: DatabaseContext, needed: Collection[str]) -> Mapping[str, Collection[str]]:
    """Return the rights to each table that exists."""
    outbox = context.outbox
    if outbox.dialect in MYSQL:
        rows = await context.ask(server.GRANTS_MYSQL)
        [(name,)] = await context.ask(server.SCHEMA_MYSQL, schema=outbox.schema)
        return parse_grants([str(row[0]) for row in rows], str(name), needed)
    if outbox.schema and (await context.ask(server.SCHEMA_RIGHTS, schema=outbox.schema))[0][0] is False:
        return dict.fromkeys(needed, ())
    names = {quoted(outbox, outbox.schema, table): table for table in needed}
    rows = await context.ask(server.TABLE_RIGHTS, names=list(names), privileges=NEEDED)
    # A missing table is a finding of the schema check.
    held: dict[str, set[str]] = {names[name]: set() for name, _, _ in rows}
    for name, privilege, may in rows:
        if may:
            held[names[name]].add(privilege)
    return held


def parse_grants(lines: Iterable[str], schema: str, tables: Iterable[str]) -> dict[str, set[str]]:
    """Return the rights to these tables from the lines of SHOW GRANTS."""
    held: dict[str, set[str]] = {table: set() for table in tables}
    for line in lines:
        match = _GRANT.match(line)
        if match is None:
            continue
        place, _, table = match[2].replace("`", "").partition(".")
        if place != "*" and not _like(place).fullmatch(schema):
            continue
        every = match[1].startswith("ALL PRIVILEGES")
        granted = {one for one in NEEDED if every or one in re.findall(r"[A-Z]+", match[1])}
        for name in held if table == "*" else held.keys() & {table}:
            held[name] |= granted
    return held


def _like(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a MySQL pattern for names of databases."""
    parts = re.split(r"(\\[_%]|[_%])", pattern)
    words = {"_": ".", "%": ".*"}
    return re.compile("".join(words.get(part, re.escape(part.removeprefix("\\"))) for part in parts))


def _lacks(outbox: Outbox, role: str, lacking: Mapping[str, list[str]]) -> Finding:
    user, at, host = role.partition("@")
    whom = quoted(outbox, role)
    if at and outbox.dialect in MYSQL:
        whom = f"{quoted(outbox, user)}@{quoted(outbox, host)}"
    grants = [
        f"GRANT {', '.join(of)} ON {quoted(outbox, outbox.schema, table)} TO {whom};"
        for table, of in lacking.items()
    ]
    if outbox.dialect == "postgresql" and outbox.schema:
        grants.insert(0, f"GRANT USAGE ON SCHEMA {quoted(outbox, outbox.schema)} TO {whom};")
    detail = "; ".join(f"no {', '.join(of)} on {table}" for table, of in lacking.items())
    return Finding("error", f"{role} lacks rights that a relay needs", detail, "\n".join(grants))


@check(needs="database", on=("postgresql",))
async def listener(context: DatabaseContext) -> Results:
    """Find that a NOTIFY of one connection is not heard by another, and a pooler that is the reason."""
    if not context.settings.notify:
        return
    import psycopg

    try:
        heard, pooled = await _round_trip(context.settings.database)
    except psycopg.Error as error:
        yield Unseen(" ".join(str(error).split()))
        return
    if heard:
        return
    waits = "relays find events by polling, each poll_interval, instead of at once"
    if pooled:
        title = "a transaction pooler stands before the database"
        detail = f"what a session has set is lost between transactions, and so is LISTEN: {waits}"
        fix = (
            "give the relay the server's own address (on PgBouncer: or one with pool_mode = session), "
            "or set notify = false to be content with polling"
        )
        yield Finding("warning", title, detail, fix)
    else:
        title = "a notification that was sent did not arrive"
        fix = "give the relay a connection on which LISTEN works, or set notify = false"
        yield Finding("warning", title, f"within {NOTIFY_SECONDS:g} s: {waits}", fix)


async def _round_trip(url: str) -> tuple[bool, bool]:
    """Return whether it was heard, and whether there is a pooler: it invents the process number."""
    from psycopg import AsyncConnection
    from psycopg.conninfo import conninfo_to_dict

    from relaybox.database.drivers.notify import NOTIFY, listen

    options: dict[str, Any] = {**_OPTIONS, **conninfo_to_dict(url), "autocommit": True}
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
    # Half of the way there and back is the best guess of when the database looked at its clock.
    passed = time.monotonic() - begun
    skew = here + passed / 2 - there.timestamp()
    if abs(skew) < NOTICEABLE + passed:
        return
    level: Level = "warning"
    effect = "leases do not depend on it, but the order of ids and the times in signatures and logs do"
    if abs(skew) >= REFUSED:
        level, effect = "error", "receivers refuse signatures whose time is 5 minutes off"
    yield Finding(
        level,
        f"this host's clock is {abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} the database's",
        f"here it is {_utc(here)}, there {_utc(there.timestamp())}; {effect}",
        "timedatectl set-ntp true   # on whichever host is wrong; `chronyc tracking` says which",
    )


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
