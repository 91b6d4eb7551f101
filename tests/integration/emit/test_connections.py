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
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from relaybox.errors import NotInTransaction, SchemaError, UnsupportedConnection
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
def test_what_is_no_connection_is_named_with_what_is(connection: Any) -> None:
    kind = type(connection).__qualname__
    with pytest.raises(UnsupportedConnection, match=rf"^{kind} is no connection.*psycopg.*asyncmy"):
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


def test_a_pipeline_in_autocommit_is_no_transaction_unless_it_begins_one(prepared: Prepared) -> None:
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
