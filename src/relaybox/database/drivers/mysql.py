"""What the drivers of MariaDB and MySQL share."""

from __future__ import annotations

from typing import Any

from relaybox.database.dialects import MARIADB
from relaybox.database.statements.delivery import ParamStyle, Query
from relaybox.database.steps import Rows


class MysqlState:
    """State of a connection. MariaDB's dialect also serves MySQL: ``emit`` uses only what they share."""

    dialect = MARIADB
    style: ParamStyle = "format"

    def is_failed(self, connection: Any) -> bool:
        """Return False: after an error, MySQL's transaction is either usable or over."""
        return False

    def begins(self, connection: Any) -> bool:
        return not connection.get_autocommit()


class SyncMysql(MysqlState):
    """A synchronous connection; ``cursor`` is the driver's plain cursor class."""

    cursor: Any

    def is_closed(self, connection: Any) -> bool:
        return not connection.open

    def execute(self, connection: Any, query: Query) -> Rows:
        with connection.cursor(self.cursor) as cursor:
            cursor.execute(query.sql, query.params)
            return list(cursor.fetchall())
