"""A database of a test's own on a running server: empty, or with Relaybox's tables.

Making the tables takes longer than most tests. On PostgreSQL they are copied from a template, on MariaDB a
database that a test has left is emptied and given to the next one, and SQLite copies a file.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import sqlalchemy as sa

from relaybox.database.migrations import ddl, migrate
from tests import databases
from tests.servers import base, sqlite
from tests.waiting import wait_for

KEPT = "outbox_migration"
"""The one table that has rows after a migration."""


class State(NamedTuple):
    """What emptying a MariaDB database does not restore."""

    tables: dict[str, str]
    triggers: set[sa.Row[tuple[str, ...]]]
    migrations: set[sa.Row[tuple[object, ...]]]


_spare: dict[str, list[tuple[str, State]]] = defaultdict(list)
"""Names of migrated and empty MariaDB databases by server, each with its state after the migration."""


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
        name = _create(connection, f" TEMPLATE {_template(connection, server_url)}")
    try:
        yield _url(server_url, name)
    finally:
        with _administer(server_url) as connection:
            _drop(connection, name)


@cache
def _digest(ddl: Callable[[str], Sequence[str]]) -> str:
    return hashlib.sha256(repr(ddl("postgresql")).encode()).hexdigest()[:16]


def _template(connection: sa.Connection, server_url: str) -> str:
    """Return the name of the server's template; it holds for these migrations and no others."""
    template = f"relaybox_template_{_digest(ddl)}"
    exists = sa.text("SELECT 1 FROM pg_database WHERE datname = :name")
    if connection.scalar(exists, {"name": template}):
        return template
    # Other test processes wait here for the first of them.
    connection.execute(sa.text("SELECT pg_advisory_lock(1)"))
    try:
        if not connection.scalar(exists, {"name": template}):
            name = _create(connection)
            migrate(_url(server_url, name))
            # Under its name only when it is whole.
            connection.execute(sa.text(f"ALTER DATABASE {name} RENAME TO {template}"))
    finally:
        connection.execute(sa.text("SELECT pg_advisory_unlock(1)"))
    return template


@contextmanager
def _from_pool(server_url: str) -> Iterator[str]:
    with _administer(server_url) as connection:
        name, state = (
            _spare[server_url].pop() if _spare[server_url] else _new_for_pool(connection, server_url)
        )
    try:
        yield _url(server_url, name)
    finally:
        with _administer(server_url) as connection:
            _disconnect(connection, name)
            if _state(connection, name) == state:
                _empty(connection, name, state.tables)
                _spare[server_url].append((name, state))
            else:
                _drop(connection, name)


def _new_for_pool(connection: sa.Connection, server_url: str) -> tuple[str, State]:
    name = _create(connection)
    migrate(_url(server_url, name))
    return name, _state(connection, name)


def _state(connection: sa.Connection, name: str) -> State:
    tables = _tables(connection, name)
    triggers = sa.text(
        "SELECT trigger_name, event_object_table, action_timing, event_manipulation, action_statement"
        " FROM information_schema.triggers WHERE trigger_schema = :name"
    )
    migrations = sa.select(sa.text("*")).select_from(sa.table(KEPT, schema=name))
    return State(
        tables,
        set(connection.execute(triggers, {"name": name})),
        set(connection.execute(migrations)) if KEPT in tables else set(),
    )


def _tables(connection: sa.Connection, name: str) -> dict[str, str]:
    """Return the tables with their definitions, but for the next automatic number."""
    found = connection.scalars(
        sa.text("SELECT table_name FROM information_schema.tables WHERE table_schema = :name"), {"name": name}
    ).all()
    definitions = {
        table: connection.execute(sa.text(f"SHOW CREATE TABLE {name}.`{table}`")).one()[1] for table in found
    }
    return {
        table: " ".join(word for word in definition.split() if not word.startswith("AUTO_INCREMENT="))
        for table, definition in definitions.items()
    }


def _empty(connection: sa.Connection, name: str, tables: Iterable[str]) -> None:
    for table in tables:
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
    # Made once for each server: the first connection of an engine asks for much that the others know.
    return databases.engine(server_url, isolation_level="AUTOCOMMIT")


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
    """End the connections to a database; return when the server has undone what they had not committed."""
    query = sa.text("SELECT id FROM information_schema.processlist WHERE db = :name")

    def alone() -> bool:
        threads = connection.scalars(query, {"name": name}).all()
        for thread in threads:
            # It may have ended by itself in the meantime.
            with suppress(sa.exc.OperationalError):
                connection.execute(sa.text("KILL :thread"), {"thread": thread})
        return not threads

    wait_for(alone, f"the connections to {name} are gone")
