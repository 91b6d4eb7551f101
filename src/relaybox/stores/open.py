"""Opens the store for a database URL, and imports its driver on demand."""

from __future__ import annotations

import sqlalchemy as sa

from relaybox.core.imports import import_extra
from relaybox.database.dialects import MARIADB, MYSQL, POSTGRESQL, SQLITE
from relaybox.database.migrations import server_dialect
from relaybox.database.schema import Tables
from relaybox.database.statements.delivery import Statements
from relaybox.stores.sql.steps import StoreSteps
from relaybox.stores.sql.store import SqlStore


def open_store(database: str, tables: Tables, *, connections: int = 3) -> SqlStore:
    """Open the store in a database, with at most ``connections`` connections; SQLite uses one.

    Elsewhere a relay opens one more, for lease extensions and heartbeats.
    """
    match server_dialect(database):
        case "postgresql":
            return open_postgresql(database, tables, connections=connections)
        case "sqlite":
            return open_sqlite(sa.make_url(database).database or ":memory:", tables)
        case name:
            return open_mysql(database, tables, connections=connections, mariadb=name == "mariadb")


def open_postgresql(url: str, tables: Tables, *, connections: int = 3) -> SqlStore:
    """Open a store in a PostgreSQL database."""
    pool = import_extra("relaybox.database.pools.postgresql:Psycopg", "psycopg", "postgres")
    statements = Statements(tables, POSTGRESQL, "numeric")
    steps = StoreSteps(statements)
    return SqlStore(steps, pool(url, connections, statements), pool(url, 1, statements))


def open_mysql(url: str, tables: Tables, *, connections: int = 3, mariadb: bool = True) -> SqlStore:
    """Open a store in a MariaDB or MySQL database."""
    pool = import_extra("relaybox.database.pools.mysql:Asyncmy", "asyncmy", "mysql")
    steps = StoreSteps(Statements(tables, MARIADB if mariadb else MYSQL, "format"))
    return SqlStore(steps, pool(url, connections, mariadb), pool(url, 1, mariadb))


def open_sqlite(path: str, tables: Tables) -> SqlStore:
    """Open a store in the SQLite file at ``path``."""
    from relaybox.database.pools.sqlite import Sqlite3

    return SqlStore(StoreSteps(Statements(tables, SQLITE, "qmark")), Sqlite3(path))
