"""The psycopg2 driver."""

from __future__ import annotations

from typing import Any

from psycopg2 import extensions

from relaybox.database.dialects import POSTGRESQL
from relaybox.database.statements.delivery import ParamStyle, Query
from relaybox.database.steps import Rows


class Psycopg2:
    """A psycopg2 connection."""

    name = "psycopg2"
    dialect = POSTGRESQL
    style: ParamStyle = "format"

    def is_closed(self, connection: Any) -> bool:
        return bool(connection.closed)

    def is_failed(self, connection: Any) -> bool:
        return bool(connection.get_transaction_status() == extensions.TRANSACTION_STATUS_INERROR)

    def is_open(self, connection: Any) -> bool:
        return bool(connection.get_transaction_status() != extensions.TRANSACTION_STATUS_IDLE)

    def begins(self, connection: Any) -> bool:
        return not connection.autocommit

    def execute(self, connection: Any, query: Query) -> Rows:
        with connection.cursor(cursor_factory=extensions.cursor) as cursor:
            cursor.execute(query.sql, query.params)
            return cursor.fetchall() if cursor.description else []

    def control(self, connection: Any, query: Query) -> None:
        """Execute BEGIN and similar, through the driver's own calls unless it is in autocommit."""
        own = {"BEGIN": lambda: None, "COMMIT": connection.commit, "ROLLBACK": connection.rollback}
        if connection.autocommit or query.sql not in own:
            self.execute(connection, query)
        else:
            own[query.sql]()
