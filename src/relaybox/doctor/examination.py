"""The examination: every check by itself, bounded, so that none can hide what another finds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from relaybox.admin import Admin
from relaybox.config import Settings
from relaybox.connect import denied, in_memory
from relaybox.doctor import clock as clocks
from relaybox.doctor import (
    database,
    destinations,
    durability,
    listener,
    privileges,
    relays,
    sinks,
    transactions,
    vacuum,
)
from relaybox.doctor import schema as schemas
from relaybox.doctor import settings as configurations
from relaybox.doctor.check import Context, DatabaseContext, Results, typed
from relaybox.doctor.finding import Finding, Report, Unseen, report
from relaybox.errors import ConfigError, RelayboxError, StoreError, did_you_mean
from relaybox.migrations import DialectName, Outbox
from relaybox.parts import Handlers, open_store
from relaybox.program import Program
from relaybox.schema import make_tables
from relaybox.setting import mask_url
from relaybox.sink import describe
from relaybox.stores.ledger import SqlLedger

PATIENCE = 12.0
"""Seconds that one check may take in all."""

ACTOR = "doctor"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at. ``tables``: it looks at the outbox's own tables, so that they must be there."""

    name: str
    what: str
    run: Callable[[Any], Results]
    database: bool = True
    tables: bool = True
    on: Collection[str] = ("postgresql", "mariadb", "mysql", "sqlite")


CHECKS = (
    Check("settings", "settings that will hardly do what was meant", configurations.look, database=False),
    Check("sinks", "secrets, functions, packages, and whether each sink answers", sinks.look, database=False),
    Check("database", "version, and whether it takes writes", database.look, tables=False),
    Check("isolation", "the default isolation, and what depends on it", database.isolation, tables=False),
    Check(
        "durability",
        "whether a crash undoes commits that were answered",
        durability.look,
        tables=False,
        on=("postgresql", "mariadb", "mysql"),
    ),
    Check("schema", "tables, columns, constraints and indexes against this release's", schemas.look),
    Check("privileges", "what a relay needs and the connected role may not", privileges.look),
    Check(
        "listener", "whether a NOTIFY is heard, and a pooler", listener.look, tables=False, on=("postgresql",)
    ),
    Check("clock", "this host's clock against the database's", clocks.look, tables=False),
    Check(
        "transactions",
        "what keeps the database from cleaning up: old transactions, replication slots, standbys",
        transactions.look,
        tables=False,
        on=("postgresql", "mariadb", "mysql"),
    ),
    Check("vacuum", "autovacuum, and dead rows", vacuum.look, on=("postgresql",)),
    Check("destinations", "rows that nobody will deliver, and what holds up others", destinations.look),
    Check("payloads", "rows that do not decode, of a sample", destinations.payloads),
    Check("relays", "whether a relay runs while something is due, and how relays differ", relays.look),
)
"""In the order in which they are made."""


async def examine(
    settings: Settings,
    handlers: Handlers,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    clock: Callable[[], float] = time.time,
) -> Report:
    """Make every check, or ``only`` those named, but not those to ``skip``."""
    chosen = choose(only, skip)
    context = Context(settings, handlers, clock)
    of_database = [check for check in chosen if check.database]
    beside = [_look(check, context) for check in chosen if not check.database]
    results = await asyncio.gather(*beside, _of_database(context, of_database))
    return report((one for part in results for one in part), (check.name for check in chosen))


def choose(only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """The checks of these names; raises ``ConfigError`` where there is no such."""
    known = [check.name for check in CHECKS]
    for name in (*only, *skip):
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"no check is called {name!r}{hint}")
    return [check for check in CHECKS if check.name not in skip and (not only or check.name in only)]


async def _of_database(context: Context, checks: Sequence[Check]) -> list[Finding | Unseen]:
    """One after the other: what the connection of one went down with, the next one does not share."""
    if not checks:
        return []
    try:
        async with _opened(context) as opened:
            if not opened.version:
                return [_no_tables(), *await _look_at_all(opened, [one for one in checks if not one.tables])]
            return await _look_at_all(opened, checks)
    except Exception as error:
        # Of whatever kind: a driver's, or the file system's.
        return [_unreachable(context.settings, error)]


async def _look_at_all(context: DatabaseContext, checks: Sequence[Check]) -> list[Finding | Unseen]:
    dialect = context.outbox.dialect
    return [one for check in checks if dialect in check.on for one in await _look(check, context)]


@asynccontextmanager
async def _opened(context: Context) -> AsyncIterator[DatabaseContext]:
    settings = context.settings
    _check_file(settings.database)
    tables = make_tables(sa.MetaData(), schema=settings.schema, prefix=settings.prefix)
    async with asyncio.timeout(PATIENCE):
        store = await asyncio.to_thread(open_store, settings.database, tables, connections=1)
        dialect: DialectName = store.steps.dialect.name  # type: ignore[assignment]
    try:
        outbox = Outbox(dialect, settings.schema, settings.prefix)
        async with asyncio.timeout(PATIENCE):
            version = await schemas.recorded(store, outbox)
        admin = Admin(SqlLedger(store), settings.destinations, ACTOR)
        yield DatabaseContext(settings, context.handlers, context.clock, store, admin, outbox, version)
    finally:
        # What was found counts, however a connection ends.
        with suppress(Exception):
            async with asyncio.timeout(PATIENCE):
                await store.close()


def _check_file(url: str) -> None:
    """An SQLite file that is not there would be made by looking at it."""
    if in_memory(url):
        raise ConfigError("it is in memory, where no other process sees it; name a file")
    if not url.startswith("sqlite:"):
        return
    path = sa.make_url(url).database or ""
    if not path.startswith("file:") and not Path(path).exists():
        raise ConfigError(f"there is no file {path}; run `{Program.migrate}`")


def _unreachable(settings: Settings, error: BaseException) -> Finding:
    where = mask_url(settings.database)
    told = str(error) if isinstance(error, RelayboxError) else describe(error)
    late = isinstance(error, TimeoutError)
    text = f"no answer within {PATIENCE:g} s" if late else " ".join(told.removeprefix(f"{where}: ").split())
    seen, _, fix = text.rpartition("; ")
    seen, fix = (seen, fix) if seen else (text, "")
    if denied(error.__cause__):
        title, otherwise = "the connected role may not look at the tables", typed("sql", "--grants")
    else:
        title = "the database cannot be reached"
        otherwise = "start it, or write another URL into the setting `database`"
    return Finding("error", title, f"{where}: {seen}", fix or otherwise, "database")


def _no_tables() -> Finding:
    detail = "there is no table of migrations, or nothing in it, where the settings say the tables are"
    return Finding("error", "the tables are missing", detail, Program.migrate, "schema")


async def _look(check: Check, context: Context) -> list[Finding | Unseen]:
    """What one check has to say, whatever goes wrong with it half-way."""
    found: list[Finding | Unseen] = []
    try:
        async with asyncio.timeout(PATIENCE):
            async for one in check.run(context):
                found.append(one)
    except TimeoutError:
        found.append(Unseen(f"no answer within {PATIENCE:g} s"))
    except StoreError as error:
        lacks = "the connected role may not read it" if denied(error.__cause__) else ""
        found.append(Unseen(" ".join(f"{lacks}: {error}".removeprefix(": ").split())))
    except Exception as error:
        found.append(Unseen(" ".join(describe(error).split())))
    return [replace(one, check=check.name) for one in found]
