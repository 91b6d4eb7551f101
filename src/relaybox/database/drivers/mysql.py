"""What the drivers of MariaDB and MySQL share."""

from __future__ import annotations

from typing import Any

from relaybox.database.dialects import MARIADB
from relaybox.database.statements.delivery import ParamStyle


class MysqlState:
    """MariaDB's dialect stands for MySQL's too: ``emit`` uses no word in which they differ."""

    dialect = MARIADB
    style: ParamStyle = "format"

    def is_failed(self, connection: Any) -> bool:
        """There is no such state: a statement that fails leaves the transaction usable, or ends it."""
        return False

    def begins(self, connection: Any) -> bool:
        return not connection.get_autocommit()
