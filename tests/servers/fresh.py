"""A new, empty database on a running server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

import sqlalchemy as sa

DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}


@contextmanager
def database(server_url: str) -> Iterator[str]:
    """Yield the URL of a new database; afterwards drop it, whoever is still connected to it."""
    url = sa.make_url(server_url)
    name = f"relaybox_{uuid4().hex}"
    engine = sa.create_engine(
        url.set(drivername=DRIVERS[url.drivername]), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool
    )
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    try:
        yield url.set(database=name).render_as_string(hide_password=False)
    finally:
        with engine.connect() as connection:
            _drop(connection, name)


def _drop(connection: sa.Connection, name: str) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
        return
    threads = sa.text("SELECT id FROM information_schema.processlist WHERE db = :name")
    for thread in connection.scalars(threads, {"name": name}).all():
        # It may have ended by itself in the meantime.
        with suppress(sa.exc.OperationalError):
            connection.execute(sa.text("KILL :thread"), {"thread": thread})
    connection.execute(sa.text(f"DROP DATABASE {name}"))
