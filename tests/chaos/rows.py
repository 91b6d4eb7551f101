"""A look at the tables while a schedule runs, past every proxy."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tests.chaos.drivers import ERRORS, engine
from tests.chaos.workload import Place, business


class Rows:
    """What the rows say."""

    def __init__(self, place: Place) -> None:
        self._engine = engine(place.url)
        self._event = place.outbox().tables.event

    def held(self, owner: str = "%") -> set[Any]:
        """The rows that are leased by an owner whose name is like this.

        None while the database is away: what was leased when it went was counted then, and nothing is
        claimed meanwhile.
        """
        event = self._event.c
        query = sa.select(event.id).where(event.lease_owner.like(owner), event.status == "pending")
        try:
            return set(self._all(query, 0))
        except ERRORS:
            return set()

    def pending(self) -> int:
        """How many rows are not final."""
        query = sa.select(sa.func.count()).where(self._event.c.status == "pending")
        return int(self._all(query, 0)[0])

    def committed(self) -> int:
        """How many orders there are."""
        return int(self._all(sa.select(sa.func.count()).select_from(business), 0)[0])

    def events(self) -> list[Any]:
        """All rows in order of position."""
        event = self._event.c
        columns = (event.destination, event.event_id, event.aggregate_id, event.ordering_key)
        query = sa.select(*columns, event.position, event.status, event.lease_token).order_by(event.position)
        return self._all(query)

    def orders(self) -> list[Any]:
        """All business rows."""
        return self._all(sa.select(business).order_by(business.c.name, business.c.n))

    def execute(self, statement: str, **values: Any) -> list[Any]:
        """Whatever else is to be done to the database."""
        with self._engine.connect() as connection:
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            result = connection.execute(sa.text(statement), values)
            return list(result.all()) if result.returns_rows else []

    def _all(self, query: Any, column: int | None = None) -> list[Any]:
        with self._engine.connect() as connection:
            result = connection.execute(query)
            return list(result.all() if column is None else result.scalars(column).all())
