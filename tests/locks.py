"""Count the statements that wait for a lock in one database of a server that other tests use too."""

from __future__ import annotations

import re
from collections.abc import Callable

import sqlalchemy as sa

_POSTGRESQL = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


def _postgresql(connection: sa.Connection) -> int:
    return int(connection.exec_driver_sql(_POSTGRESQL).scalar() or 0)


def _mysql(connection: sa.Connection) -> int:
    # innodb_trx is a copy that is not renewed while it is read, and the counters are the server's.
    status = connection.exec_driver_sql("SHOW ENGINE INNODB STATUS").one()[2]
    # The section before tells of the last deadlock, for as long as there is no other.
    now = status.rpartition("\nTRANSACTIONS\n")[2]
    return len(re.findall(f"TO BE GRANTED:\n.* table `{connection.engine.url.database}`", now))


QUERIES: dict[str, Callable[[sa.Connection], int]] = {
    "postgresql": _postgresql,
    "mysql": _mysql,
    "mariadb": _mysql,
}
"""By dialect. SQLite is not among them: its writers queue."""


def waiters(engine: sa.Engine) -> int:
    """Return how many statements wait for a lock in the engine's database."""
    # Each time in a transaction of its own: within one, PostgreSQL answers from a snapshot.
    with engine.connect() as connection:
        return QUERIES[engine.dialect.name](connection)
