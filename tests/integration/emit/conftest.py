"""An outbox with its tables on each database, and connections of every API to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox import Destination, Outbox, Route
from tests import locks
from tests.databases import engine as sync_engine
from tests.integration.emit.apis import PLACES, Api, fast
from tests.waiting import await_for

Prepared = Callable[[str], tuple[str, Outbox]]
PAYLOAD = {"n": 1}
ORDER = ("Order", "1", "order.paid", {})

DESTINATIONS = [
    Destination("one", "memory:"),
    Destination("two", "memory:", max_attempts=9),
    Destination("by_aggregate", "memory:", ordered=True),
    Destination("by_tenant", "memory:", ordered=True, ordering="tenant"),
    Destination("by_type", "memory:", ordered=True, ordering="event_type"),
    Destination("by_nothing", "memory:", ordered=True, ordering="none"),
    Destination("by_function", "memory:", ordered=True, ordering=lambda call: f"f-{call.aggregate_id}"),
]
ROUTES = [
    Route("order.*", to="one"),
    Route("both.*", to=["one", "two"]),
    Route("ordered.*", to="by_aggregate"),
]


class Oops(Exception):
    """What a block raises here."""


def make_outbox(url: str, **settings: Any) -> Outbox:
    """Return an outbox whose destinations show every strategy."""
    return Outbox(url, **{"destinations": DESTINATIONS, "routes": ROUTES} | settings)


def create_tables(url: str, outbox: Outbox) -> None:
    engine = sync_engine(url)
    outbox.tables.event.metadata.create_all(engine)
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode = WAL")


@cache
def reader(url: str) -> sa.Connection:
    """Return a connection that sees what is committed at the moment of each query."""
    return sync_engine(url, isolation_level="AUTOCOMMIT").connect()


def payloads(url: str, outbox: Outbox, aggregate: str) -> list[Any]:
    """Return the committed payloads of an aggregate, in the order of positions."""
    event = outbox.tables.event.c
    query = sa.select(event.payload).where(event.aggregate_id == aggregate).order_by(event.position)
    return list(reader(url).scalars(query))


@dataclass
class Place:
    """One API on one database."""

    api: Api
    kind: str
    url: str
    outbox: Outbox
    id: str = field(default_factory=lambda: uuid4().hex)
    _opened: list[Any] = field(default_factory=list)

    async def open(self, *, autocommit: bool = False) -> Any:
        connection = await self.api.open(self.url, autocommit=autocommit)
        self._opened.append(connection)
        return connection

    async def begun(self) -> Any:
        """Return a connection in the state in which an application emits."""
        connection = await self.open()
        await self.api.begin(connection)
        return connection

    async def emit(
        self, connection: Any, event_type: str = "order.paid", payload: Any = PAYLOAD, **options: Any
    ) -> Any:
        """Emit an event of this test's own aggregate, by default with the place's outbox."""
        outbox = options.pop("outbox", self.outbox)
        return await self.api.emit(outbox, connection, "Order", self.id, event_type, payload, **options)

    async def write(self, *events: dict[str, Any], **common: Any) -> list[Any]:
        """Emit these in one transaction; the rows of the test's aggregate."""
        connection = await self.begun()
        for event in events:
            await self.emit(connection, **common, **event)
        await self.api.commit(connection)
        return self.rows()

    @asynccontextmanager
    async def block(self, connection: Any) -> AsyncIterator[None]:
        """Return the outbox's transaction block on the connection."""
        block = self.outbox.transaction(connection)
        if self.api.asynchronous:
            async with block as given:
                assert given is connection
                yield
        else:
            with block as given:
                assert given is connection
                yield

    async def emit_and_fail(self, connection: Any, **options: Any) -> None:
        """Emit in a block that raises Oops."""
        with pytest.raises(Oops):
            await self._emit_and_raise(connection, options)

    async def _emit_and_raise(self, connection: Any, options: dict[str, Any]) -> None:
        async with self.block(connection):
            await self.emit(connection, **options)
            raise Oops

    def rows(self) -> list[Any]:
        """Return the committed rows of this test's aggregate, in the order of their positions."""
        event = self.outbox.tables.event
        # MySQL's stand-ins for partial indexes are no columns elsewhere.
        columns = [column for column in event.c if "ddl" not in column.info or column.name == "position"]
        query = sa.select(*columns).where(event.c.aggregate_id == self.id).order_by(event.c.position)
        return list(reader(self.url).execute(query))

    def payloads(self) -> list[Any]:
        return [row.payload for row in self.rows()]

    async def wait_until_blocked(self, statements: int = 1) -> None:
        """Return when so many statements wait for a lock; SQLite cannot say, and its writers queue anyway."""
        engine = reader(self.url).engine
        if engine.dialect.name in locks.QUERIES:
            await await_for(lambda: locks.waiters(engine) >= statements, "something waits for a lock")

    async def close(self) -> None:
        for connection in self._opened:
            await self.api.close(connection)


@pytest.fixture(scope="module")
def prepared(module_database: Callable[[str], str]) -> Iterator[Prepared]:
    """Yield a database of each kind with the tables in it, made once a module."""
    made: dict[str, tuple[str, Outbox]] = {}

    def prepare(kind: str) -> tuple[str, Outbox]:
        if kind not in made:
            url = module_database(kind)
            made[kind] = url, make_outbox(url)
            create_tables(*made[kind])
        return made[kind]

    yield prepare
    for url, _ in made.values():
        reader(url).close()


def only(condition: Callable[[Api, str], bool]) -> pytest.MarkDecorator:
    """Return the places for which ``condition`` is true."""
    chosen = [
        pytest.param((api, kind), id=f"{api}-{kind}", marks=() if fast(api, kind) else pytest.mark.full)
        for api, kind in PLACES
        if condition(api, kind)
    ]
    return pytest.mark.parametrize("place", chosen, indirect=True)


@pytest.fixture(params=PLACES, ids=[f"{api}-{kind}" for api, kind in PLACES])
async def place(request: pytest.FixtureRequest, prepared: Prepared) -> AsyncIterator[Place]:
    """Each API on each of its databases."""
    api, kind = request.param
    made = Place(api, kind, *prepared(kind))
    yield made
    await made.close()
