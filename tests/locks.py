"""How many statements wait for a lock."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

_POSTGRESQL = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)
# Not innodb_trx, which is a copy that is not renewed while somebody looks at it.
_MYSQL = (
    "SELECT CAST(variable_value AS INTEGER) FROM information_schema.global_status"
    " WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS'"
)
QUERIES = {"postgresql": _POSTGRESQL, "mysql": _MYSQL, "mariadb": _MYSQL}
"""For SQLite, whose writers queue, there is none."""


def waiters(engine: sa.Engine) -> int:
    """How many statements wait for a lock in the engine's database."""
    # Each time in a transaction of its own: within one, PostgreSQL answers from a snapshot.
    with engine.connect() as connection:
        waiting: Any = connection.exec_driver_sql(QUERIES[engine.dialect.name]).scalar()
    return int(waiting or 0)
