"""mysqlclient (MySQLdb)."""

from __future__ import annotations

from typing import Any

from MySQLdb import Error
from MySQLdb.cursors import Cursor

from relaybox.database.drivers.mysql import MysqlState
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Rows

TRANSACTION_IN_PROGRESS = 1568


class Mysqlclient(MysqlState):
    """A MySQLdb connection."""

    name = "mysqlclient"

    def is_closed(self, connection: Any) -> bool:
        return not connection.open

    def is_open(self, connection: Any) -> bool:
        """The driver hides the server's status, so a statement asks that only an open transaction refuses.

        READ WRITE is what the transaction that follows needs anyway.
        """
        try:
            self.execute(connection, Query("SET TRANSACTION READ WRITE", ()))
        except Error as error:
            if error.args[0] == TRANSACTION_IN_PROGRESS:
                return True
            raise
        return False

    def execute(self, connection: Any, query: Query) -> Rows:
        with connection.cursor(Cursor) as cursor:
            cursor.execute(query.sql, query.params)
            return list(cursor.fetchall())
