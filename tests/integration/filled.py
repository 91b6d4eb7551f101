"""Tables of an outbox for two destinations, and rows in them, written without the rest of the product."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from relaybox.database.dialects import DIALECTS
from relaybox.database.schema import Tables, make_tables
from relaybox.database.statements.delivery import INSERTED, Statements
from tests.databases import engine


def create_tables(url: str) -> tuple[sa.Engine, Tables]:
    made, metadata = engine(url), sa.MetaData()
    tables = make_tables(metadata)
    metadata.create_all(made)
    with made.begin() as connection:
        connection.execute(sa.insert(tables.destination), [{"name": "plain"}, {"name": "keys"}])
    return made, tables


def emit(engine: sa.Engine, tables: Tables, count: int) -> None:
    """Commit ``count`` events for a destination without order, and as many of five keys for another."""
    dialect = DIALECTS[engine.dialect.name]
    statements = Statements(tables, dialect, "qmark" if dialect.name == "sqlite" else "format")
    rows = [
        row(f"{number:032x}", destination, key)
        for number, (destination, key) in enumerate(
            pair for at in range(count) for pair in (("plain", None), ("keys", f"key {at % 5}"))
        )
    ]
    with engine.begin() as connection:
        for start in range(0, len(rows), 500):
            connection.exec_driver_sql(*statements.insert(rows[start : start + 500]))


def row(id_: str, destination: str, key: str | None) -> tuple[Any, ...]:
    values: dict[str, Any] = dict.fromkeys(INSERTED) | {
        "id": id_,
        "event_id": id_,
        "destination": destination,
        "aggregate_type": "Order",
        "aggregate_id": "1",
        "event_type": "order.paid",
        "payload": '{"note": "' + "x" * 286 + '"}',
        "headers": "{}",
        "ordering_key": key,
        "idempotency_key": id_,
        "max_attempts": 5,
    }
    return tuple(values[name] for name in INSERTED)
