"""What is taken as a connection, what is not, and connections that were set up in unusual ways."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import aiosqlite
import asyncpg
import psycopg
import psycopg2.extras
import pymysql
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from relaybox import Outbox
from relaybox.errors import (
    ConnectionClosed,
    NotInTransaction,
    SchemaError,
    TransactionFailed,
    UnsupportedConnection,
)
from tests.integration.emit.apis import PLACES
from tests.integration.emit.conftest import Place, create_tables, make_outbox, only, reader, sync_engine

Prepared = Callable[[str], tuple[str, Outbox]]
ORDER = ("Order", "1", "order.paid", {})


async def test_the_other_kind_of_call_says_which_one_to_use(place: Place) -> None:
    connection = await place.begun()
    if place.api.asynchronous:
        with pytest.raises(UnsupportedConnection, match="use aemit, not emit"):
            place.outbox.emit(connection, *ORDER)
    else:
        with pytest.raises(UnsupportedConnection, match="use emit, not aemit"):
            await place.outbox.aemit(connection, *ORDER)


@pytest.mark.parametrize("connection", [None, "postgresql://", object(), 1], ids=repr)
def test_what_is_no_connection_is_named_with_what_is(connection: Any) -> None:
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    with pytest.raises(UnsupportedConnection, match=rf"{kind} is no connection.*psycopg.*asyncmy"):
        make_outbox("sqlite://").emit(connection, *ORDER)


async def test_what_is_nearly_a_connection_is_answered_with_the_fix() -> None:
    outbox, engine = make_outbox("sqlite://"), sa.create_engine("sqlite://")
    asynchronous = create_async_engine("sqlite+aiosqlite://")
    with sqlite3.connect(":memory:") as connection:
        fixes = {
            engine: "not an engine",
            asynchronous: "not an engine",
            sessionmaker(engine): "call it",
            connection.cursor(): r"cursor\.connection",
        }
        for given, fix in fixes.items():
            with pytest.raises(UnsupportedConnection, match=fix):
                outbox.emit(given, *ORDER)
            with pytest.raises(UnsupportedConnection, match=fix):
                await outbox.aemit(given, *ORDER)
    connection.close()


def test_sqlalchemy_over_a_driver_that_is_not_known_is_refused() -> None:
    class Wrapped:
        def __init__(self) -> None:
            self._connection = sqlite3.connect(":memory:")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

    engine = sa.create_engine("sqlite://", creator=Wrapped, poolclass=sa.NullPool)
    with Session(engine) as session, pytest.raises(UnsupportedConnection, match="Wrapped is no connection"):
        make_outbox("sqlite://").emit(session, *ORDER)


@pytest.mark.parametrize(
    ("kind", "factory"),
    [
        ("sqlite", "connection"),
        ("postgresql-18", "psycopg"),
        ("postgresql-18", "psycopg2"),
        ("mariadb", "pymysql"),
    ],
)
def test_a_connections_own_row_factory_does_not_matter(prepared: Prepared, kind: str, factory: str) -> None:
    url, outbox = prepared(kind)
    connection = CONNECTS[factory](url)
    key = uuid4().hex
    first = outbox.emit(connection, *ORDER, idempotency_key=key)
    assert outbox.emit(connection, *ORDER, idempotency_key=key).event_id == first.event_id
    connection.rollback()
    connection.close()


def _dict_sqlite(url: str) -> Any:
    connection = sqlite3.connect(str(sa.make_url(url).database))
    connection.row_factory = lambda cursor, row: {
        column[0]: value for column, value in zip(cursor.description, row, strict=True)
    }
    connection.text_factory = bytes
    return connection


def _dict_pymysql(url: str) -> Any:
    address = sa.make_url(url)
    return pymysql.connect(
        host=address.host,
        port=int(address.port or 0),
        user=address.username,
        password=address.password or "",
        database=address.database,
        cursorclass=pymysql.cursors.DictCursor,
    )


CONNECTS: dict[str, Callable[[str], Any]] = {
    "connection": _dict_sqlite,
    "psycopg": lambda url: psycopg.connect(url, row_factory=dict_row),
    "psycopg2": lambda url: psycopg2.connect(url, connection_factory=psycopg2.extras.RealDictConnection),
    "pymysql": _dict_pymysql,
}


async def test_aiosqlites_row_factory_does_not_matter(prepared: Prepared) -> None:
    url, outbox = prepared("sqlite")
    for factory in (
        sqlite3.Row,
        lambda cursor, row: namedtuple("Row", ["x"])(*row),
        lambda cursor, row: {},
    ):
        async with aiosqlite.connect(str(sa.make_url(url).database)) as connection:
            connection.row_factory = factory  # type: ignore[assignment]
            key = uuid4().hex
            first = await outbox.aemit(connection, *ORDER, idempotency_key=key)
            again = await outbox.aemit(connection, *ORDER, idempotency_key=key)
            assert again.event_id == first.event_id
            await connection.rollback()


async def test_asyncpgs_own_codecs_do_not_change_what_is_stored(prepared: Prepared) -> None:
    url, outbox = prepared("postgresql-18")
    connection = await asyncpg.connect(url)
    for name in ("json", "jsonb"):
        await connection.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    await connection.set_type_codec("uuid", encoder=str, decoder=str, schema="pg_catalog")
    id_, key = uuid4().hex, uuid4().hex
    async with connection.transaction():
        first = await outbox.aemit(connection, "Order", id_, "order.paid", {"n": 1}, idempotency_key=key)
        again = await outbox.aemit(connection, "Order", id_, "order.paid", {"n": 1}, idempotency_key=key)
    await connection.close()
    event = outbox.tables.event
    (row,) = reader(url).execute(
        sa.select(event.c.payload, event.c.headers).where(event.c.aggregate_id == id_)
    )
    assert tuple(row) == ({"n": 1}, {})
    assert again.event_id == first.event_id


@pytest.mark.parametrize("autocommit", [False, True])
async def test_psycopg_pipelines(prepared: Prepared, autocommit: bool) -> None:
    url, outbox = prepared("postgresql-18")
    key = uuid4().hex
    with (
        psycopg.connect(url, autocommit=autocommit) as connection,
        connection.transaction(),
        connection.pipeline(),
    ):
        connection.execute("SELECT 1")
        first = outbox.emit(connection, *ORDER, idempotency_key=key)
        again = outbox.emit(connection, *ORDER, idempotency_key=key)
    assert (again.duplicate, again.event_id) == (True, first.event_id)
    async with (
        await psycopg.AsyncConnection.connect(url, autocommit=autocommit) as asynchronous,
        asynchronous.transaction(),
        asynchronous.pipeline(),
    ):
        third = await outbox.aemit(asynchronous, *ORDER, idempotency_key=key)
    assert third.event_id == first.event_id


@only(lambda api, kind: kind != "postgresql-15")
async def test_missing_tables_are_answered_with_the_fix(place: Place) -> None:
    connection = await place.begun()
    outbox = make_outbox(place.url, prefix="missing_")
    for options in ({}, {"idempotency_key": "x"}):
        with pytest.raises(SchemaError, match="relaybox migrate"):
            await place.api.emit(outbox, connection, *ORDER, **options)
        await place.api.rollback(connection)
        await place.api.begin(connection)


def test_names_of_tables_are_settings(prepared: Prepared) -> None:
    for kind in ("postgresql-18", "mariadb", "sqlite"):
        url, _ = prepared(kind)
        outbox = make_outbox(url, prefix="Mixed_Case_")
        create_tables(url, outbox)
        with Session(sync_engine(url)) as session, session.begin():
            outbox.emit(session, *ORDER, idempotency_key="x")
        assert reader(url).execute(sa.select(sa.func.count()).select_from(outbox.tables.event)).scalar() == 1


def test_a_session_is_flushed_before_the_event_is_written(prepared: Prepared) -> None:
    url, outbox = prepared("sqlite")
    engine = sync_engine(url)
    seen: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    thing, mapped = _mapped(engine)
    with Session(engine) as session:
        session.add(mapped(id=uuid4().int % 2**30))
        with pytest.raises(ValueError, match="nan"):
            outbox.emit(session, "Order", "1", "order.paid", float("nan"))
        assert seen == []
        outbox.emit(session, *ORDER)
    assert [sql.split()[2].strip('"') for sql in seen] == [thing, "outbox_event"]


def _mapped(engine: sa.Engine) -> tuple[str, Any]:
    registry = sa.orm.registry()
    name = f"thing_{uuid4().hex}"
    table = sa.Table(name, registry.metadata, sa.Column("id", sa.Integer, primary_key=True))
    mapped = type("Thing", (), {})
    registry.map_imperatively(mapped, table)
    with sa.create_engine(engine.url, poolclass=sa.NullPool).begin() as connection:
        registry.metadata.create_all(connection)
    return name, mapped


def test_an_event_may_be_emitted_from_within_a_flush(prepared: Prepared) -> None:
    url, outbox = prepared("postgresql-18")
    engine = sync_engine(url)
    _, mapped = _mapped(engine)
    id_ = uuid4().hex
    with Session(engine) as session:
        sa.event.listen(session, "after_flush", lambda s, _: outbox.emit(s, "Order", id_, "order.paid", 1))
        session.add(mapped(id=1))
        session.commit()
    event = outbox.tables.event
    query = sa.select(sa.func.count()).select_from(event).where(event.c.aggregate_id == id_)
    assert reader(url).execute(query).scalar() == 1


def test_a_session_with_several_binds_takes_that_of_the_table(prepared: Prepared) -> None:
    url, outbox = prepared("sqlite")
    other = sa.create_engine("sqlite://")
    id_ = uuid4().hex
    binds = {outbox.tables.event: sync_engine(url)}
    with Session(binds=binds) as session, session.begin():
        outbox.emit(session, "Order", id_, "order.paid", 1)
    with Session(other, binds=binds) as session, session.begin():
        outbox.emit(session, "Order", id_, "order.paid", 2)
    elsewhere = {sa.Table("elsewhere", sa.MetaData()): other}
    with Session(binds=elsewhere) as session, pytest.raises(sa.exc.UnboundExecutionError):
        outbox.emit(session, "Order", id_, "order.paid", 3)
    event = outbox.tables.event
    rows = reader(url).execute(sa.select(event.c.payload).where(event.c.aggregate_id == id_)).scalars()
    assert sorted(rows) == [1, 2]


def test_sessions_that_are_not_ready(prepared: Prepared) -> None:
    url, outbox = prepared("postgresql-18")
    engine = sync_engine(url)
    with Session(engine, autobegin=False) as session:
        with pytest.raises(NotInTransaction, match=r"session\.begin"):
            outbox.emit(session, *ORDER)
        with session.begin():
            outbox.emit(session, *ORDER)
    closing = Session(engine, close_resets_only=False)
    closing.close()
    with pytest.raises(ConnectionClosed):
        outbox.emit(closing, *ORDER)


def test_a_connection_whose_transaction_ended_inside_its_block(prepared: Prepared) -> None:
    url, outbox = prepared("postgresql-18")
    with sync_engine(url).connect() as connection:
        with connection.begin() as transaction:
            transaction.rollback()
            with pytest.raises(TransactionFailed):
                outbox.emit(connection, *ORDER)
        with connection.begin():
            outbox.emit(connection, *ORDER)
            connection.invalidate()
            with pytest.raises(TransactionFailed):
                outbox.emit(connection, *ORDER)
            connection.get_transaction().rollback()  # type: ignore[union-attr]


async def test_sqlalchemys_recipe_that_begins_in_an_event_is_a_transaction(prepared: Prepared) -> None:
    url, outbox = prepared("sqlite")
    engine = sync_engine(url)
    id_ = uuid4().hex

    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    with engine.connect() as connection:
        outbox.emit(connection, "Order", id_, "order.paid", 1)
        assert count(url, outbox, id_) == 0
        connection.commit()
    with Session(engine) as session:
        outbox.emit(session, "Order", id_, "order.paid", 2)
        session.rollback()
    assert count(url, outbox, id_) == 1


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "postgresql+asyncpg"])
async def test_an_engine_in_autocommit_is_refused_per_connection_too(prepared: Prepared, driver: str) -> None:
    url, outbox = prepared("postgresql-18")
    engine = create_async_engine(sa.make_url(url).set(drivername=driver), poolclass=sa.NullPool)
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(NotInTransaction):
            await outbox.aemit(connection, *ORDER)
        async with connection.begin():
            with pytest.raises(NotInTransaction):
                await outbox.aemit(connection, *ORDER)
    async with AsyncSession(engine) as session, session.begin():
        await session.connection(execution_options={"isolation_level": "SERIALIZABLE"})
        await outbox.aemit(session, *ORDER)


def count(url: str, outbox: Outbox, id_: str) -> Any:
    event = outbox.tables.event
    query = sa.select(sa.func.count()).select_from(event).where(event.c.aggregate_id == id_)
    return reader(url).execute(query).scalar()


KILLED = """
import asyncio, sys, time
from tests.integration.emit.apis import APIS
from tests.integration.emit.conftest import make_outbox

async def main():
    kept = []
    for line in sys.stdin:
        name, url = line.split()
        api = next(api for api in APIS if api.name == name)
        connection = await api.open(url)
        await api.begin(connection)
        await api.emit(make_outbox(url), connection, "Order", name, "order.killed", {}, idempotency_key=name)
        kept.append(connection)
    print("emitted", flush=True)
    time.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["postgresql-18", "postgresql-15", "mariadb", "sqlite"])
def test_a_process_killed_before_its_commit_leaves_nothing(
    kind: str, fresh_database: Callable[[str], str], pytestconfig: pytest.Config
) -> None:
    names = [api.name for api, place in PLACES if place == kind]
    # SQLite lets one transaction write at a time, so each API gets a file.
    urls = {name: fresh_database(kind) for name in (names if kind == "sqlite" else names[:1])}
    for url in urls.values():
        create_tables(url, make_outbox(url))
    lines = "".join(f"{name} {urls.get(name, next(iter(urls.values())))}\n" for name in names)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=pytestconfig.rootpath,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(pytestconfig.rootpath)},
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(lines)
        process.stdin.close()
        assert process.stdout.readline() == "emitted\n"
        process.send_signal(signal.SIGKILL)
    for url in urls.values():
        outbox = make_outbox(url)
        with Session(sync_engine(url)) as session, session.begin():
            # A key that a dead transaction still held would be waited for, and be new once it is gone.
            for name in names if len(urls) == 1 else [name for name in names if urls[name] == url]:
                emitted = outbox.emit(session, "Order", name, "order.killed", 1, idempotency_key=name)
                assert not emitted.duplicate
        assert count_all(url, outbox) == (len(names) if len(urls) == 1 else 1)


def count_all(url: str, outbox: Outbox) -> Any:
    with sync_engine(url).connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(outbox.tables.event)).scalar()
