"""The inbox on every transaction API: the mark decides, and it is there if and only if the work is."""

# The names in the statements are the tests' own.
# ruff: noqa: S608

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from relaybox import Event, Inbox, Outbox
from relaybox.errors import (
    ConfigError,
    ConnectionClosed,
    InvalidField,
    NotInTransaction,
    SchemaError,
    TransactionFailed,
    UnsupportedConnection,
)
from relaybox.receive import inbox as sql
from tests import databases
from tests.integration.emit.apis import THIN
from tests.integration.emit.conftest import Place, only, place, prepared, reader  # noqa: F401
from tests.waiting import PATIENCE

ONE_API_A_DATABASE = {
    *(("psycopg", "postgresql-18"), ("asyncpg", "postgresql-15")),
    *(("pymysql", "mariadb"), ("aiosqlite", "sqlite")),
}
AT_ONCE = 16
INBOX = Inbox(consumer="billing")
# MariaDB: of several that wait for one that rolls back, some may be chosen to break a deadlock.
WORTH_ANOTHER_TRY = ("Deadlock", "Record has changed")

ASYNCHRONOUS = {
    *(("psycopg-async", "postgresql-18"), ("asyncpg", "postgresql-15")),
    *(("asyncmy", "mariadb"), ("aiosqlite", "sqlite")),
}

everywhere = only(lambda api, kind: True)
widely = only(lambda api, kind: kind != "postgresql-15" and not api.name.startswith(THIN))
one_api_a_database = only(lambda api, kind: (api.name, kind) in ONE_API_A_DATABASE)


class Failure(Exception):
    """What a handler raises."""


async def nothing(connection: Any) -> None:
    """Leave no effect."""


class Consumer:
    """Processes messages on one API; its effects are rows of a table of its own."""

    def __init__(self, place: Place) -> None:  # noqa: F811
        self.place = place
        self.api = place.api
        self.inbox = Inbox(consumer="billing", tables=place.outbox.tables)
        self.message = str(uuid4())
        self.threads = ThreadPoolExecutor(AT_ONCE)

    async def effect(self, connection: Any) -> None:
        await self.api.run(connection, f"INSERT INTO effect (id) VALUES ('{self.message}')")

    async def once(self, connection: Any, work: Callable[[Any], Awaitable[None]]) -> bool:
        """Mark the event and write a row, as an application does."""
        if self.api.asynchronous:
            async with self.inbox.aonce(connection, self.message) as first:
                if first:
                    await work(connection)
        else:
            with self.inbox.once(connection, self.message) as first:
                if first:
                    await work(connection)
        return first

    async def process(self, work: Callable[[Any], Awaitable[None]] | None = None) -> bool:
        """Take a delivery in a transaction of its own, on a connection of its own."""
        connection = await self.api.open(self.place.url)
        try:
            await self.api.begin(connection)
            first = await self.once(connection, work or self.effect)
            await self.api.commit(connection)
            return first
        except BaseException:
            with suppress(Exception):
                await self.api.rollback(connection)
            raise
        finally:
            await self.api.close(connection)

    async def beside(self) -> bool:
        """``process`` beside others, and again where the database asks for it."""
        while True:
            try:
                if self.api.asynchronous:
                    return await self.process()
                # A driver that waits holds its thread up.
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self.threads, lambda: asyncio.run(self.process()))
            except Exception as error:
                if not any(words in str(error) for words in WORTH_ANOTHER_TRY):
                    raise

    async def prune(self, inbox: Inbox, connection: Any) -> int:
        if self.api.asynchronous:
            return await inbox.aprune(connection)
        return await asyncio.to_thread(inbox.prune, connection)

    def effects(self) -> int:
        query = sa.text("SELECT count(*) FROM effect WHERE id = :id")
        return int(reader(self.place.url).execute(query, {"id": self.message}).scalar_one())

    def marks(self) -> int:
        inbox = self.place.outbox.tables.inbox
        query = sa.select(sa.func.count()).where(inbox.c.message_id == self.message)
        return int(reader(self.place.url).execute(query).scalar_one())


@pytest.fixture
async def consumer(place: Place) -> AsyncIterator[Consumer]:  # noqa: F811
    made = Consumer(place)
    with databases.engine(place.url).begin() as connection:
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS effect (id VARCHAR(40))")
    yield made
    made.threads.shutdown()


@everywhere
async def test_the_same_message_sixteen_times_at_once_has_one_effect(consumer: Consumer) -> None:
    answers = await asyncio.gather(*(consumer.beside() for _ in range(AT_ONCE)))
    assert sorted(answers) == [False] * (AT_ONCE - 1) + [True]
    assert (consumer.effects(), consumer.marks()) == (1, 1)


@widely
async def test_a_handler_that_raises_leaves_no_mark_and_the_redelivery_is_processed(
    consumer: Consumer,
) -> None:
    async def fail(connection: Any) -> None:
        await consumer.effect(connection)
        raise Failure

    with pytest.raises(Failure):
        await consumer.process(fail)
    assert (consumer.effects(), consumer.marks()) == (0, 0)
    assert await consumer.process()
    assert not await consumer.process()
    assert (consumer.effects(), consumer.marks()) == (1, 1)


@widely
async def test_an_exception_that_is_caught_inside_the_transaction_leaves_no_mark_either(
    consumer: Consumer,
) -> None:
    async def fail(connection: Any) -> None:
        raise Failure

    connection = await consumer.place.begun()
    with pytest.raises(Failure) as raised:
        await consumer.once(connection, fail)
    await consumer.effect(connection)
    await consumer.api.commit(connection)
    assert not hasattr(raised.value, "__notes__")
    assert (consumer.effects(), consumer.marks()) == (1, 0)
    assert await consumer.process()


@widely
@pytest.mark.parametrize("kept", [True, False], ids=["commits", "rolls back"])
async def test_a_block_that_ends_its_own_transaction_is_reported(consumer: Consumer, kept: bool) -> None:
    async def end(connection: Any) -> None:
        await consumer.effect(connection)
        await (consumer.api.commit if kept else consumer.api.rollback)(connection)

    with pytest.raises(NotInTransaction, match=r"committed or rolled back inside the block"):
        await consumer.process(end)
    assert (consumer.effects(), consumer.marks()) == (kept, kept)
    assert await consumer.process() is not kept
    assert (consumer.effects(), consumer.marks()) == (1, 1)


@widely
async def test_in_autocommit_it_refuses(consumer: Consumer) -> None:
    connection = await consumer.place.open(autocommit=True)
    block = r"with inbox\.transaction\(connection\):`$"
    advice = r"isolation_level" if consumer.api.sqlalchemy else block
    with pytest.raises(NotInTransaction, match=advice):
        await consumer.once(connection, consumer.effect)
    assert (consumer.effects(), consumer.marks()) == (0, 0)


@widely
async def test_the_second_learns_of_the_first_in_the_same_transaction(consumer: Consumer) -> None:
    connection = await consumer.place.begun()
    assert await consumer.once(connection, consumer.effect)
    assert not await consumer.once(connection, consumer.effect)
    await consumer.api.commit(connection)
    assert (consumer.effects(), consumer.marks()) == (1, 1)


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
@one_api_a_database
async def test_a_concurrent_one_waits_for_the_first_and_takes_over_if_that_rolls_back(
    consumer: Consumer, commits: bool
) -> None:
    connection = await consumer.place.begun()
    assert await consumer.once(connection, consumer.effect)
    second = asyncio.create_task(consumer.beside())
    await consumer.place.wait_until_blocked()
    assert not second.done()
    await (consumer.api.commit if commits else consumer.api.rollback)(connection)
    assert await asyncio.wait_for(second, PATIENCE) is not commits
    assert (consumer.effects(), consumer.marks()) == (1, 1)


@one_api_a_database
async def test_sixteen_take_over_from_one_that_rolls_back_and_one_of_them_does_the_work(
    consumer: Consumer,
) -> None:
    connection = await consumer.place.begun()
    assert await consumer.once(connection, consumer.effect)
    others = [asyncio.create_task(consumer.beside()) for _ in range(AT_ONCE)]
    await consumer.place.wait_until_blocked(AT_ONCE // 2)
    await consumer.api.rollback(connection)
    answers = await asyncio.wait_for(asyncio.gather(*others), PATIENCE)
    assert sorted(answers) == [False] * (AT_ONCE - 1) + [True]
    assert (consumer.effects(), consumer.marks()) == (1, 1)


@one_api_a_database
async def test_a_savepoint_that_is_rolled_back_takes_its_mark_with_it(consumer: Consumer) -> None:
    connection = await consumer.place.begun()
    roll_back = await consumer.api.savepoint(connection)
    assert await consumer.once(connection, consumer.effect)
    await roll_back()
    assert await consumer.once(connection, consumer.effect)
    await consumer.api.commit(connection)
    assert (consumer.effects(), consumer.marks()) == (1, 1)


@one_api_a_database
async def test_each_consumer_remembers_for_itself(consumer: Consumer) -> None:
    connection = await consumer.place.begun()
    assert await consumer.once(connection, consumer.effect)
    consumer.inbox = Inbox(consumer="shipping", tables=consumer.place.outbox.tables)
    assert await consumer.once(connection, consumer.effect)
    await consumer.api.commit(connection)
    assert (consumer.effects(), consumer.marks()) == (2, 2)


BAD_MESSAGES = (
    *((None, "message_id=None"), ("", "must not be empty"), ("x" * 256, "at most 255"), ("x\0", "NUL")),
    *(("\ud800", "surrogate"), (b"x", "give text, an integer or a UUID"), (10**5000, "bits")),
    (True, "message_id=True"),
)
BAD_CONSUMERS = (("\0", "consumer"), ("x" * 101, "at most 100"), (7, "must be text"))


@one_api_a_database
async def test_bad_input_is_refused_and_the_transaction_goes_on(consumer: Consumer) -> None:
    connection, inbox = await consumer.place.begun(), consumer.inbox
    enter = inbox.aonce if consumer.api.asynchronous else inbox.once
    for message, match in BAD_MESSAGES:
        with pytest.raises(InvalidField, match=match):
            enter(connection, message)
    for name, match in BAD_CONSUMERS:
        with pytest.raises(InvalidField, match=match):
            enter(connection, "m", consumer=name)
    with pytest.raises(InvalidField, match=r"pass consumer=, or set it for all calls"):
        Inbox(tables=inbox.tables).once(connection, "m")
    assert await consumer.once(connection, consumer.effect)
    await consumer.api.commit(connection)
    assert (consumer.effects(), consumer.marks()) == (1, 1)


@pytest.mark.parametrize("message", ["é" * 255, "x" * 255, " x ", UUID(int=7), 42, -1, "%s", ":x", "'"])
@one_api_a_database
async def test_any_id_that_fits_is_remembered(consumer: Consumer, message: Any) -> None:
    for first in (True, False):
        consumer.message = message
        connection = await consumer.place.begun()
        consumer.inbox = Inbox(consumer="any", tables=consumer.place.outbox.tables)
        assert await consumer.once(connection, nothing) is first
        await consumer.api.commit(connection)


@one_api_a_database
async def test_ids_are_compared_byte_by_byte(consumer: Consumer) -> None:
    base, connection = uuid4().hex, await consumer.place.begun()
    for message in (f"{base}a", f"{base}A", f"{base}a ", f"{base}á"):
        consumer.message = message
        assert await consumer.once(connection, nothing)
    await consumer.api.commit(connection)


@one_api_a_database
async def test_the_error_for_a_connection_of_the_other_kind_names_the_call_to_use(consumer: Consumer) -> None:
    connection = await consumer.place.begun()
    if consumer.api.asynchronous:
        with pytest.raises(UnsupportedConnection, match="use aonce, not once"):
            consumer.inbox.once(connection, "m").__enter__()
    else:
        with pytest.raises(UnsupportedConnection, match="use once, not aonce"):
            await consumer.inbox.aonce(connection, "m").__aenter__()


@only(lambda api, kind: (api.name, kind) in ASYNCHRONOUS)
async def test_a_time_limit_inside_the_transaction_leaves_no_mark(consumer: Consumer) -> None:
    async def dawdle(connection: Any) -> None:
        await consumer.effect(connection)
        limit.reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(PATIENCE)

    connection = await consumer.place.begun()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            await consumer.once(connection, dawdle)
    await consumer.api.commit(connection)
    assert consumer.marks() == 0
    assert await consumer.process()


@one_api_a_database
async def test_prune_removes_what_is_older_than_the_window_in_batches(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "BATCH", 3)
    monkeypatch.setattr("relaybox.receive.inbox.BATCH", 3)
    inbox, table = consumer.inbox, consumer.place.outbox.tables.inbox
    now, name = datetime.now(UTC), uuid4().hex
    rows = [
        {"consumer": f"{name}{n % 2}", "message_id": str(n), "processed_at": now - timedelta(days=n)}
        for n in range(4, 12)
    ]
    with databases.engine(consumer.place.url).begin() as engine:
        engine.execute(sa.delete(table))
        engine.execute(sa.insert(table), rows)
    connection = await consumer.place.open()
    assert await consumer.prune(inbox, connection) == 5
    left = reader(consumer.place.url).execute(sa.select(table.c.message_id)).scalars()
    assert sorted(left) == ["4", "5", "6"]


@only(lambda api, kind: (api.name, kind) in ONE_API_A_DATABASE and kind != "sqlite")
async def test_prune_steps_over_a_mark_that_somebody_has_met_again(consumer: Consumer) -> None:
    await consumer.process()
    inbox = Inbox(window="1s", tables=consumer.place.outbox.tables)
    table = inbox.tables.inbox
    with databases.engine(consumer.place.url).begin() as engine:
        old = datetime.now(UTC) - timedelta(days=400)
        engine.execute(sa.update(table).values(processed_at=old))
    holding = await consumer.place.begun()
    assert not await consumer.once(holding, consumer.effect)
    connection = await consumer.place.open()
    await asyncio.wait_for(consumer.prune(inbox, connection), PATIENCE)
    await consumer.api.commit(holding)
    # PostgreSQL's INSERT that does nothing locks nothing.
    assert consumer.marks() == (1 if consumer.place.kind == "mariadb" else 0)


# One database is enough


@pytest.fixture(scope="module")
def postgres(module_database: Callable[[str], str]) -> str:
    url = module_database("postgresql-18")
    Outbox(url).migrate()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE effect (id text)")
    return url


def marks(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(*) FROM inbox_message").fetchone()
        connection.execute("DELETE FROM inbox_message")
    assert row is not None
    return int(row[0])


def first(connection: Any, message: Any) -> bool:
    with INBOX.once(connection, message) as first:
        return first


def test_an_event_stands_for_its_id(postgres: str) -> None:
    event = Event(uuid4(), "order.paid", "Order", "1", {}, {}, 1, datetime.now(UTC))
    with psycopg.connect(postgres) as connection:
        assert first(connection, event)
        assert not first(connection, str(event.id))
    assert marks(postgres) == 1


def test_a_statement_that_fails_in_the_block_reaches_the_caller_as_it_is(postgres: str) -> None:
    with psycopg.connect(postgres) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero) as raised, INBOX.once(connection, "m"):
            connection.execute("SELECT 1 / 0")
        assert not hasattr(raised.value, "__notes__")
        with pytest.raises(TransactionFailed), INBOX.once(connection, "m"):
            raise AssertionError("never reached")
        connection.rollback()
    assert marks(postgres) == 0


def test_under_repeatable_read_a_duplicate_that_came_later_is_the_databases_retryable_error(
    postgres: str,
) -> None:
    with psycopg.connect(postgres) as one, psycopg.connect(postgres) as other:
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        other.execute("SELECT 1 FROM inbox_message")
        assert first(one, "m")
        one.commit()
        with pytest.raises(psycopg.errors.SerializationFailure), INBOX.once(other, "m"):
            raise AssertionError("never reached")
        other.rollback()
        assert not first(other, "m")
    assert marks(postgres) == 1


def test_a_mark_that_was_committed_in_a_block_that_raises_later_stays_and_is_reported(postgres: str) -> None:
    def work() -> None:
        with INBOX.once(session, "m"):
            session.commit()
            session.execute(sa.text("SELECT 1"))
            raise Failure

    with Session(databases.engine(postgres)) as session:
        with pytest.raises(Failure) as raised:
            work()
        session.commit()
    assert "'billing', 'm': the transaction was committed or rolled back" in raised.value.__notes__[0]
    assert marks(postgres) == 1


def test_a_session_that_goes_on_after_its_own_commit_is_reported(postgres: str) -> None:
    def work() -> None:
        with INBOX.once(session, "m"):
            session.rollback()
            session.execute(sa.text("SELECT 1"))

    with Session(databases.engine(postgres)) as session:
        with pytest.raises(NotInTransaction, match="inside the block"):
            work()
        session.commit()
    assert marks(postgres) == 0


def test_a_mark_that_cannot_be_taken_back_is_reported_with_the_error(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaybox.receive.inbox.forget", lambda *_, **__: 1 / 0)
    with psycopg.connect(postgres) as connection:
        with pytest.raises(Failure) as raised, INBOX.once(connection, "m"):
            raise Failure
        connection.rollback()
    assert "roll the transaction back" in raised.value.__notes__[0]
    assert marks(postgres) == 0


def test_a_closed_connection_and_missing_tables_have_errors_that_say_so(
    postgres: str, fresh_database: Callable[[str], str]
) -> None:
    connection = psycopg.connect(postgres)
    connection.close()
    with pytest.raises(ConnectionClosed), INBOX.once(connection, "m"):
        raise AssertionError("never reached")
    with psycopg.connect(fresh_database("postgresql-18")) as connection:
        with pytest.raises(SchemaError, match="relaybox migrate"), INBOX.once(connection, "m"):
            raise AssertionError("never reached")
        connection.rollback()


def test_a_connection_in_autocommit_has_a_block_of_the_inbox(postgres: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as connection:
        with INBOX.transaction(connection), INBOX.once(connection, "m") as first:
            assert first
        with suppress(Failure), INBOX.transaction(connection), INBOX.once(connection, "n"):
            raise Failure
    assert marks(postgres) == 1


def test_a_decorated_function_runs_once_for_each_message(postgres: str) -> None:
    inbox, calls = Inbox(), []

    @inbox.only_once(consumer="billing", id_of=lambda message: message["id"])
    def bill(session: Session, message: dict[str, Any], *, total: int = 0) -> int:
        calls.append(message)
        return total

    with Session(databases.engine(postgres)) as session, session.begin():
        assert bill(session, {"id": "a"}, total=7) == 7
        assert bill(session, {"id": "a"}, total=7) is None
        assert bill(session, {"id": "b"}) == 0
    assert len(calls) == 2
    assert bill.__name__ == "bill"
    assert marks(postgres) == 2


async def test_a_decorated_async_function_is_a_consumer_of_its_own(postgres: str) -> None:

    @INBOX.only_once()
    async def ship(connection: asyncpg.Connection, message: str) -> str:
        return "shipped"

    @INBOX.only_once()
    async def pack(connection: asyncpg.Connection, message: str) -> str:
        if message == "broken":
            raise Failure
        return "packed"

    connection = await asyncpg.connect(postgres)
    async with connection.transaction():
        assert (await ship(connection, "m"), await pack(connection, "m")) == ("shipped", "packed")
        assert (await ship(connection, "m"), await pack(connection, "m")) == (None, None)
        with suppress(Failure):
            await pack(connection, "broken")
    names = await connection.fetch("SELECT consumer FROM inbox_message ORDER BY 1")
    await connection.close()
    assert [row[0].rpartition(".")[2] for row in names] == ["pack", "ship"]
    assert marks(postgres) == 2


def test_a_session_with_pending_changes_is_not_flushed_by_the_mark(postgres: str) -> None:
    metadata = sa.MetaData()
    registry = sa.orm.registry(metadata=metadata)

    class Row:
        def __init__(self, id: str) -> None:
            self.id = id

    registry.map_imperatively(Row, sa.Table("effect", metadata, sa.Column("id", sa.Text, primary_key=True)))
    with Session(databases.engine(postgres)) as session, session.begin():
        session.add(Row("pending"))
        with Inbox().once(session, "m", consumer="billing") as first:
            assert first
            assert session.new
    assert marks(postgres) == 1


def test_bad_settings_are_refused() -> None:
    for name, values in {"window": (0, "soon"), "consumer": ("", "x" * 101), "prefix": ("a-b",)}.items():
        for value in values:
            with pytest.raises(ConfigError, match=name):
                Inbox(**{name: value})


def test_the_outboxs_inbox_has_its_tables_and_its_window() -> None:
    outbox = Outbox("postgresql://localhost/x", inbox_window="3d", schema="events", prefix="my_")
    assert outbox.inbox.window == 3 * 86_400
    assert outbox.inbox.tables.inbox.fullname == "events.my_inbox_message"
    assert outbox.inbox is outbox.inbox
