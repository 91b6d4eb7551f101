"""From the URL of a database to the store in it. Its driver is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from relaybox.core.imports import import_extra
from relaybox.database.migrations import server_dialect
from relaybox.database.schema import Tables

if TYPE_CHECKING:
    from relaybox.stores.sql.store import SqlStore


def open_store(database: str, tables: Tables, *, connections: int = 3) -> SqlStore:
    """Open the store in a database; it holds at most ``connections`` connections, on SQLite one.

    One that extends leases or beats, as a relay's does, has one more for that.
    """
    dialect = server_dialect(database)
    if dialect == "sqlite":
        from relaybox.stores.sql import sqlite

        return sqlite.open_store(sa.make_url(database).database or ":memory:", tables)
    options: dict[str, Any] = {"connections": connections}
    if dialect == "postgresql":
        opened = import_extra("relaybox.stores.sql.postgres:open_store", "psycopg", "postgres")
    else:
        opened = import_extra("relaybox.stores.sql.mysql:open_store", "asyncmy", "mysql")
        options["mariadb"] = dialect == "mariadb"
    store: SqlStore = opened(database, tables, **options)
    return store
