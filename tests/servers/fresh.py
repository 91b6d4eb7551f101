"""A database of a test's own on a running server: empty, or with Relaybox's tables.

Making the tables takes longer than most tests. On PostgreSQL they are copied from a template, on MariaDB a
database that a test has left is emptied and given to the next one, and SQLite copies a file.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

import sqlalchemy as sa

from relaybox.migrations import migrate
from tests.servers import base, sqlite

DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
TEMPLATE = "relaybox_template"
KEPT = "outbox_migration"
"""The one table that has rows after a migration."""

_spare: dict[str, list[tuple[str, frozenset[tuple[str, str]]]]] = defaultdict(list)
"""Names of migrated and empty MariaDB databases by server, each with what its tables looked like."""


@contextmanager
def database(server_url: str) -> Iterator[str]:
    """Yield the URL of a new database; afterwards drop it, even if something is still connected to it."""
    with _administer(server_url) as connection:
        name = _create(connection)
    try:
        yield _url(server_url, name)
    finally:
        with _administer(server_url) as connection:
            _drop(connection, name)


@contextmanager
def migrated(server_url: str) -> Iterator[str]:
    """Yield the URL of a database that has Relaybox's tables, all empty."""
    take = _from_template if sa.make_url(server_url).drivername == "postgresql" else _from_pool
    with take(server_url) as url:
        yield url


@contextmanager
def migrated_sqlite() -> Iterator[str]:
    """Yield the URL of a file that has Relaybox's tables, all empty."""
    with sqlite.server() as url:
        shutil.copyfile(_sqlite_template(), url.removeprefix("sqlite:///"))
        yield url


@contextmanager
def _from_template(server_url: str) -> Iterator[str]:
    with _administer(server_url) as connection:
        _make_template(connection, server_url)
        name = _create(connection, f" TEMPLATE {TEMPLATE}")
    try:
        yield _url(server_url, name)
    finally:
        with _administer(server_url) as connection:
            _drop(connection, name)


def _make_template(connection: sa.Connection, server_url: str) -> None:
    exists = sa.text("SELECT 1 FROM pg_database WHERE datname = :name")
    if connection.scalar(exists, {"name": TEMPLATE}):
        return
    # Other test processes wait here for the first of them.
    connection.execute(sa.text("SELECT pg_advisory_lock(1)"))
    try:
        if not connection.scalar(exists, {"name": TEMPLATE}):
            name = _create(connection)
            migrate(_url(server_url, name))
            # Under its name only when it is whole.
            connection.execute(sa.text(f"ALTER DATABASE {name} RENAME TO {TEMPLATE}"))
    finally:
        connection.execute(sa.text("SELECT pg_advisory_unlock(1)"))


@contextmanager
def _from_pool(server_url: str) -> Iterator[str]:
    with _administer(server_url) as connection:
        name, tables = (
            _spare[server_url].pop() if _spare[server_url] else _new_for_pool(connection, server_url)
        )
    try:
        yield _url(server_url, name)
    finally:
        with _administer(server_url) as connection:
            _disconnect(connection, name)
            if _tables(connection, name) == tables:
                _empty(connection, name, tables)
                _spare[server_url].append((name, tables))
            else:
                _drop(connection, name)


def _new_for_pool(connection: sa.Connection, server_url: str) -> tuple[str, frozenset[tuple[str, str]]]:
    name = _create(connection)
    migrate(_url(server_url, name))
    return name, _tables(connection, name)


def _tables(connection: sa.Connection, name: str) -> frozenset[tuple[str, str]]:
    """Return the tables with their definitions, but for the next automatic number."""
    found = connection.scalars(
        sa.text("SELECT table_name FROM information_schema.tables WHERE table_schema = :name"), {"name": name}
    ).all()
    definitions = {
        table: connection.execute(sa.text(f"SHOW CREATE TABLE {name}.`{table}`")).one()[1] for table in found
    }
    return frozenset(
        (table, " ".join(word for word in definition.split() if not word.startswith("AUTO_INCREMENT=")))
        for table, definition in definitions.items()
    )


def _empty(connection: sa.Connection, name: str, tables: frozenset[tuple[str, str]]) -> None:
    for table, _ in tables:
        if table != KEPT:
            connection.execute(sa.delete(sa.table(table, schema=name)))


@cache
def _sqlite_template() -> Path:
    directory = base.kept_workspace()
    template = directory / "template.db"
    migrate(f"sqlite:///{template}")
    return template


def _administer(server_url: str) -> sa.Connection:
    return _engine(server_url).connect()


@cache
def _engine(server_url: str) -> sa.Engine:
    url = sa.make_url(server_url)
    # Made once for each server: the first connection of an engine asks for much that the others know.
    return sa.create_engine(
        url.set(drivername=DRIVERS[url.drivername]), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
    )


def _url(server_url: str, name: str) -> str:
    return sa.make_url(server_url).set(database=name).render_as_string(hide_password=False)


def _create(connection: sa.Connection, options: str = "") -> str:
    name = f"relaybox_{uuid4().hex}"
    connection.execute(sa.text(f"CREATE DATABASE {name}{options}"))
    return name


def _drop(connection: sa.Connection, name: str) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
        return
    _disconnect(connection, name)
    connection.execute(sa.text(f"DROP DATABASE {name}"))


def _disconnect(connection: sa.Connection, name: str) -> None:
    threads = sa.text("SELECT id FROM information_schema.processlist WHERE db = :name")
    for thread in connection.scalars(threads, {"name": name}).all():
        # It may have ended by itself in the meantime.
        with suppress(sa.exc.OperationalError):
            connection.execute(sa.text("KILL :thread"), {"thread": thread})
