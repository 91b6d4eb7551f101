"""The mysqlclient (MySQLdb) driver."""

from __future__ import annotations

from typing import Any

from MySQLdb import Error
from MySQLdb.cursors import Cursor

from relaybox.database.drivers.mysql import SyncMysql
from relaybox.database.statements.delivery import Query

TRANSACTION_IN_PROGRESS = 1568


class Mysqlclient(SyncMysql):
    """A MySQLdb connection."""

    name = "mysqlclient"
    cursor = Cursor

    def is_open(self, connection: Any) -> bool:
        """Try a harmless statement that an open transaction refuses: the driver hides the server's status."""
        try:
            self.execute(connection, Query("SET TRANSACTION READ WRITE", ()))
        except Error as error:
            if error.args[0] == TRANSACTION_IN_PROGRESS:
                return True
            raise
        return False
