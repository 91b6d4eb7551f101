"""A database for the tests of upkeep, and a direct view of it."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID, uuid4

import sqlalchemy as sa

from relaybox.database.schema import make_tables
from relaybox.stores.open import open_store
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.upkeep import Member
from tests.databases import sync_url

T = TypeVar("T")
LIVE = 60.0
DAY = 86_400.0
LONG_AGO = 400 * DAY


class Bench:
    """One database, and a direct view of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.tables = make_tables(sa.MetaData())
        self.engine = sa.create_engine(sync_url(url))
        self.stores: list[SqlStore] = []

    @property
    def locks_rows(self) -> bool:
        """True if two writers can change different rows at the same time."""
        return self.engine.dialect.name != "sqlite"

    def store(self) -> SqlStore:
        store = open_store(self.url, self.tables)
        assert isinstance(store, SqlStore)
        self.stores.append(store)
        return store

    def upkeep(self) -> SqlUpkeep:
        return SqlUpkeep(self.store())

    async def leader(self, name: str = "leader") -> tuple[SqlUpkeep, int]:
        """Upkeep that leads, and its term."""
        upkeep = self.upkeep()
        return upkeep, await leading(upkeep, name)

    def clear(self) -> None:
        with self.engine.begin() as connection:
            for field in fields(self.tables):
                if field.name != "migration":
                    connection.execute(sa.delete(getattr(self.tables, field.name)))

    def put(self, destination: str, status: str = "pending", *, age: float = 0, **values: Any) -> UUID:
        """Insert one row that was made, and got its state, ``age`` seconds ago."""
        id_, then = uuid4(), datetime.now(UTC) - timedelta(seconds=age)
        row = {
            "id": id_, "event_id": id_, "destination": destination, "aggregate_type": "Order",
            "aggregate_id": "1", "event_type": "order.paid", "payload": {}, "headers": {},
            "idempotency_key": str(id_), "status": status, "created_at": then, "updated_at": then,
            "next_attempt_at": then if status == "pending" else None,
            "delivered_at": then if status == "delivered" else None,
        }  # fmt: skip
        self.execute(sa.insert(self.tables.event).values(**row | values))
        return id_

    def park(self, destination: str, key: str, **values: Any) -> UUID:
        return self.put(destination, ordering_key=key, next_attempt_at=None, **values)

    def attempt(self, delivery: UUID) -> None:
        values = {"delivery_id": delivery, "attempt": 1, "relay": "r", "error_message": "e"}
        self.execute(sa.insert(self.tables.attempt).values(**values))

    def execute(self, statement: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(statement)

    def column(self, column: sa.Column[Any]) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.scalars(sa.select(column)))

    def ids(self) -> set[UUID]:
        return set(self.column(self.tables.event.c.id))

    def parked(self) -> set[UUID]:
        event = self.tables.event.c
        query = sa.select(event.id).where(event.status == "pending", event.next_attempt_at.is_(None))
        with self.engine.connect() as connection:
            return set(connection.scalars(query))

    def age(self, column: sa.Column[Any], seconds: float) -> None:
        """Make moments older, as if so much time had passed."""
        table = column.table
        keys = list(table.primary_key)
        with self.engine.begin() as connection:
            for moment, *values in connection.execute(sa.select(column, *keys)).all():
                which = [key == value for key, value in zip(keys, values, strict=True)]
                earlier = moment and moment - timedelta(seconds=seconds)
                connection.execute(sa.update(table).where(*which).values({column.name: earlier}))


def member(name: str) -> Member:
    return Member(name, "host", 1, "0.1.0")


async def go_on(seconds: float) -> bool:
    """Rest without taking time."""
    return True


async def leading(upkeep: SqlUpkeep, name: str = "leader") -> int:
    return some(await upkeep.members.lead(name, 60.0))


def some(result: T | None) -> T:
    """Return what the leader did; fail if it is None."""
    assert result is not None
    return result
