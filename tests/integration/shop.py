"""An application with an outbox, its database, and a look at its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from relaybox import Call, Event, Outbox
from relaybox.maintenance.membership import Membership
from tests.databases import SYNC as DRIVERS  # noqa: F401 - for tests elsewhere
from tests.databases import engine
from tests.waiting import await_for as until  # noqa: F401 - for tests elsewhere

Databases = Callable[[str], str]
"""Makes a database of a kind, as ``fresh_database`` and ``migrated_database`` do."""
QUICK: dict[str, Any] = {"poll_interval": "20ms", "backoff": {"base": "10ms", "cap": "50ms"}}
MEMBERSHIP: dict[str, Any] = Membership.__init__.__kwdefaults__
"""``interval``: how often relays beat, and so how soon they notice who joined and who died."""
SOON = 0.2


class Shop:
    """Places orders; ``options`` are those of ``Outbox``."""

    def __init__(self, database: str, **options: Any) -> None:
        self.outbox = Outbox(database, **options)
        self.outbox.migrate()
        self.engine = engine(database)

    def collect(self, name: str = "on_order", **options: Any) -> list[int]:
        """Register a function that takes everything; the numbers it was given, in the order of arrival."""
        taken: list[int] = []

        @self.outbox.handler("*", name=name, **{**QUICK, **options})
        async def take(event: Event) -> None:
            taken.append(event.payload["n"])

        return taken

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
