"""Whatever is emitted into a real database is given to its handler as it was, once, or is a typed error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from relaybox import Event, Outbox
from relaybox.core.event import Emitted
from relaybox.database.dialects import MARIADB, POSTGRESQL, SQLITE, Dialect
from relaybox.errors import EmitError
from tests.databases import sync_url
from tests.properties import calls
from tests.properties.calls import Drawn
from tests.properties.conftest import Database, Feed
from tests.properties.test_emit import too_much
from tests.properties.values import same
from tests.properties.volume import attempt

AREAS = {
    "sqlite": ("emit, delivered from SQLite", SQLITE),
    "postgresql-18": ("emit, delivered from PostgreSQL", POSTGRESQL),
    "mariadb": ("emit, delivered from MariaDB", MARIADB),
}


class Shop:
    """An outbox on a real database, and what its handlers were given."""

    def __init__(self, url: str, dialect: Dialect) -> None:
        self.given: dict[tuple[str, UUID], Event] = {}
        self.calls: Counter[tuple[str, UUID]] = Counter()
        self.dialect = dialect
        self._url = url
        self.outbox = Outbox(
            url,
            destinations=calls.DESTINATIONS,
            routes=calls.ROUTES,
            handlers={one.name: self._handler(one.name) for one in calls.DESTINATIONS},
            max_payload=calls.LONGEST,
        )

    def _handler(self, name: str) -> Callable[[Event], Any]:
        async def take(event: Event) -> None:
            self.calls[name, event.id] += 1
            self.given[name, event.id] = event

        return take

    @contextmanager
    def transaction(self, r: Random) -> Iterator[Any]:
        """Yield a connection of one of the drivers, and commit at the end."""
        url = sync_url(self._url)
        if self.dialect is POSTGRESQL and r.random() < 0.5:
            url = url.set(drivername="postgresql+psycopg2")
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        if r.random() < 0.5:
            with engine.begin() as connection:
                yield connection
        else:
            connection = engine.raw_connection()
            yield connection.driver_connection
            connection.driver_connection.commit()
            connection.close()

    def emit(self, connection: Any, drawn: Drawn) -> Emitted | None:
        """Emit it; ``None``: it was refused, and rightly so."""
        options = {name: getattr(drawn.call, name) for name in drawn.call.__struct_fields__}
        emitted, error = attempt(lambda: self.outbox.emit(connection, **options), EmitError)
        assert error is None or drawn.refused or too_much(error, drawn, self.dialect), error
        return emitted


@pytest.mark.parametrize("kind", AREAS)
def test_what_was_committed_arrives_as_given(kind: str, feed: Feed, migrated_database: Database) -> None:
    area, dialect = AREAS[kind]
    shop = Shop(migrated_database(kind), dialect)

    def batch(r: Random, size: int) -> None:
        committed = []
        with shop.transaction(r) as connection:
            for _ in range(size):
                drawn = calls.call(r, near=0.02)
                emitted = shop.emit(connection, drawn)
                if emitted is not None and not emitted.duplicate:
                    committed.append((drawn, emitted))
        shop.outbox.drain()
        for drawn, emitted in committed:
            check(shop, drawn, emitted)

    feed(area, batch, size=100)


def check(shop: Shop, drawn: Drawn, emitted: Emitted) -> None:
    for name in emitted.destinations:
        assert shop.calls.pop((name, emitted.event_id), 0) == 1, (name, drawn)
        event = shop.given.pop((name, emitted.event_id))
        assert same(event.payload, drawn.payload)
        assert same(dict(event.headers), drawn.headers)
        assert event.type == str.__str__(drawn.call.event_type)
        assert event.aggregate_type == str.__str__(drawn.call.aggregate_type)
