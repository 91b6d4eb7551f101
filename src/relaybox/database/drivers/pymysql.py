"""The PyMySQL driver."""

from __future__ import annotations

from typing import Any

from pymysql.constants import SERVER_STATUS
from pymysql.cursors import Cursor

from relaybox.database.drivers.mysql import SyncMysql


class Pymysql(SyncMysql):
    """A PyMySQL connection."""

    name = "PyMySQL"
    cursor = Cursor

    def is_open(self, connection: Any) -> bool:
        return bool(connection.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS)
