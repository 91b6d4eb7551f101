"""asyncpg, a connection of its own or of a pool."""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncpg import InterfaceError

from relaybox.database.dialects import POSTGRESQL
from relaybox.database.statements.delivery import INSERTED, ParamStyle, Query
from relaybox.database.steps import Rows

# As text, which the server casts: an application's own codec for jsonb would encode the JSON once more.
_JSON = {name: f"CAST(CAST(:{name} AS text) AS jsonb)" for name in ("payload", "headers")}
_VALUES = ", ".join(_JSON.get(name, f":{name}") for name in INSERTED if name != "next_attempt_at")


class Asyncpg:
    """An asyncpg connection, which knows only transactions begun explicitly."""

    name = "asyncpg"
    dialect = dataclasses.replace(POSTGRESQL, words={**POSTGRESQL.words, "inserted_values": _VALUES})
    style: ParamStyle = "numeric"

    def is_closed(self, connection: Any) -> bool:
        try:
            return bool(connection.is_closed())
        except InterfaceError:  # given back to its pool
            return True

    def is_failed(self, connection: Any) -> bool:
        """There is no telling; the server's answer to the INSERT is translated instead."""
        return False

    def is_open(self, connection: Any) -> bool:
        return bool(connection.is_in_transaction())

    def begins(self, connection: Any) -> bool:
        return False

    async def execute(self, connection: Any, query: Query) -> Rows:
        rows: Rows = await connection.fetch(query.sql, *query.params)
        return rows

    def transaction(self, connection: Any) -> Any:
        """The driver's own block, which it refuses inside a transaction begun by a statement."""
        by_statement = connection.is_in_transaction() and getattr(connection, "_top_xact", self) is None
        return None if by_statement else connection.transaction()
