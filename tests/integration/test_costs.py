"""What the stores cost in what can be counted: statements, round trips, index updates, log written.

Counted on the wire, between the store and a real server; no clock is involved.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import psycopg
import pytest
import sqlalchemy as sa

from relaybox.event import Delivery
from relaybox.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.schema import Tables, make_tables
from relaybox.store import Claim, DeadLetter, Settlement, Store, Want
from relaybox.stores import mysql, postgres, sqlite
from relaybox.stores.dialects import DIALECTS, POSTGRESQL
from relaybox.stores.statements import INSERTED, Statements
from relaybox.stores.steps import OneStatement, Steps, StoreSteps

DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mariadb+pymysql", "sqlite": "sqlite"}
POSTGRES = ["postgresql-18", "postgresql-15"]
EVENTS = 1_000


class Count(NamedTuple):
    """What one operation took."""

    statements: int
    round_trips: int


class Wire:
    """A proxy before PostgreSQL that counts what goes over it.

    A statement is an Execute or Query message. A round trip is a message that the client sends to get an
    answer: Sync, Query, or a Flush with something before it that no Sync has asked for.
    """

    def __init__(self, server: sa.URL) -> None:
        self._server = server
        self._tasks: list[asyncio.Task[None]] = []
        self.total = Count(0, 0)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The URL to connect to."""
        listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        try:
            plain = {"sslmode": "disable", "gssencmode": "disable"}
            url = self._server.set(port=port, query=plain)
            yield url.render_as_string(hide_password=False)
        finally:
            listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.append(asyncio.create_task(self._carry(reader, writer)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above_reader, above_writer = await asyncio.open_connection(self._server.host, self._server.port)
        try:
            await asyncio.gather(self._up(reader, above_writer), self._down(above_reader, writer))
        finally:
            writer.close()
            above_writer.close()

    async def _up(self, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        kind, asked = b"", True  # the first message, and only that, has no kind
        while True:
            length = await client.readexactly(4)
            body = await client.readexactly(int.from_bytes(length) - 4)
            answered = kind in (b"S", b"Q") or (kind == b"H" and not asked)
            self.total = Count(
                self.total.statements + (kind in (b"E", b"Q")), self.total.round_trips + answered
            )
            asked = kind in (b"S", b"Q", b"H")
            server.write(kind + length + body)
            kind = await client.readexactly(1)

    async def _down(self, server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while data := await server.read(1 << 16):
            client.write(data)


def create_tables(url: str) -> tuple[sa.Engine, Tables]:
    parts = sa.make_url(url)
    engine = sa.create_engine(parts.set(drivername=DRIVERS[parts.drivername]), poolclass=sa.NullPool)
    metadata = sa.MetaData()
    tables = make_tables(metadata)
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sa.insert(tables.destination), [{"name": "plain"}, {"name": "keys"}])
    return engine, tables


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


def delivered(claim: Claim) -> list[Settlement]:
    return [Settlement(delivery, Delivered()) for delivery in claim.deliveries]


def mixed(claim: Claim) -> list[Settlement]:
    """Every outcome there is."""
    outcomes: list[Outcome] = [
        Delivered(),
        Delivered(keep=False),
        Retried(60.0, "busy"),
        Failed("refused"),
        Released(),
    ]
    return [Settlement(delivery, outcomes[at % 5]) for at, delivery in enumerate(claim.deliveries)]


class Counted:
    """A store, and what its operations took."""

    def __init__(self, store: Store, total: Callable[[], Count]) -> None:
        self._store = store
        self._total = total

    async def claim(self, want: Want) -> tuple[Claim, Count]:
        before = self._total()
        claim = await self._store.claim(want)
        return claim, self._since(before)

    async def settle(self, settlements: list[Settlement]) -> Count:
        before = self._total()
        assert not await self._store.settle(settlements)
        return self._since(before)

    async def bury(self, settlements: list[Settlement]) -> Count:
        before = self._total()
        assert not await self._store.settle(settlements, dead_letter=DeadLetter("grave"))
        return self._since(before)

    async def took(self, operation: Callable[[Store], Awaitable[object]]) -> Count:
        before = self._total()
        await operation(self._store)
        return self._since(before)

    async def extend(self, deliveries: tuple[Delivery, ...]) -> Count:
        before = self._total()
        assert not await self._store.extend(deliveries, 60.0)
        return self._since(before)

    async def release(self, deliveries: tuple[Delivery, ...]) -> Count:
        before = self._total()
        assert not await self._store.release(deliveries)
        return self._since(before)

    def _since(self, before: Count) -> Count:
        return Count(*(after - at_first for after, at_first in zip(self._total(), before, strict=True)))


@asynccontextmanager
async def counted_postgres(url: str, tables: Tables) -> AsyncIterator[Counted]:
    wire = Wire(sa.make_url(url))
    async with wire.listening() as through:
        store = postgres.open_store(through, tables, connections=1)
        try:
            await store.claim(Want("nobody", "me"))
            yield Counted(store, lambda: wire.total)
        finally:
            await store.close()


@pytest.mark.parametrize("limit", [10, 100])
@pytest.mark.parametrize("kind", POSTGRES)
async def test_an_operation_on_postgresql_is_one_round_trip(
    kind: str, limit: int, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database(kind)
    engine, tables = create_tables(url)
    emit(engine, tables, 5 * limit)
    plain = Want("plain", "me", limit=limit)
    ordered = Want("keys", "me", limit=limit, ordered=True)
    async with counted_postgres(url, tables) as store:
        # Around each: BEGIN, the statement that pins the plan, and COMMIT. A claim also reads whether the
        # destination is stopped.
        claim, took = await store.claim(plain)
        assert (len(claim.deliveries), took) == (limit, Count(statements=5, round_trips=1))
        assert await store.extend(claim.deliveries) == Count(4, 1)
        assert await store.settle(delivered(claim)) == Count(4, 1)
        assert await store.settle([]) == Count(0, 0)

        claim, took = await store.claim(ordered)
        assert (len(claim.deliveries), took) == (limit, Count(6, 1)), "the lock comes ahead of the claim"
        assert await store.extend(claim.deliveries) == Count(4, 1)
        assert await store.release(claim.deliveries) == Count(6, 1), "the same lock, and heads are made due"
        claim, took = await store.claim(ordered)
        assert await store.settle(delivered(claim)) == Count(6, 1)
        claim, took = await store.claim(ordered)
        assert await store.settle(mixed(claim)) == Count(10, 1), "a lock, and one for each kind"
        claim, took = await store.claim(ordered)
        assert await store.bury(mixed(claim)) == Count(11, 1), "copies of what failed are one more"
        claim, took = await store.claim(plain)
        assert await store.bury(delivered(claim)) == Count(4, 1), "nothing to copy"
        assert (await store.claim(Want("nobody", "me")))[1] == Count(5, 1), "and why there is nothing"


@pytest.mark.parametrize("kind", POSTGRES)
async def test_what_relays_share_changes_in_one_round_trip(
    kind: str, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database(kind)
    _, tables = create_tables(url)
    async with counted_postgres(url, tables) as store:
        for destination in ("plain", "new"):
            assert await store.took(lambda s, to=destination: s.reserve(to, 10, 100.0)) == Count(4, 1)
        assert await store.took(lambda s: s.open_circuit("plain", 0, "503")) == Count(5, 1), "row and state"
        assert await store.took(lambda s: s.probe("plain", 60)) == Count(4, 1)
        assert await store.took(lambda s: s.close_circuit("plain")) == Count(4, 1)
        assert await store.took(lambda s: s.pause("plain", "me", "410")) == Count(5, 1)


@pytest.mark.parametrize("kind", POSTGRES)
async def test_the_first_ordered_claim_of_a_destination_makes_its_row(
    kind: str, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database(kind)
    _, tables = create_tables(url)
    async with counted_postgres(url, tables) as store:
        new = Want("new", "me", ordered=True)
        assert (await store.claim(new))[1] == Count(statements=16, round_trips=3)
        assert (await store.claim(new))[1] == Count(6, 1)


class Updates(NamedTuple):
    """Rows updated, and how many of those touched no index."""

    all: int
    hot: int


class Session:
    """One connection on which steps are run, and what they did to the table."""

    def __init__(self, url: str, tables: Tables) -> None:
        self._statements = Statements(tables, POSTGRESQL, "format")
        self.steps = StoreSteps(self._statements, POSTGRESQL, OneStatement(self._statements))
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.adapters.register_loader("jsonb", psycopg.types.string.TextLoader)

    def run(self, steps: Steps[Any]) -> Any:
        """Run the steps in one transaction."""
        with self.connection.transaction():
            self.connection.execute(self._statements("pin_plan").sql)
            try:
                queries = next(steps)
                while True:
                    cursors = [self.connection.execute(*query) for query in queries]
                    queries = steps.send([list(cursor) if cursor.description else [] for cursor in cursors])
            except StopIteration as end:
                return end.value

    def updates(self) -> Updates:
        """So far on this connection."""
        self.connection.execute("SELECT pg_stat_force_next_flush()")
        query = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'outbox_event'"
        return Updates(*self.connection.execute(query).fetchone() or (0, 0))

    def wal(self) -> int:
        """Bytes of log written so far by everybody."""
        query = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
        return int(self.connection.execute(query).fetchone()[0])  # type: ignore[index]


@pytest.mark.parametrize("kind", POSTGRES)
def test_claims_and_extensions_touch_no_index(kind: str, fresh_database: Callable[[str], str]) -> None:
    url = fresh_database(kind)
    engine, tables = create_tables(url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE outbox_event SET (autovacuum_enabled = off)"))
    emit(engine, tables, EVENTS)
    session = Session(url, tables)
    for want in (Want("plain", "me", limit=100), Want("keys", "me", limit=100, ordered=True)):
        before = session.updates()
        claims = [
            session.run(session.steps.claim(want)) for _ in range(EVENTS // 100 if not want.ordered else 1)
        ]
        claimed = session.updates()
        count = sum(len(claim.deliveries) for claim in claims)
        assert count >= 100
        assert Updates(claimed.all - before.all, claimed.hot - before.hot) == Updates(count, count)
        for claim in claims:
            assert not session.run(session.steps.extend(claim.deliveries, 60.0))
        extended = session.updates()
        assert Updates(extended.all - claimed.all, extended.hot - claimed.hot) == Updates(count, count)
    session.connection.close()


@pytest.mark.parametrize("kind", POSTGRES)
def test_an_event_writes_little_log(
    kind: str, fresh_database: Callable[[str], str], record_property: Callable[[str, object], None]
) -> None:
    url = fresh_database(kind)
    engine, tables = create_tables(url)
    emit(engine, tables, EVENTS)
    session = Session(url, tables)
    wal = [session.wal()]
    claims = [session.run(session.steps.claim(Want("plain", "me", limit=100))) for _ in range(EVENTS // 100)]
    wal.append(session.wal())
    for claim in claims:
        session.run(session.steps.settle(delivered(claim), "block"))
    wal.append(session.wal())
    session.connection.close()
    claim_bytes, settle_bytes = ((after - before) / EVENTS for before, after in pairwise(wal))
    record_property("wal bytes per event claimed", claim_bytes)
    record_property("wal bytes per event settled", settle_bytes)
    # Without full-page images, which depend on when the last checkpoint was.
    assert claim_bytes < 300
    assert settle_bytes < 550


@asynccontextmanager
async def counted_by_statement(
    module: Any, url: str, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Counted]:
    """A store of a driver without pipelines, where each statement is a round trip."""
    fetch, total = module._fetch, 0

    def counting(connection: Any, query: Any) -> Any:
        nonlocal total
        total += 1
        return fetch(connection, query)

    monkeypatch.setattr(module, "_fetch", counting)
    store = module.open_store(url if module is mysql else sa.make_url(url).database, tables)
    try:
        yield Counted(store, lambda: Count(total, total))
    finally:
        await store.close()


# To settle is one statement more where it cannot return its rows: they are read first.
STATEMENTS = {"mariadb": 2, "sqlite": 1}
LOCKED = {"mariadb": 1, "sqlite": 0}
"""All rows ahead of several kinds of outcomes, where others might lock them in another order."""
LOCK_AND_MAKE_DUE = {"mariadb": 3, "sqlite": 2}
"""MariaDB finds the heads first: an UPDATE that looks for them would lock what others have not committed."""


@pytest.mark.parametrize("limit", [10, 100])
@pytest.mark.parametrize(("kind", "module"), [("mariadb", mysql), ("sqlite", sqlite)])
async def test_the_number_of_statements_does_not_grow_with_the_batch(
    kind: str,
    module: Any,
    limit: int,
    fresh_database: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = fresh_database(kind)
    engine, tables = create_tables(url)
    emit(engine, tables, 5 * limit)
    plain = Want("plain", "me", limit=limit)
    ordered = Want("keys", "me", limit=limit, ordered=True)
    fenced, keyed = STATEMENTS[kind], LOCK_AND_MAKE_DUE[kind]
    async with counted_by_statement(module, url, tables, monkeypatch) as store:
        claim, took = await store.claim(plain)
        assert (len(claim.deliveries), took.statements) == (limit, 3), "lock due rows, lease, read"
        assert (await store.extend(claim.deliveries)).statements == fenced
        assert (await store.settle(delivered(claim))).statements == fenced

        claim, took = await store.claim(ordered)
        steps = "lock the destination, look, find heads, lock them, find runs, lock them, lease, read"
        assert (len(claim.deliveries), took.statements) == (limit, 8), steps
        assert (await store.release(claim.deliveries)).statements == fenced + keyed, (
            "lock, and make heads due"
        )
        claim, took = await store.claim(ordered)
        assert (await store.settle(delivered(claim))).statements == fenced + keyed
        claim, took = await store.claim(ordered)
        took = await store.settle(mixed(claim))
        assert took.statements == 2 * fenced + keyed + LOCKED[kind] + 2, (
            "deletes, of rows and attempts, and failures are extra"
        )
        claim, took = await store.claim(ordered)
        took = await store.bury(mixed(claim))
        assert took.statements == 2 * fenced + keyed + LOCKED[kind] + 3, "copies of what failed are one more"
        assert (await store.claim(Want("nobody", "me")))[1].statements == 2, "and why there is nothing"
        assert (await store.took(lambda s: s.reserve("plain", 10, 100.0))).statements == 3
