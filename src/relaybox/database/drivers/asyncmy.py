"""asyncmy."""

from __future__ import annotations

from typing import Any

from asyncmy.cursors import Cursor

from relaybox.database.drivers.mysql import MysqlState
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Rows


class Asyncmy(MysqlState):
    """An asyncmy connection."""

    name = "asyncmy"

    def is_closed(self, connection: Any) -> bool:
        """``connected`` stays true after the driver's own ``close()``, which only drops the transport."""
        return not connection.connected or getattr(connection, "_transport", connection) is None

    def is_open(self, connection: Any) -> bool:
        return bool(connection.get_transaction_status())

    async def refresh(self, connection: Any) -> None:
        """A ping's answer brings the status; those of a cursor's COMMIT and ROLLBACK the driver may drop."""
        await connection.ping(reconnect=False)

    async def execute(self, connection: Any, query: Query) -> Rows:
        async with connection.cursor(Cursor) as cursor:
            await cursor.execute(query.sql, query.params)
            return list(await cursor.fetchall())
