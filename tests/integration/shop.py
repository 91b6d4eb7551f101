"""An application with an outbox, its database, and a look at its rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from relaybox import Call, Outbox
from relaybox.maintenance.membership import Membership

DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mariadb+pymysql", "sqlite": "sqlite"}


class Shop:
    """Places orders; ``options`` are those of ``Outbox``."""

    def __init__(self, database: str, **options: Any) -> None:
        self.outbox = Outbox(database, **options)
        self.outbox.migrate()
        url = sa.make_url(database)
        self.engine = sa.create_engine(url.set(drivername=DRIVERS[url.drivername]), poolclass=sa.NullPool)

    def emit(self, count: int, *, keys: int = 1, first: int = 0, event_type: str = "order.paid") -> None:
        calls = [Call("Order", n % keys, event_type, {"n": n}) for n in range(first, first + count)]
        with self.engine.begin() as connection:
            self.outbox.emit_many(connection, calls)

    def rows(self) -> list[tuple[str, int, str | None]]:
        """The state, the attempts and the last error of each row, in order."""
        event = self.outbox.tables.event.c
        query = sa.select(event.status, event.attempts, event.error_message).order_by(event.position)
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(query)]

    def states(self, destination: str | None = None) -> dict[str, int]:
        """How many rows are in each state."""
        event = self.outbox.tables.event.c
        query = sa.select(event.status, sa.func.count()).group_by(event.status)
        if destination is not None:
            query = query.where(event.destination == destination)
        with self.engine.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def leases(self) -> int:
        event = self.outbox.tables.event.c
        query = sa.select(sa.func.count()).where(event.lease_token.is_not(None))
        with self.engine.connect() as connection:
            return connection.scalars(query).one()

    def circuit(self, destination: str) -> str:
        """The state of a destination's circuit."""
        place = self.outbox.tables.destination.c
        with self.engine.connect() as connection:
            found = connection.scalars(sa.select(place.circuit).where(place.name == destination)).first()
        return found or "closed"


async def until(reached: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Look until it is so; a test that waits in vain says for what."""
    try:
        async with asyncio.timeout(seconds):
            while not reached():  # noqa: ASYNC110
                await asyncio.sleep(0.03)
    except TimeoutError:
        raise AssertionError(f"not after {seconds:g} s: {what}") from None


MEMBERSHIP: dict[str, Any] = Membership.__init__.__kwdefaults__
"""``interval``: how often relays beat, and so how soon they notice who joined and who died."""
SOON = 0.2
