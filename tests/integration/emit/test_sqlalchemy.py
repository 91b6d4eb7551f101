"""Sessions and connections of SQLAlchemy that were set up, or are in a state, of their own kind."""

from __future__ import annotations

import sqlite3
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from relaybox.errors import ConnectionClosed, NotInTransaction, TransactionFailed, UnsupportedConnection
from tests.integration.emit.conftest import ORDER, Prepared, make_outbox, payloads, sync_engine


def test_sqlalchemy_over_a_driver_that_is_not_known_is_refused() -> None:
    class Wrapped:
        def __init__(self) -> None:
            self._connection = sqlite3.connect(":memory:")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._connection, name)

    engine = sa.create_engine("sqlite://", creator=Wrapped, poolclass=sa.NullPool)
    with Session(engine) as session, pytest.raises(UnsupportedConnection, match="Wrapped is no connection"):
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
