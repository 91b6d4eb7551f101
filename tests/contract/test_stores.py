"""The contract on every store and database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa

from relaybox.core.outcome import Delivered, Retried
from relaybox.core.settings import Destination, Settings
from relaybox.database.dialects import DIALECTS, Dialect
from relaybox.database.migrations import migrate, server_dialect
from relaybox.database.roles import grants
from relaybox.database.schema import Tables, make_tables
from relaybox.database.statements.delivery import Query, Statements
from relaybox.emit.row import Call, RowBuilder
from relaybox.stores.memory import MemoryStore
from relaybox.stores.open import open_mysql, open_postgresql, open_sqlite
from relaybox.stores.store import Settlement, Store
from relaybox.testing.contract import StoreContract
from relaybox.testing.harness import LEASE, Seen, State, settle_all, want
from tests.databases import sync_url

IDLE_LIMITS = {
    "postgresql": ("SHOW idle_in_transaction_session_timeout", "5s"),
    "mariadb": ("SELECT @@idle_transaction_timeout", 5),
}
BUILDER = RowBuilder(
    Settings(destinations=[Destination(name, "console:", ordered=True) for name in ("shop", "other")])
)


def rows(dialect: Dialect, destination: str, *, payload: Any = None, delay: float = 0, **options: Any) -> Any:
    deliver_at = datetime.now(UTC) + timedelta(seconds=delay) if delay else None
    payload = {"total": 42} if payload is None else payload
    options |= {"deliver_at": deliver_at, "destinations": [destination]}
    call = Call("Order", 1, "order.paid", payload, **options)
    return BUILDER.build(call, dialect).rows


class SqlHarness:
    """A direct view of a database, without the store."""

    def __init__(self, engine: sa.Engine, emitter: sa.Engine, tables: Tables, store: Store) -> None:
        self.store = store
        self._engine = engine
        self._emitter = emitter
        self._tables = tables
        self._dialect = DIALECTS[engine.dialect.name]
        style = "qmark" if self._dialect.name == "sqlite" else "format"
        self._statements = Statements(tables, self._dialect, style)

    async def emit(self, destination: str, *, key: str | None = None, **options: Any) -> UUID:
        new = rows(self._dialect, destination, key=key, **options)
        query = self._statements.insert(new)
        with self._emitter.begin() as connection:
            connection.exec_driver_sql(query.sql, query.params)
        return UUID(new[0][0])

    async def emit_many(self, destination: str, count: int) -> list[UUID]:
        new = [row for _ in range(count) for row in rows(self._dialect, destination, key=None)]
        with self._emitter.begin() as connection:
            for start in range(0, count, 500):
                connection.exec_driver_sql(*self._statements.insert(new[start : start + 500]))
        return [UUID(row[0]) for row in new]

    async def see(self, id_: UUID) -> Seen | None:
        event = self._tables.event.c
        columns = (event.status, event.next_attempt_at, event.leased_until, event.attempts, event.crashes)
        query = sa.select(*columns, event.error_message, self._now()).where(event.id == id_)
        with self._engine.connect() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        return Seen(state(row.status, row.next_attempt_at, row.leased_until, row[-1]), *row[3:6])

    def _now(self) -> Any:
        return sa.literal_column(self._dialect.words["now"], sa.DateTime(timezone=True))

    async def pass_time(self, seconds: float) -> None:
        event, destination = self._tables.event.c, self._tables.destination.c
        times = (event.next_attempt_at, event.leased_until)
        states = (destination.paused_until, destination.circuit_until, destination.rate_at)
        with self._engine.begin() as connection:
            make_older(connection, event.id, times, seconds, event.status == "pending")
            make_older(connection, destination.name, states, seconds, sa.true())

    async def hold(self, destination: str, held: bool, *, seconds: float | None = None) -> None:
        table = self._tables.destination
        paused = datetime.now(UTC) if held else None
        until = datetime.now(UTC) + timedelta(seconds=seconds) if seconds else None
        with self._engine.begin() as connection:
            connection.execute(sa.delete(table).where(table.c.name == destination))
            values = {"name": destination, "paused_at": paused, "paused_until": until}
            connection.execute(sa.insert(table).values(values))

    async def failed_attempts(self, id_: UUID) -> int:
        attempt = self._tables.attempt
        count = sa.select(sa.func.count()).where(attempt.c.delivery_id == id_)
        with self._engine.connect() as connection:
            return connection.scalars(count).one()

    async def line(self, destination: str) -> datetime:
        table = self._tables.destination.c
        with self._engine.connect() as connection:
            found = connection.scalars(sa.select(table.rate_at).where(table.name == destination)).one()
        assert found is not None
        return found


def make_older(connection: sa.Connection, key: Any, times: Sequence[Any], seconds: float, where: Any) -> None:
    for name, *values in connection.execute(sa.select(key, *times).where(where)).all():
        earlier = {
            column.name: time and time - timedelta(seconds=seconds)
            for column, time in zip(times, values, strict=True)
        }
        connection.execute(sa.update(key.table).where(key == name).values(earlier))


def state(status: str, due: datetime | None, leased_until: datetime | None, now: datetime) -> State:
    if status != "pending":
        return status  # type: ignore[return-value]
    if leased_until is not None and leased_until > now:
        return "leased"
    if due is None:
        return "parked"
    return "due" if due <= now else "scheduled"


class MemoryHarness:
    """Looks at a memory store and turns its clock."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.store = MemoryStore(lambda: self.now)

    async def emit(
        self, destination: str, *, key: str | None = None, delay: float = 0, **options: Any
    ) -> UUID:
        [values] = rows(self.store.dialect, destination, key=key, **options)
        due = datetime.fromtimestamp(self.now + delay, UTC)
        self.now += 0.001
        self.store.insert([(*values[:-1], due)])
        return UUID(values[0])

    async def emit_many(self, destination: str, count: int) -> list[UUID]:
        return [await self.emit(destination) for _ in range(count)]

    async def see(self, id_: UUID) -> Seen | None:
        row = self.store.rows.get(id_)
        if row is None:
            return None
        times = [
            value and datetime.fromtimestamp(value, UTC) for value in (row.next_attempt_at, row.leased_until)
        ]
        seen = state(row.status, *times, datetime.fromtimestamp(self.now, UTC))
        return Seen(seen, row.attempts, row.crashes, row.error_message)

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds

    async def hold(self, destination: str, held: bool, *, seconds: float | None = None) -> None:
        state = self.store.destinations[destination]
        state.paused_at = self.now if held else None
        state.paused_until = self.now + seconds if seconds else None


class Database(NamedTuple):
    """One database, as its owner, the relay and the emitter log in."""

    tables: Tables
    owner: str
    relay: str
    emitter: str


class SqlContract(StoreContract):
    """The contract on a database; each test begins with empty tables."""

    kind: str

    @pytest.fixture(scope="class")
    @classmethod
    def database(cls, module_database: Callable[[str], str]) -> Database:
        url = module_database(cls.kind)
        migrate(url)
        return Database(make_tables(sa.MetaData()), url, url, url)

    @pytest.fixture
    async def harness(self, database: Database) -> AsyncIterator[SqlHarness]:
        tables = database.tables
        engine, emitter = (sa.create_engine(sync_url(url)) for url in (database.owner, database.emitter))
        with engine.begin() as connection:
            for table in (tables.event, tables.destination, tables.attempt):
                connection.execute(sa.delete(table))
        store = open_store(database.relay, tables)
        yield SqlHarness(engine, emitter, tables, store)
        await store.close()
        engine.dispose()
        emitter.dispose()

    async def test_a_row_that_is_deleted_takes_its_failed_attempts_along(self, harness: SqlHarness) -> None:
        ids = [await harness.emit("shop") for _ in range(3)]
        await settle_all(harness, Retried(30, "503"))
        await harness.pass_time(31)
        first, second, third = (await harness.store.claim(want())).deliveries
        gone, kept = Delivered(keep=False), Delivered()
        await harness.pass_time(LEASE + 1)
        await harness.store.claim(want(1, owner="relay-2"))
        outcomes = [Settlement(first, gone), Settlement(second, gone), Settlement(third, kept)]
        assert await harness.store.settle(outcomes) == {first.id}
        assert [await harness.failed_attempts(id_) for id_ in ids] == [1, 0, 1], "the first lease was lost"

    async def test_what_was_in_shadow_and_is_not_kept_is_deleted(self, harness: SqlHarness) -> None:
        deleted = await harness.emit("shop")
        assert await settle_all(harness, Delivered(keep=False, shadow=True)) == frozenset()
        kept = await harness.emit("shop")
        assert await settle_all(harness, Delivered(shadow=True)) == frozenset()
        assert await harness.see(deleted) is None
        assert await harness.see(kept) == Seen("delivered", 1, 0, None)

    async def test_a_place_in_the_line_may_be_finer_than_a_millisecond(self, harness: SqlHarness) -> None:
        await harness.store.reserve("shop", 1, 0.01)
        before = await harness.line("shop")
        for _ in range(10):
            await harness.store.reserve("shop", 1, 2_500)
        assert await harness.line("shop") - before == timedelta(milliseconds=4)


class ServerContract(SqlContract):
    """The contract on a database that has a server."""

    async def test_the_database_ends_a_transaction_that_is_left_alone(self, harness: SqlHarness) -> None:
        def look() -> Generator[Any, Any, Any]:
            [[[value]]] = yield [Query(question, ())]
            return value

        question, limit = IDLE_LIMITS[harness._dialect.name]
        assert await harness.store.driver.run(look) == limit


class RolesContract(ServerContract):
    """The contract with a relay and an emitter that may do no more than `relaybox sql --grants` lets them."""

    logins: tuple[str, ...]

    @pytest.fixture(scope="class")
    @classmethod
    def database(cls, module_database: Callable[[str], str]) -> Iterator[Database]:
        owner = module_database(cls.kind)
        migrate(owner)
        dialect, engine = server_dialect(owner), sa.create_engine(sync_url(owner))
        users = {role: f"{role}_{uuid4().hex[:8]}" for role in ("relaybox_relay", "relaybox_emitter")}
        with engine.begin() as connection:
            for statement in grants(dialect):
                connection.exec_driver_sql(statement)
            for role, user in users.items():
                for login in cls.logins:
                    connection.exec_driver_sql(login.format(role=role, user=user))
        relay, emitter = (
            sa.make_url(owner).set(username=user, password="secret").render_as_string(hide_password=False)
            for user in users.values()
        )
        yield Database(make_tables(sa.MetaData()), owner, relay, emitter)
        with engine.begin() as connection:
            for user in users.values():
                connection.exec_driver_sql(f"DROP USER {user}")
        engine.dispose()


def open_store(url: str, tables: Tables) -> Store:
    kind = sa.make_url(url).drivername
    if kind == "sqlite":
        return open_sqlite(url.removeprefix("sqlite:///"), tables)
    return {"postgresql": open_postgresql, "mysql": open_mysql}[kind](url, tables, connections=4)


class TestPostgreSQL18(ServerContract):
    kind = "postgresql-18"


@pytest.mark.full
class TestPostgreSQL15(ServerContract):
    kind = "postgresql-15"


class TestMariaDB(ServerContract):
    kind = "mariadb"


class TestSQLite(SqlContract):
    kind = "sqlite"


@pytest.mark.full
class TestPostgreSQL18UnderItsRoles(RolesContract):
    kind = "postgresql-18"
    logins = ("CREATE USER {user} PASSWORD 'secret' IN ROLE {role}",)


@pytest.mark.full
class TestMariaDBUnderItsRoles(RolesContract):
    kind = "mariadb"
    logins = (
        "CREATE USER {user} IDENTIFIED BY 'secret'",
        "GRANT {role} TO {user}",
        "SET DEFAULT ROLE {role} FOR {user}",
    )


class TestMemory(StoreContract):
    @pytest.fixture
    async def harness(self) -> MemoryHarness:
        return MemoryHarness()
