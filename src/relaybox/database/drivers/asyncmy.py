"""The asyncmy driver."""

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
        """Look at the transport too: the driver's ``close()`` drops it but leaves ``connected`` true."""
        return not connection.connected or getattr(connection, "_transport", connection) is None

    def is_open(self, connection: Any) -> bool:
        return bool(connection.get_transaction_status())

    async def refresh(self, connection: Any) -> None:
        """Ping for a current status: the driver may drop the one sent with a cursor's COMMIT or ROLLBACK."""
        await connection.ping(reconnect=False)

    async def execute(self, connection: Any, query: Query) -> Rows:
        async with connection.cursor(Cursor) as cursor:
            await cursor.execute(query.sql, query.params)
            return list(await cursor.fetchall())
