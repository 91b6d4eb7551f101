"""The psycopg 3 drivers, synchronous and asynchronous."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from relaybox.database.dialects import POSTGRESQL
from relaybox.database.statements.delivery import ParamStyle, Query
from relaybox.database.steps import Rows


class _State:
    name = "psycopg"
    dialect = POSTGRESQL
    style: ParamStyle = "format"

    def is_closed(self, connection: Any) -> bool:
        return bool(connection.closed)

    def is_failed(self, connection: Any) -> bool:
        return bool(connection.pgconn.transaction_status == TransactionStatus.INERROR)

    def is_open(self, connection: Any) -> bool:
        status = connection.pgconn.transaction_status
        if status == TransactionStatus.ACTIVE:
            # A pipeline's results are still pending: only a block proves that a transaction is open.
            return bool(connection._num_transactions)
        return bool(status != TransactionStatus.IDLE)

    def begins(self, connection: Any) -> bool:
        return not connection.autocommit

    def transaction(self, connection: Any) -> Any:
        return connection.transaction()


class Psycopg(_State):
    """A ``psycopg.Connection``."""

    def execute(self, connection: Connection[Any], query: Query) -> Rows:
        """Execute the statement. In pipeline mode the inner block's end syncs, which brings the results."""
        # The connection's own cursor class may use other placeholders.
        cursor = Cursor(connection, row_factory=tuple_row)
        if connection.pgconn.pipeline_status == PipelineStatus.OFF:
            cursor.execute(query.sql, query.params)
        else:
            with connection.pipeline():
                cursor.execute(query.sql, query.params)
        # Not by the description: building it takes longer than fetching a few rows.
        return [] if cursor.rownumber is None else list(cursor.fetchall())


class AsyncPsycopg(_State):
    """A ``psycopg.AsyncConnection``."""

    async def execute(self, connection: AsyncConnection[Any], query: Query) -> Rows:
        """Execute the statement. In pipeline mode the inner block's end syncs, which brings the results."""
        cursor = AsyncCursor(connection, row_factory=tuple_row)
        if connection.pgconn.pipeline_status == PipelineStatus.OFF:
            await cursor.execute(query.sql, query.params)
        else:
            async with connection.pipeline():
                await cursor.execute(query.sql, query.params)
        return [] if cursor.rownumber is None else list(await cursor.fetchall())
