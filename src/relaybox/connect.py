"""A short synchronous connection to any of the databases, for statements without parameters."""

from __future__ import annotations

import asyncio
import importlib
import sqlite3
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import sqlalchemy as sa

from relaybox.errors import ConfigError, MissingExtra, StoreError
from relaybox.setting import mask_url

Row: TypeAlias = Sequence[Any]
Execute: TypeAlias = Callable[[str], list[Row]]

BUSY = 60.0
"""Seconds that SQLite waits for another writer."""


@contextmanager
def connected(url: str, *, create: bool = True) -> Iterator[Execute]:
    """Yield a function that executes a statement and returns its rows.

    PostgreSQL, and SQLite after a BEGIN, commit at the end or not at all; MySQL commits each statement.
    Without ``create`` an SQLite file that does not exist is taken for an empty database.
    """
    open_, errors = _opener(url.partition(":")[0], create)
    try:
        with open_(url) as execute:
            yield execute
    except errors as error:
        # libpq repeats a URL that it cannot read.
        reason = " ".join(str(error).replace(url, mask_url(url)).split())
        raise StoreError(f"{mask_url(url)}: {reason}") from error


def _opener(scheme: str, create: bool) -> tuple[Any, tuple[type[Exception], ...]]:
    match scheme:
        case "postgresql":
            return _postgresql, (_package("psycopg", "postgres").Error,)
        case "sqlite":
            return (_sqlite if create else _existing_sqlite), (sqlite3.Error,)
    return _mysql, (_package("asyncmy.errors", "mysql").MySQLError, OSError)


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingExtra(name.partition(".")[0], extra) from None


@contextmanager
def _postgresql(url: str) -> Iterator[Execute]:
    import psycopg

    with psycopg.connect(url) as connection:

        def execute(statement: str) -> list[Row]:
            cursor = connection.execute(statement.encode())
            return list(cursor.fetchall()) if cursor.description else []

        yield execute


@contextmanager
def _existing_sqlite(url: str) -> Iterator[Execute]:
    path = _parsed(url).database or ""
    missing = not path.startswith("file:") and not Path(path).exists()
    with _sqlite("sqlite://" if missing else url) as execute:
        yield execute


@contextmanager
def _sqlite(url: str) -> Iterator[Execute]:
    parsed = _parsed(url)
    (path,), options = parsed.get_dialect()().create_connect_args(parsed)
    # Python's own transactions would begin too late: not before DDL, and not as a writer.
    connection = sqlite3.connect(path, **({"timeout": BUSY} | dict(options) | {"isolation_level": None}))
    try:
        yield lambda statement: connection.execute(statement).fetchall()
        connection.commit()
    finally:
        # What was not committed is rolled back.
        connection.close()


@contextmanager
def _mysql(url: str) -> Iterator[Execute]:
    with _runner() as run:
        connection = run(_connect_mysql(_parsed(url)))
        try:
            yield lambda statement: run(_fetch_mysql(connection, statement))
        finally:
            run(connection.ensure_closed())


@contextmanager
def _runner() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Run coroutines from synchronous code: in another thread where this one runs a loop already."""
    with asyncio.Runner() as runner:
        if not _in_loop():
            yield runner.run
            return
        with ThreadPoolExecutor(1) as thread:
            try:
                yield lambda coroutine: thread.submit(runner.run, coroutine).result()
            finally:
                thread.submit(runner.close).result()


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _connect_mysql(url: sa.URL) -> Any:
    import asyncmy

    url = url.set(drivername="mysql+asyncmy")
    _, options = url.get_dialect()().create_connect_args(url)
    return await asyncmy.connect(**{"charset": "utf8mb4", **options}, autocommit=True)


async def _fetch_mysql(connection: Any, statement: str) -> list[Row]:
    async with connection.cursor() as cursor:
        await cursor.execute(statement)
        return list(await cursor.fetchall())


def _parsed(url: str) -> sa.URL:
    try:
        return sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        raise ConfigError(f"database = {mask_url(url)!r}: it cannot be read as a URL") from None
