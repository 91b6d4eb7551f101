"""Opens a short synchronous connection to any database, for statements without parameters."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sqlite3
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import sqlalchemy as sa

from relaybox.core.event_loop import in_loop
from relaybox.core.values import mask_url, without_password
from relaybox.errors import ConfigError, MissingExtra, StoreError

Row: TypeAlias = Sequence[Any]
Execute: TypeAlias = Callable[[str], list[Row]]

BUSY = 60.0

DENIED = "42501"
"""SQLSTATE of PostgreSQL for a missing privilege."""

DENIED_MYSQL = {1044, 1142, 1227}
"""MySQL's errors for a missing privilege: on a database, for a statement, for administration."""


@contextmanager
def connected(url: str, *, create: bool = True) -> Iterator[Execute]:
    """Yield a function that executes statements.

    PostgreSQL, and SQLite after BEGIN, commit at the end; MySQL commits each statement. Without ``create``, a
    missing SQLite file counts as an empty database.
    """
    open_, errors = _opener(url.partition(":")[0], create)
    try:
        with open_(url) as execute:
            yield execute
    except errors as error:
        raise StoreError(f"{mask_url(url)}: {_reason(url, error)}") from error


def in_memory(url: str) -> bool:
    """True if the SQLite database disappears when its connection closes."""
    if not url.startswith("sqlite:"):
        return False
    parsed = _parsed(url)
    path = (parsed.database or ":memory:").removeprefix("file:")
    # A shared in-memory database lives on in the application's other connections.
    shared = parsed.query.get("cache") == "shared"
    return not shared and (path == ":memory:" or parsed.query.get("mode") == "memory")


def denied(error: BaseException | None) -> bool:
    """True if the database refused because the user lacks a privilege."""
    if error is None:
        return False
    return getattr(error, "sqlstate", None) == DENIED or not DENIED_MYSQL.isdisjoint(error.args[:1])


def _reason(url: str, error: Exception) -> str:
    text = _message(error)
    if text == "unable to open database file":
        text = f"{text}: {_why_not_opened(_parsed(url).database or '')}"
    return " ".join(without_password(text, url).split())


def _message(error: Exception) -> str:
    """Return the database's message without the statement excerpt or the tuple that drivers add."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    match error.args:
        case _ if primary:
            return str(primary)
        case (int(code), str(text)):
            return f"{text} ({code})"
    return str(error)


def _why_not_opened(path: str) -> str:
    directory = Path(path.removeprefix("file:")).absolute().parent
    if not directory.is_dir():
        return f"the directory {directory} does not exist"
    return f"the directory {directory} exists; see who may read and write there"


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
        # The migration lock must come before the snapshot; stricter isolation levels reverse that order.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED

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
    (path,), options = _arguments(parsed)
    # Python's implicit transactions start too late: after DDL, and not as a writer.
    connection = sqlite3.connect(path, **({"timeout": BUSY} | dict(options) | {"isolation_level": None}))
    try:
        yield lambda statement: connection.execute(statement).fetchall()
        connection.commit()
    finally:
        connection.close()


@contextmanager
def _mysql(url: str) -> Iterator[Execute]:
    with _runner() as run:
        try:
            connection = run(_connect_mysql(_parsed(url)))
        except TypeError:
            raise _wrong_options(url) from None
        try:
            yield lambda statement: run(_fetch_mysql(connection, statement))
        finally:
            run(connection.ensure_closed())


@contextmanager
def _runner() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Yield a function that runs coroutines, in another thread if this one already runs a loop."""
    with asyncio.Runner() as runner:
        if not in_loop():
            yield runner.run
            return
        with ThreadPoolExecutor(1) as thread:
            try:
                yield lambda coroutine: thread.submit(runner.run, coroutine).result()
            finally:
                thread.submit(runner.close).result()


async def _connect_mysql(url: sa.URL) -> Any:
    import asyncmy

    url = url.set(drivername="mysql+asyncmy")
    _, options = _arguments(url)
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


def _arguments(url: sa.URL) -> tuple[Sequence[Any], Mapping[str, Any]]:
    try:
        return url.get_dialect()().create_connect_args(url)
    except (sa.exc.ArgumentError, ValueError):
        raise _wrong_options(url.render_as_string()) from None


def _wrong_options(url: str) -> ConfigError:
    fix = "the driver does not take it so; see its documentation for what may stand after the question mark"
    return ConfigError(f"database = {mask_url(url)!r}: {fix}")


def hang_up(fileno: int) -> None:
    """Shut the socket down: a cancelled driver may otherwise wait for the server again."""
    with suppress(OSError), socket.socket(fileno=os.dup(fileno)) as end:
        end.shutdown(socket.SHUT_RDWR)
