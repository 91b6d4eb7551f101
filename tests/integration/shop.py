"""An application with an outbox, its database, and a look at its rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from uuid import UUID

import psycopg
import sqlalchemy as sa

from relaybox import Call, Destination, Event, Outbox, Route
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Steps
from relaybox.relay.upkeep.membership import Membership
from relaybox.stores.open import open_store
from relaybox.stores.sql.store import SqlStore
from tests.databases import engine

Databases = Callable[[str], str]
"""Makes a database of a kind, as ``fresh_database`` and ``migrated_database`` do."""
QUICK: dict[str, Any] = {"poll_interval": "20ms", "backoff": {"base": "10ms", "cap": "50ms"}}
MEMBERSHIP: dict[str, Any] = Membership.__init__.__kwdefaults__
"""``interval``: how often relays beat, and so how soon they notice who joined and who died."""
SOON = 0.2


def shop_for(database: str, *destinations: Destination, **options: Any) -> Shop:
    """Return a shop whose events all go to these destinations."""
    routes = [Route("*", to=[destination.name for destination in destinations])]
    return Shop(database, destinations=list(destinations), routes=routes, **options)


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

    def emit(
        self, count: int, *, keys: int = 1, first: int = 0, event_type: str = "order.paid", **options: Any
    ) -> None:
        numbers = range(first, first + count)
        calls = [Call("Order", n % keys, event_type, {"n": n}, **options) for n in numbers]
        with self.engine.begin() as connection:
            self.outbox.emit_many(connection, calls)

    def rows(self) -> list[tuple[str, int, str | None]]:
        """Return the state, the attempts and the last error of each row, in order."""
        event = self.outbox.tables.event.c
        query = sa.select(event.status, event.attempts, event.error_message).order_by(event.position)
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(query)]

    def states(self, destination: str | None = None) -> dict[str, int]:
        """Return how many rows are in each state."""
        event = self.outbox.tables.event.c
        query = sa.select(event.status, sa.func.count()).group_by(event.status)
        if destination is not None:
            query = query.where(event.destination == destination)
        with self.engine.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def leases(self) -> int:
        return sum(token is not None for token in self.column("lease_token"))

    def circuit(self, destination: str) -> str:
        """Return the state of a destination's circuit."""
        place = self.outbox.tables.destination.c
        with self.engine.connect() as connection:
            found = connection.scalars(sa.select(place.circuit).where(place.name == destination)).first()
        return found or "closed"

    def column(self, column: str, **values: Any) -> list[Any]:
        """Return one column of the rows that have these values, in the order of positions."""
        event = self.outbox.tables.event.c
        rows = [event[name] == value for name, value in values.items()]
        with self.engine.connect() as connection:
            return list(connection.scalars(sa.select(event[column]).where(*rows).order_by(event.position)))

    def parked(self) -> list[UUID]:
        """Return the rows that wait behind another one."""
        return self.column("id", status="pending", next_attempt_at=None)

    @asynccontextmanager
    async def store(self, **options: Any) -> AsyncIterator[SqlStore]:
        """Open a store of its own on the database."""
        store = open_store(self.outbox.settings.database, self.outbox.tables, **options)
        try:
            yield store
        finally:
            await store.close()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Begin a READ COMMITTED transaction and commit it at the end of the block."""
        with self.engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            yield connection

    def end_leases(self) -> None:
        """Let every lease run out."""
        event = self.outbox.tables.event
        held = event.c.lease_token.is_not(None)
        with self.engine.begin() as connection:
            connection.execute(sa.update(event).where(held).values(leased_until=event.c.created_at))


def drive(connection: sa.Connection, steps: Steps[Any]) -> Any:
    """Run a store's steps in the connection's transaction, without its end."""
    try:
        queries = next(steps)
        while True:
            queries = steps.send([_execute(connection, query) for query in queries])
    except StopIteration as end:
        return end.value


def _execute(connection: sa.Connection, query: Query) -> list[Any]:
    if connection.dialect.name == "postgresql":
        # Which takes the statements as the store writes them.
        cursor = psycopg.RawCursor(connection.connection.driver_connection)  # type: ignore[arg-type]
        cursor.execute(query.sql.encode(), query.params)
        return cursor.fetchall() if cursor.description else []
    result = connection.exec_driver_sql(*query)
    return list(result) if result.returns_rows else []


def in_order(numbers: Iterable[int], keys: int) -> bool:
    """True if the events of each key arrived in their order, and once each."""
    by_key: dict[int, list[int]] = defaultdict(list)
    for n in numbers:
        by_key[n % keys].append(n)
    return all(arrived == sorted(set(arrived)) for arrived in by_key.values())


def end_sessions(url: str) -> None:
    """End all sessions of a PostgreSQL database, as a failover does; the server has ended them on return."""
    with psycopg.connect(url, autocommit=True) as admin:
        ended = admin.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchall()
    assert ended
    assert all(gone for (gone,) in ended)
