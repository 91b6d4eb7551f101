"""The databases that tests run on, and the drivers that reach them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

KINDS = ("postgresql-18", "mariadb", "sqlite")
SERVERS = ("postgresql-18", "mariadb")
POSTGRESQL = ("postgresql-18", "postgresql-15")
EVERY_KIND = ("postgresql-18", "postgresql-15", "mariadb", "sqlite")
"""With PostgreSQL 15, whose tests only `make test-all` runs."""

SYNC = {"postgresql": "postgresql+psycopg", "mysql": "mariadb+pymysql", "sqlite": "sqlite"}
ASYNC = {"postgresql": "postgresql+asyncpg", "mysql": "mariadb+asyncmy", "sqlite": "sqlite+aiosqlite"}


def sync_url(url: str) -> sa.URL:
    """Return the URL with SQLAlchemy's name of the synchronous driver."""
    made = sa.make_url(url)
    return made.set(drivername=SYNC[made.get_backend_name()])


def async_url(url: str) -> sa.URL:
    """Return the URL with SQLAlchemy's name of the asynchronous driver."""
    made = sa.make_url(url)
    return made.set(drivername=ASYNC[made.get_backend_name()])


def engine(url: str, **options: Any) -> sa.Engine:
    """Return an engine that opens a connection for each use, so that none is left behind."""
    return sa.create_engine(sync_url(url), **{"poolclass": sa.NullPool, **options})
