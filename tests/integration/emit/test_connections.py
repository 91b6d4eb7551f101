"""What is taken as a connection, what is not, and connections that were set up in unusual ways."""

from __future__ import annotations

import asyncio
import json
import sqlite3
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

from relaybox.errors import (
    ConnectionClosed,
    NotInTransaction,
    SchemaError,
    TransactionFailed,
    UnsupportedConnection,
)
from tests.databases import KINDS
from tests.integration.emit.apis import THIN
from tests.integration.emit.conftest import (
    ORDER,
    Place,
    Prepared,
    create_tables,
    make_outbox,
    only,
    payloads,
    reader,
    sync_engine,
)


async def test_the_other_kind_of_call_says_which_one_to_use(place: Place) -> None:
    connection = await place.begun()
    if place.api.asynchronous:
        with pytest.raises(UnsupportedConnection, match="use aemit, not emit"):
            place.outbox.emit(connection, *ORDER)
    else:
        with pytest.raises(UnsupportedConnection, match="use emit, not aemit"):
            await place.outbox.aemit(connection, *ORDER)


@pytest.mark.parametrize(
    "connection", [None, "postgresql://", object(), 1], ids=lambda value: type(value).__name__
)
def test_an_unsupported_connection_is_named_with_the_supported_ones(connection: Any) -> None:
    kind = type(connection).__qualname__
    with pytest.raises(UnsupportedConnection, match=rf"^{kind} is not a connection.*psycopg.*asyncmy"):
        make_outbox("sqlite://").emit(connection, *ORDER)


async def test_what_is_nearly_a_connection_is_answered_with_the_fix() -> None:
    outbox, engine = make_outbox("sqlite://"), sa.create_engine("sqlite://")
    asynchronous = create_async_engine("sqlite+aiosqlite://")
    with sqlite3.connect(":memory:") as connection:
        fixes = {
            engine: r"`with engine\.begin\(\) as connection: outbox\.emit\(connection, …\)`$",
            asynchronous: r"`async with engine\.begin\(\) as connection: await outbox\.aemit\(",
            sessionmaker(engine): "call it and pass the session$",
            connection.cursor(): r"^sqlite3\.Cursor: pass cursor\.connection$",
        }
        for given, fix in fixes.items():
            with pytest.raises(UnsupportedConnection, match=fix):
                outbox.emit(given, *ORDER)
            with pytest.raises(UnsupportedConnection, match=fix):
                await outbox.aemit(given, *ORDER)
    connection.close()


@only(lambda api, kind: kind != "postgresql-15" and api.name.partition("-")[0] not in THIN)
async def test_a_connection_to_another_kind_of_database_is_refused(place: Place) -> None:
    other = "sqlite://" if not place.kind.startswith("sqlite") else "postgresql://host/db"
    own = sa.make_url(other).get_backend_name()
    connection = await place.begun()
    with pytest.raises(UnsupportedConnection, match=f"this outbox is on {own}, the connection is "):
        await place.api.emit(make_outbox(other), connection, *ORDER)
    await place.emit(connection)


def test_an_outbox_on_mysql_or_mariadb_takes_either(prepared: Prepared) -> None:
    url, _ = prepared("mariadb")
    address = sa.make_url(url).render_as_string(hide_password=False).partition("://")[2]
    connection = _dict_pymysql(url)
    for scheme in ("mysql", "mariadb"):
        assert not make_outbox(f"{scheme}://{address}").emit(connection, *ORDER).duplicate
    connection.close()


def _dict_sqlite(url: str) -> Any:
    connection = sqlite3.connect(str(sa.make_url(url).database))
    connection.row_factory = lambda cursor, row: {
        column[0]: value for column, value in zip(cursor.description, row, strict=True)
    }
    connection.text_factory = bytes
    return connection


def _dict_pymysql(url: str) -> Any:
    account = sa.make_url(url).translate_connect_args(username="user")
    return pymysql.connect(**{"password": "", **account}, cursorclass=pymysql.cursors.DictCursor)


CONNECTS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "sqlite3": ("sqlite", _dict_sqlite),
    "psycopg": ("postgresql-18", lambda url: psycopg.connect(url, row_factory=dict_row)),
    "psycopg2": (
        "postgresql-18",
        lambda url: psycopg2.connect(url, connection_factory=psycopg2.extras.RealDictConnection),
    ),
    "pymysql": ("mariadb", _dict_pymysql),
}


@pytest.mark.parametrize(("kind", "connect"), CONNECTS.values(), ids=CONNECTS)
def test_a_connections_own_row_factory_does_not_matter(prepared: Prepared, kind: str, connect: Any) -> None:
    url, outbox = prepared(kind)
    connection = connect(url)
    key = uuid4().hex
    first = outbox.emit(connection, *ORDER, idempotency_key=key)
    assert outbox.emit(connection, *ORDER, idempotency_key=key).event_id == first.event_id
    connection.rollback()
    connection.close()


async def test_aiosqlites_row_factory_does_not_matter(prepared: Prepared) -> None:
    url, outbox = prepared("sqlite")
    for factory in (sqlite3.Row, lambda cursor, row: namedtuple("Row", ["x"])(*row), lambda cursor, row: {}):
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
        with pytest.raises(SchemaError, match="relaybox migrate") as raised:
            await place.api.emit(outbox, connection, *ORDER, **options)
        assert "missing_" in str(raised.value)
        assert "\n" not in str(raised.value)
        await place.api.rollback(connection)
        await place.api.begin(connection)


def test_names_of_tables_are_settings(prepared: Prepared) -> None:
    for kind in KINDS:
        url, _ = prepared(kind)
        outbox = make_outbox(url, prefix="Mixed_Case_")
        create_tables(url, outbox)
        with Session(sync_engine(url)) as session, session.begin():
            outbox.emit(session, *ORDER, idempotency_key="x")
        assert reader(url).execute(sa.select(sa.func.count()).select_from(outbox.tables.event)).scalar() == 1


def test_a_pipeline_in_autocommit_is_not_a_transaction_unless_it_begins_one(prepared: Prepared) -> None:
    url, outbox = prepared("postgresql-18")
    event = ("Order", uuid4().hex, "order.paid", {})
    with psycopg.connect(url, autocommit=True) as connection, connection.pipeline():
        connection.execute("SELECT 1")
        with pytest.raises(NotInTransaction):
            outbox.emit(connection, *event)
    assert payloads(url, outbox, event[1]) == []
    with psycopg.connect(url, autocommit=True) as connection, connection.pipeline(), connection.transaction():
        connection.execute("SELECT 1")
        outbox.emit(connection, *event, idempotency_key=event[1])
    assert payloads(url, outbox, event[1]) == [{}]


def test_raw_cursors_of_psycopg_do_not_matter(prepared: Prepared) -> None:
    url, outbox = prepared("postgresql-18")
    key = uuid4().hex
    with psycopg.connect(url, cursor_factory=psycopg.RawCursor) as connection:
        outbox.emit(connection, "Order", key, "order.paid", {}, idempotency_key=key)
    assert payloads(url, outbox, key) == [{}]


async def test_a_call_that_is_cancelled_leaves_no_transaction_open(prepared: Prepared) -> None:
    url, outbox = prepared("postgresql-18")
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    for turns in range(60):
        key = uuid4().hex
        call = asyncio.create_task(outbox.aemit(connection, *ORDER, idempotency_key=key, autocommit=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    await connection.close()


def test_sqlalchemy_over_a_driver_that_is_not_known_is_refused() -> None:
    class Wrapped:
        def __init__(self) -> None:
            self._connection = sqlite3.connect(":memory:")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

    engine = sa.create_engine("sqlite://", creator=Wrapped, poolclass=sa.NullPool)
    refused = pytest.raises(UnsupportedConnection, match="Wrapped is not a connection")
    with Session(engine) as session, refused:
        make_outbox("sqlite://").emit(session, *ORDER)


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
    assert payloads(url, outbox, id_) == [1]


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
    assert payloads(url, outbox, id_) == [1, 2]


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
        assert payloads(url, outbox, id_) == []
        connection.commit()
    with Session(engine) as session:
        outbox.emit(session, "Order", id_, "order.paid", 2)
        session.rollback()
    assert payloads(url, outbox, id_) == [1]


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
