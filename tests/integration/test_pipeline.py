"""Round trips to PostgreSQL that go wrong, and those that are out of the ordinary."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
import uvloop
from psycopg.errors import FeatureNotSupported

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered
from relaybox.database.pools import postgresql
from relaybox.database.pools.pipeline import Pipeline
from relaybox.database.schema import Tables
from relaybox.database.statements.delivery import Query
from relaybox.errors import StoreError
from relaybox.stores.open import open_postgresql
from relaybox.stores.sql.outcomes import LEASES_APART
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.store import Settlement, Want
from tests.databases import POSTGRESQL
from tests.integration.filled import create_tables, emit
from tests.integration.shop import Databases, end_sessions
from tests.locks import waiters
from tests.waiting import PATIENCE, await_for, cancel

MEGABYTES = 1 << 20
ORDERED = Want("keys", "me", limit=5, ordered=True)


@pytest.fixture
def url(request: pytest.FixtureRequest, migrated_database: Databases) -> str:
    return migrated_database(getattr(request, "param", "postgresql-18"))


each_version = pytest.mark.parametrize("url", POSTGRESQL, indirect=True)


@asynccontextmanager
async def connected(url: str, lasting: tuple[str, ...] = ()) -> AsyncIterator[Pipeline]:
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    try:
        yield Pipeline(connection, lasting)
    finally:
        await connection.close()


@asynccontextmanager
async def opened(url: str, tables: Tables, connections: int = 1) -> AsyncIterator[SqlStore]:
    store = open_postgresql(url, tables, connections=connections)
    try:
        yield store
    finally:
        await store.close()


def filled(url: str, events: int) -> tuple[sa.Engine, Tables]:
    engine, tables = create_tables(url)
    emit(engine, tables, events)
    return engine, tables


def column(engine: sa.Engine, tables: Tables, name: str, destination: str) -> list[Any]:
    """Return one column, in the order of positions."""
    event = tables.event.c
    query = sa.select(event[name]).where(event.destination == destination).order_by(event.position)
    with engine.connect() as connection:
        return list(connection.scalars(query))


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "prepared"])
@each_version
async def test_what_no_socket_takes_at_once_gets_through_both_ways(lasting: bool, url: str) -> None:
    sql, text = "SELECT $1::text || 'end'", "x" * (8 * MEGABYTES)
    async with connected(url, (sql,) if lasting else ()) as pipeline, asyncio.timeout(PATIENCE):
        for _ in range(2):
            results = await pipeline.run([Query(sql, (text,)), Query("SELECT 1", ()), Query(sql, (text,))])
            assert [len(rows[0][0]) if rows[0][0] != 1 else 1 for rows in results] == [
                len(text) + 3,
                1,
                len(text) + 3,
            ]


async def test_the_statements_of_a_call_are_one_transaction(url: str) -> None:
    async with connected(url) as pipeline:
        await pipeline.run([Query("CREATE TABLE seen (n int)", ())])
        same = [Query("INSERT INTO seen VALUES (1)", ()), Query("SELECT pg_current_xact_id()::text", ())]
        _, [[first]], _, [[second]] = await pipeline.run([*same, *same])
        assert first == second
        with pytest.raises(psycopg.errors.DivisionByZero):
            await pipeline.run([Query("INSERT INTO seen VALUES (2)", ()), Query("SELECT 1 / 0", ())])
        assert await pipeline.run([Query("SELECT n FROM seen", ())]) == [[(1,), (1,)]]


def message(kind: bytes, body: bytes) -> bytes:
    """Return a message as the server sends it."""
    return kind + struct.pack("!i", len(body) + 4) + body


class Hangs:
    """A server that says it is ready, and closes in the midst of its first answer."""

    def __init__(self, words: bytes) -> None:
        self._words = words
        self.asked = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            port = server.sockets[0].getsockname()[1]
            yield f"postgresql://me@127.0.0.1:{port}/shop?sslmode=disable&gssencmode=disable"
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = struct.unpack("!i", await reader.readexactly(4))[0]
        await reader.readexactly(length - 4)
        said = b"server_version\x0018.0\0", b"client_encoding\0UTF8\0"
        welcome = message(b"R", struct.pack("!i", 0)) + b"".join(message(b"S", text) for text in said)
        writer.write(welcome + message(b"Z", b"I"))
        await reader.read(1 << 16)
        self.asked += 1
        writer.write(self._words)
        await writer.drain()
        writer.close()


PARSED, BOUND = message(b"1", b""), message(b"2", b"")
COLUMN = b"n\0" + struct.pack("!ihihih", 0, 0, 25, -1, -1, 0)
DESCRIBED = message(b"T", struct.pack("!h", 1) + COLUMN)
ROW = message(b"D", struct.pack("!hi", 1, 3) + b"one")


@pytest.mark.parametrize(
    "words",
    [
        b"",
        PARSED + BOUND,
        PARSED + BOUND + DESCRIBED + ROW,
        PARSED + BOUND + DESCRIBED + ROW + ROW[:7],
        PARSED + BOUND + DESCRIBED + ROW + message(b"C", b"SELECT 1\0"),
    ],
    ids=["at once", "before the columns", "between rows", "within a row", "before the end"],
)
async def test_a_server_that_closes_in_the_midst_of_an_answer_is_an_error_at_once(words: bytes) -> None:
    server = Hangs(words)
    async with server.listening() as url, connected(url) as pipeline, asyncio.timeout(PATIENCE):
        with pytest.raises(psycopg.OperationalError):
            await pipeline.run([Query("SELECT 'one'", ())])
        with pytest.raises(psycopg.OperationalError):
            await pipeline.run([Query("SELECT 'one'", ())])
    assert server.asked == 1


async def test_a_session_that_is_ended_between_two_calls_is_refused_once(url: str) -> None:
    _, tables = filled(url, 10)
    async with opened(url, tables) as store:
        [first] = (await store.claim(Want("plain", "me", limit=1))).deliveries
        end_sessions(url)
        with pytest.raises(StoreError):
            await store.claim(Want("plain", "me", limit=1))
        assert await store.settle([Settlement(first, Delivered())]) == frozenset()


@each_version
async def test_the_databases_default_isolation_is_not_the_stores(url: str) -> None:
    """Else a claim behind the lock would see what was there before it waited, or fail."""
    engine, tables = filled(url, 5)
    name = sa.make_url(url).database
    with psycopg.connect(url, autocommit=True) as administrator:
        for setting in ("default_transaction_isolation = 'repeatable read'", "plan_cache_mode = 'auto'"):
            administrator.execute(f"ALTER DATABASE {name} SET {setting}")  # type: ignore[arg-type]
    async with opened(url, tables, connections=3) as store:
        level = Query("SELECT current_setting('transaction_isolation')", ())
        assert await store.driver.run(lambda: one(level)) == [("read committed",)]
        with engine.begin() as connection:
            connection.execute(sa.text("SELECT name FROM outbox_destination WHERE name = 'keys' FOR UPDATE"))
            claims = [asyncio.create_task(store.claim(ORDERED)) for _ in range(2)]
            await await_for(lambda: waiters(engine) == 2, "two transactions wait for a lock")
        taken = [delivery.id for claim in await asyncio.gather(*claims) for delivery in claim.deliveries]
    assert len(taken) == len(set(taken)) == 5, "the second claim saw what the first had taken"


def one(query: Query) -> Any:
    [rows] = yield [query]
    return rows


@each_version
async def test_a_changed_table_is_refused_once(url: str) -> None:
    """Once the columns change, the prepared statement fails; then the connection is opened again."""
    engine, tables = filled(url, 10)
    async with opened(url, tables) as store:
        first = await store.claim(Want("plain", "me", limit=1))
        assert first.deliveries
        with engine.begin() as connection:
            connection.execute(sa.text("ALTER TABLE outbox_event ALTER aggregate_id TYPE varchar(300)"))
            connection.execute(sa.text("ALTER TABLE outbox_event ADD COLUMN tenant text"))
        with pytest.raises(StoreError) as refused:
            await store.claim(Want("plain", "me", limit=1))
        assert isinstance(refused.value.__cause__, FeatureNotSupported)
        for _ in range(2):
            assert (await store.claim(Want("plain", "me", limit=1))).deliveries
        assert await store.settle([Settlement(d, Delivered()) for d in first.deliveries]) == frozenset()


@each_version
async def test_what_is_on_the_delivery_path_is_planned_once(url: str) -> None:
    _, tables = filled(url, 100)
    prepared = Query("SELECT statement, generic_plans, custom_plans FROM pg_prepared_statements", ())
    async with opened(url, tables) as store:
        for limit in (1, 5, 10):
            for want in (Want("plain", "me", limit=limit), replace(ORDERED, limit=limit)):
                claim = await store.claim(want)
                assert len(claim.deliveries) == limit
                assert not await store.extend(claim.deliveries, 60.0)
                assert not await store.settle([Settlement(d, Delivered()) for d in claim.deliveries])
        rows = await store.driver.run(lambda: one(prepared))
    rows = [row for row in rows if "outbox" in row[0]]
    assert len(rows) == 7, "claims, what explains them, extend, deliver, the lock and what is made due"
    assert sum(custom for _, _, custom in rows) == 0
    assert min(generic for _, generic, _ in rows) >= 3


async def test_a_call_that_is_cancelled_is_cancelled_at_the_server(url: str) -> None:
    _, tables = create_tables(url)
    busy = (
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(600)%' AND state = 'active'"
        " AND pid <> pg_backend_pid()"
    )
    async with opened(url, tables) as store:
        sleeping = asyncio.create_task(store.driver.run(lambda: one(Query("SELECT pg_sleep(600)", ()))))
        with psycopg.connect(url, autocommit=True) as observer:
            await await_for(lambda: observer.execute(busy).fetchone() == (1,), "the server sleeps")
            await cancel(sleeping)
            await await_for(lambda: observer.execute(busy).fetchone() == (0,), "the server is cancelled")
        assert not (await store.claim(Want("plain", "me"))).deliveries


async def test_a_claim_leaves_out_what_was_due_before_it_looks(url: str) -> None:
    engine, tables = filled(url, 3)
    with engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE outbox_event SET next_attempt_at = now() - position * interval '1 h'")
        )
    due = column(engine, tables, "next_attempt_at", "plain")
    async with opened(url, tables) as store:
        late = await store.claim(Want("plain", "me", suspects=False, since=due[1]))
        assert [delivery.aggregate_id for delivery in late.deliveries] == ["1", "1"]
        [old] = (await store.claim(Want("plain", "me"))).deliveries
        assert old.position == max(delivery.position for delivery in (old, *late.deliveries))


EVENTS = 12
NEXT_KEY = Want("keys", "me", limit=1, ordered=True, spread=1)


def noted(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that records the names of the statements of settles from now on."""
    statements, names = store.steps.statements, []
    original = type(statements).__call__

    def noting(self: object, name: str, **params: object) -> object:
        if name.startswith(("deliver", "delete", "lock_rows")):
            names.append(name)
        return original(statements, name, **params)

    monkeypatch.setattr(type(statements), "__call__", noting)
    return names


def one_after_the_other(deliveries: Sequence[Delivery], leases: int) -> list[list[Delivery]]:
    size = len(deliveries) // leases
    return [list(deliveries[start : start + size]) for start in range(0, len(deliveries), size)]


def in_turns(deliveries: Sequence[Delivery], leases: int) -> list[list[Delivery]]:
    return [list(deliveries[first::leases]) for first in range(leases)]


def make_leases(engine: sa.Engine, tables: Tables, parts: Sequence[Sequence[Delivery]]) -> list[Delivery]:
    """Give the rows of each part a token of their own; the deliveries that have them."""
    held = []
    for part in parts:
        with engine.begin() as connection:
            token = connection.scalar(sa.select(sa.func.gen_random_uuid()))
            event = tables.event
            ids = [delivery.id for delivery in part]
            connection.execute(event.update().where(event.c.id.in_(ids)).values(lease_token=token))
        for delivery in part:
            values = {name: getattr(delivery, name) for name in Delivery.__struct_fields__}
            held.append(Delivery(**values | {"lease_token": token}))
    return held


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "deleted"])
@pytest.mark.parametrize(
    ("split", "leases", "statements"),
    [
        (one_after_the_other, 1, 1),
        (one_after_the_other, LEASES_APART, LEASES_APART),
        (one_after_the_other, EVENTS, 1),
        (in_turns, 2, 1),
    ],
    ids=["one lease", "a few leases", "many leases", "leases that mingle"],
)
async def test_leases_are_settled_together_and_only_what_is_still_held(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    split: Callable[[Sequence[Delivery], int], list[list[Delivery]]],
    leases: int,
    statements: int,
    keep: bool,
) -> None:
    engine, tables = filled(url, EVENTS)
    async with opened(url, tables) as store:
        claim = await store.claim(Want("plain", "me", limit=EVENTS))
        held = make_leases(engine, tables, split(claim.deliveries, leases))
        event = tables.event
        taken = held[-1]
        with engine.begin() as connection:
            stolen = event.update().values(lease_token=sa.func.gen_random_uuid())
            connection.execute(stolen.where(event.c.id == taken.id))
        names = noted(store, monkeypatch)
        lost = await store.settle([Settlement(delivery, Delivered(keep=keep)) for delivery in held])
    assert lost == {taken.id}
    by_lease = leases <= LEASES_APART and split is one_after_the_other
    assert names == [f"{'deliver' if keep else 'delete'}{'_lease' * by_lease}"] * statements
    left = column(engine, tables, "status", "plain")
    assert sorted(left) == [*["delivered"] * (EVENTS - 1) * keep, "pending"]


@pytest.mark.parametrize("parked", [True, False], ids=["put behind", "not looked at yet"])
async def test_a_settle_says_whether_the_next_of_a_key_can_be_claimed(url: str, parked: bool) -> None:
    engine, tables = create_tables(url)
    # One more than there are keys: the first key has two.
    emit(engine, tables, 6)
    async with opened(url, tables) as store:
        first, *others = [(await store.claim(NEXT_KEY)).deliveries[0] for _ in range(5)]
        if parked:
            assert (await store.claim(NEXT_KEY)).parked == 1
        calls: list[str] = []
        await store.settle(
            [Settlement(other, Delivered()) for other in others], made_due=lambda: calls.append("none")
        )
        assert calls == [], "no other event of these keys is left"
        await store.settle([Settlement(first, Delivered())], made_due=lambda: calls.append("one more"))
        assert calls == ["one more"]
        [last] = (await store.claim(NEXT_KEY)).deliveries
        await store.settle([Settlement(last, Delivered())], made_due=lambda: calls.append("none"))
        assert calls == ["one more"]


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_session_that_ended_while_it_was_idle_is_noticed_at_once(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    fresh_database: Databases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgresql, "ANSWER_SECONDS", 100 * PATIENCE)
    url = fresh_database("postgresql-18")
    engine, tables = create_tables(url)
    engine.dispose()

    async def use_it_again() -> None:
        store = open_postgresql(url, tables, connections=1)
        try:
            await store.now()
            await asyncio.to_thread(end_sessions, url.replace("+psycopg", ""))
            with pytest.raises(StoreError):
                await asyncio.wait_for(store.now(), PATIENCE)
            await store.now()
        finally:
            await store.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(use_it_again())
