"""PyMySQL."""

from __future__ import annotations

from typing import Any

from pymysql.constants import SERVER_STATUS
from pymysql.cursors import Cursor

from relaybox.database.drivers.mysql import MysqlState
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Rows


class Pymysql(MysqlState):
    """A PyMySQL connection."""

    name = "PyMySQL"

    def is_closed(self, connection: Any) -> bool:
        return not connection.open

    def is_open(self, connection: Any) -> bool:
        return bool(connection.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS)

    def execute(self, connection: Any, query: Query) -> Rows:
        with connection.cursor(Cursor) as cursor:
            cursor.execute(query.sql, query.params)
            return list(cursor.fetchall())
