"""The server itself: which version it is, whether it takes writes, and its default isolation."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from relaybox.doctor.check import DatabaseContext, Results
from relaybox.doctor.finding import Finding

OLDEST: Final = {"postgresql": (13,), "mariadb": (10, 6), "mysql": (8, 0), "sqlite": (3, 35)}
"""The oldest versions that are supported."""

NAMES = {"postgresql": "PostgreSQL", "mariadb": "MariaDB", "mysql": "MySQL", "sqlite": "SQLite"}

PACKET = 16 * 1024 * 1024
"""What MariaDB must take in one statement: a settle of the most rows with the longest errors."""

_POSTGRESQL = """
SELECT current_setting('server_version'), pg_is_in_recovery(), reset_val, quote_ident(current_database())
FROM pg_settings WHERE name = 'default_transaction_read_only'"""
_MYSQL = "SELECT VERSION(), @@global.read_only, @@max_allowed_packet"
_BINLOG = "SELECT @@log_bin, @@global.binlog_format"
_ISOLATION = """
SELECT reset_val, quote_ident(current_database()) FROM pg_settings
WHERE name = 'default_transaction_isolation'"""


async def look(context: DatabaseContext) -> Results:
    """The version, and whether anything keeps a relay from writing."""
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
    """What to say of a server of this version, where it is too old."""
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
    [(version, standby, read_only, name)] = await context.ask(_POSTGRESQL)
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
    [(version, read_only, packet)] = await context.ask(_MYSQL)
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
    """What may not be written of a file and its directory, where the journal is."""
    return [one for one in (path, path.absolute().parent) if one.exists() and not os.access(one, os.W_OK)]


async def isolation(context: DatabaseContext) -> Results:
    """Relays say their own level. Emitters have the default, and a level above it raises more often."""
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
