"""Find what is wrong with a set-up, and say how to fix it.

A check is a function with the decorator ``check``; its name is the function's. List a new one in ``CHECKS``,
in the help of ``relaybox doctor`` and in ``docs/how-to/doctor.md``. Every check runs by itself with a time
limit, so it cannot hide the findings of another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from relaybox.core.commands import Program
from relaybox.core.settings import Settings
from relaybox.core.values import mask_url
from relaybox.database.connect import denied, in_memory
from relaybox.database.migrations import DialectName, Outbox
from relaybox.database.schema import make_tables
from relaybox.errors import ConfigError, RelayboxError, StoreError, did_you_mean
from relaybox.operate.admin import Admin
from relaybox.operate.doctor import configuration, database, deliveries, schema
from relaybox.operate.doctor.check import (
    LEVELS,
    Check,
    Context,
    DatabaseContext,
    Finding,
    Level,
    Report,
    Unseen,
    split_fix,
    typed,
)
from relaybox.sinks.open import Handlers
from relaybox.sinks.sink import describe
from relaybox.stores.open import open_store
from relaybox.stores.sql.ledger import SqlLedger

__all__ = ["CHECKS", "Check", "Finding", "Level", "Report", "Unseen", "choose", "examine"]

CHECK_SECONDS = 12.0

ACTOR = "doctor"

NO_TABLES = "there is no table of migrations, or nothing in it, where the settings say the tables are"

CHECKS: tuple[Check, ...] = (
    configuration.settings,
    configuration.sinks,
    database.database,
    database.isolation,
    database.durability,
    schema.schema,
    database.privileges,
    database.listener,
    database.clock,
    database.transactions,
    database.vacuum,
    deliveries.destinations,
    deliveries.payloads,
    deliveries.relays,
)


async def examine(
    settings: Settings,
    handlers: Handlers,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    clock: Callable[[], float] = time.time,
) -> Report:
    """Run every check, or ``only`` those named, without those in ``skip``."""
    chosen = choose(only, skip)
    context = Context(settings, handlers, clock)
    of_settings = [_run(check, context) for check in chosen if check.needs == "settings"]
    of_database = [check for check in chosen if check.needs != "settings"]
    parts = await asyncio.gather(*of_settings, _run_on_database(context, of_database))
    results = [one for part in parts for one in part]
    findings = [one for one in results if isinstance(one, Finding)]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    unseen = [one for one in results if isinstance(one, Unseen)]
    return Report(tuple(findings), tuple(unseen), tuple(check.name for check in chosen))


def choose(only: Sequence[str], skip: Sequence[str]) -> list[Check]:
    """Return the checks with these names; raise ``ConfigError`` if one is unknown."""
    known = [check.name for check in CHECKS]
    for name in (*only, *skip):
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"no check is called {name!r}{hint}")
    return [check for check in CHECKS if check.name not in skip and (not only or check.name in only)]


async def _run_on_database(context: Context, checks: Sequence[Check]) -> list[Finding | Unseen]:
    """Run the checks in sequence; each gets a working connection."""
    found: list[Finding | Unseen] = []
    if not checks:
        return found
    try:
        async with _opened(context) as opened:
            if not opened.version:
                found.append(Finding("error", "the tables are missing", NO_TABLES, Program.migrate, "schema"))
            for check in checks:
                if opened.outbox.dialect in check.on and (opened.version or check.needs != "tables"):
                    found += await _run(check, opened)
    except Exception as error:
        # Any kind of error: a driver's, or the file system's.
        found.append(_unreachable(context.settings, error))
    return found


@asynccontextmanager
async def _opened(context: Context) -> AsyncIterator[DatabaseContext]:
    settings = context.settings
    _check_file(settings.database)
    tables = make_tables(sa.MetaData(), schema=settings.schema, prefix=settings.prefix)
    async with asyncio.timeout(CHECK_SECONDS):
        store = await asyncio.to_thread(open_store, settings.database, tables, connections=1)
        dialect: DialectName = store.steps.dialect.name  # type: ignore[assignment]
    try:
        outbox = Outbox(dialect, settings.schema, settings.prefix)
        admin = Admin(SqlLedger(store), settings.destinations, ACTOR)
        opened = DatabaseContext(settings, context.handlers, context.clock, store, admin, outbox)
        async with asyncio.timeout(CHECK_SECONDS):
            version = await schema.recorded_version(opened)
        yield replace(opened, version=version)
    finally:
        # An error while closing must not hide the findings.
        with suppress(Exception):
            async with asyncio.timeout(CHECK_SECONDS):
                await store.close()


def _check_file(url: str) -> None:
    """Raise if the SQLite file does not exist: opening it would create it."""
    if in_memory(url):
        raise ConfigError("it is in memory, where no other process sees it; name a file")
    if not url.startswith("sqlite:"):
        return
    path = sa.make_url(url).database or ""
    if not path.startswith("file:") and not Path(path).exists():
        raise ConfigError(f"there is no file {path}; run `{Program.migrate}`")


def _unreachable(settings: Settings, error: BaseException) -> Finding:
    where = mask_url(settings.database)
    said = str(error) if isinstance(error, RelayboxError) else describe(error)
    if isinstance(error, TimeoutError):
        said = f"no answer within {CHECK_SECONDS:g} s"
    seen, fix = split_fix(said.removeprefix(f"{where}: "))
    if denied(error.__cause__):
        title, otherwise = "the connected role may not look at the tables", typed("sql", "--grants")
    else:
        title = "the database cannot be reached"
        otherwise = "start it, or write another URL into the setting `database`"
    return Finding("error", title, f"{where}: {seen}", fix or otherwise, "database")


async def _run(check: Check, context: Context) -> list[Finding | Unseen]:
    found: list[Finding | Unseen] = []
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            async for one in check.run(context):
                found.append(one)
    except TimeoutError:
        found.append(Unseen(f"no answer within {CHECK_SECONDS:g} s"))
    except StoreError as error:
        lacks = "the connected role may not read it" if denied(error.__cause__) else ""
        found.append(Unseen(" ".join(f"{lacks}: {error}".removeprefix(": ").split())))
    except Exception as error:
        found.append(Unseen(" ".join(describe(error).split())))
    return [replace(one, check=check.name) for one in found]
