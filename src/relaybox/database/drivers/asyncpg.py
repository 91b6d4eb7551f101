"""The asyncpg driver, for single connections and pools."""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncpg import InterfaceError

from relaybox.database.dialects import POSTGRESQL
from relaybox.database.statements.delivery import INSERTED, ParamStyle, Query
from relaybox.database.steps import Rows

# Sent as text and cast by the server: an application's jsonb codec would encode the JSON twice.
_JSON = {name: f"CAST(CAST(:{name} AS text) AS jsonb)" for name in ("payload", "headers")}
_VALUES = ", ".join(_JSON.get(name, f":{name}") for name in INSERTED if name != "next_attempt_at")


class Asyncpg:
    """An asyncpg connection; it opens transactions only on request."""

    name = "asyncpg"
    dialect = dataclasses.replace(POSTGRESQL, words={**POSTGRESQL.words, "inserted_values": _VALUES})
    style: ParamStyle = "numeric"

    def is_closed(self, connection: Any) -> bool:
        try:
            return bool(connection.is_closed())
        except InterfaceError:  # returned to its pool
            return True

    def is_failed(self, connection: Any) -> bool:
        """Return False: the driver does not know. An error of the INSERT is translated instead."""
        return False

    def is_open(self, connection: Any) -> bool:
        return bool(connection.is_in_transaction())

    def begins(self, connection: Any) -> bool:
        return False

    async def execute(self, connection: Any, query: Query) -> Rows:
        rows: Rows = await connection.fetch(query.sql, *query.params)
        return rows

    def transaction(self, connection: Any) -> Any:
        """Return the driver's block, or None in a transaction begun by a statement, where it is refused."""
        by_statement = connection.is_in_transaction() and getattr(connection, "_top_xact", self) is None
        return None if by_statement else connection.transaction()
