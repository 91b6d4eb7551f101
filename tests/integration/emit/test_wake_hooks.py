"""After a commit, and only then, relays learn which destinations have events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from relaybox import EventSource, Outbox
from relaybox.emit.wakes.postgres import Notifier
from tests.integration.emit.apis import Api
from tests.integration.emit.conftest import ORDER, Place, Prepared, make_outbox, only, sync_engine
from tests.waiting import PATIENCE


class Calls:
    """A caller that records its calls."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []

    def call(self, destinations: Iterable[str]) -> None:
        self.names.append(set(destinations))

    def close(self) -> None:
        pass

    def take(self) -> list[set[str]]:
        """Return what came since the last look."""
        names, self.names = self.names, []
        return names


def call_with(outbox: Outbox, caller: Any) -> None:
    outbox._emitter.after_commit.caller = caller


@pytest.fixture
def calls(place: Place) -> Iterator[Calls]:
    """Record the calls of the place's outbox."""
    calls = Calls()
    call_with(place.outbox, calls)
    yield calls
    call_with(place.outbox, None)


def is_session(api: Api) -> bool:
    return "ession" in api.name or api.name.startswith("SQLModel")


sessions = only(lambda api, kind: is_session(api))
connections = only(lambda api, kind: not is_session(api))


@sessions
async def test_a_session_tells_after_its_commit_and_once(place: Place, calls: Calls) -> None:
    session = await place.begun()
    for _ in range(2):
        await place.emit(session, "both.paid")
        await place.emit(session)
        assert calls.take() == []
        await place.api.commit(session)
        assert calls.take() == [{"one", "two"}]
    await place.api.run(session, "SELECT 1")
    await place.api.commit(session)
    assert calls.take() == []


@sessions
async def test_a_rollback_tells_nobody_and_is_forgotten(place: Place, calls: Calls) -> None:
    session = await place.begun()
    await place.emit(session)
    await place.api.rollback(session)
    await place.api.run(session, "SELECT 1")
    await place.api.commit(session)
    await place.emit(session)
    await place.api.close(session)
    await place.api.run(session, "SELECT 1")
    await place.api.commit(session)
    assert calls.take() == []


@sessions
async def test_an_event_that_a_savepoint_took_back_wakes_nobody_even_if_it_was_released_in_it(
    place: Place, calls: Calls
) -> None:
    session = await place.begun()
    await place.emit(session, destinations=["one"])
    roll_back = await place.api.savepoint(session)
    await place.emit(session, destinations=["one"])
    await place.emit(session, destinations=["two"])
    await roll_back()
    roll_back = await place.api.savepoint(session)
    async with place.block(session):
        await place.emit(session, destinations=["two"])
    await roll_back()
    async with place.block(session):
        await place.emit(session, destinations=["by_type"])
        async with place.block(session):
            await place.emit(session, destinations=["by_nothing"])
    await place.emit_and_fail(session, destinations=["two"])
    assert calls.take() == []
    await place.api.commit(session)
    assert calls.take() == [{"one", "by_type", "by_nothing"}]


async def test_a_block_tells_after_its_commit(place: Place, calls: Calls) -> None:
    connection = await place.open()
    for _ in range(2):
        async with place.block(connection):
            await place.emit(connection, "both.paid")
            assert calls.take() == []
        assert calls.take() == [{"one", "two"}]
        assert place.rows()
    async with place.block(connection):
        pass
    assert calls.take() == []


@connections
async def test_a_block_that_raises_tells_nobody(place: Place, calls: Calls) -> None:
    connection = await place.open()
    await place.emit_and_fail(connection, destinations=["one"])
    async with place.block(connection):
        await place.emit(connection, destinations=["two"])
    assert calls.take() == [{"two"}]


@connections
async def test_an_inner_block_tells_with_the_outer_one_unless_it_was_taken_back(
    place: Place, calls: Calls
) -> None:
    connection = await place.open()
    async with place.block(connection):
        await place.emit(connection)
        await place.emit_and_fail(connection, destinations=["by_type"])
        async with place.block(connection):
            await place.emit(connection, destinations=["two"])
        assert calls.take() == []
    assert calls.take() == [{"one", "two"}]


@connections
async def test_in_somebody_elses_transaction_nobody_knows_of_its_commit(place: Place, calls: Calls) -> None:
    connection = await place.begun()
    await place.emit(connection)
    async with place.block(connection):
        await place.emit(connection)
    await place.api.commit(connection)
    assert len(place.rows()) == 2
    assert calls.take() == []


@only(lambda api, kind: kind != "postgresql-15")
async def test_an_event_in_autocommit_wakes_relays_at_once(place: Place, calls: Calls) -> None:
    connection = await place.open(autocommit=True)
    await place.emit(connection, autocommit=True)
    assert calls.take() == [{"one"}]
    await place.emit(connection, "both.paid", autocommit=True, idempotency_key=place.id)
    assert calls.take() == [{"one", "two"}]
    assert len(place.rows()) == 3


@only(lambda api, kind: api.name == "Session-psycopg" and kind == "postgresql-18")
async def test_a_duplicate_has_nothing_to_tell(place: Place, calls: Calls) -> None:
    session = await place.begun()
    await place.emit(session, idempotency_key=place.id)
    await place.api.commit(session)
    await place.emit(session, idempotency_key=place.id)
    await place.api.commit(session)
    assert calls.take() == [{"one"}]


@only(lambda api, kind: api.name == "psycopg" and kind == "postgresql-18")
async def test_psycopgs_own_way_out_of_a_block_is_a_rollback(place: Place, calls: Calls) -> None:
    connection = await place.open()
    with place.outbox.transaction(connection):
        await place.emit(connection)
        raise psycopg.Rollback
    assert place.rows() == []
    assert calls.take() == []


Ready = tuple[sa.Engine, Outbox, Calls]


@pytest.fixture
def ready(prepared: Prepared) -> Iterator[Ready]:
    """Yield an outbox on PostgreSQL and its caller."""
    url, outbox = prepared("postgresql-18")
    calls = Calls()
    call_with(outbox, calls)
    yield sync_engine(url), outbox, calls
    call_with(outbox, None)


def test_a_commit_that_fails_tells_nobody(ready: Ready) -> None:
    engine, outbox, calls = ready
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE once (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    with Session(engine) as session:
        outbox.emit(session, *ORDER)
        session.execute(sa.text("INSERT INTO once VALUES (1), (1)"))
        with pytest.raises(sa.exc.IntegrityError):
            session.commit()
        session.rollback()
        session.execute(sa.text("SELECT 1"))
        session.commit()
    with psycopg.connect(outbox.settings.database) as connection:
        block = outbox.transaction(connection)
        block.__enter__()
        outbox.emit(connection, *ORDER)
        connection.execute("INSERT INTO once VALUES (1), (1)")
        with pytest.raises(psycopg.errors.UniqueViolation):
            block.__exit__(None, None, None)
    assert calls.take() == []


@pytest.mark.parametrize("mode", ["conditional_savepoint", "create_savepoint", "control_fully"])
def test_a_session_inside_its_connections_transaction(ready: Ready, mode: Any) -> None:
    engine, outbox, calls = ready
    with engine.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode=mode) as session:
            outbox.emit(session, *ORDER)
            session.commit()
        assert calls.take() == ([{"one"}] if mode == "control_fully" else [])
        assert transaction.is_active is (mode != "control_fully")
        if transaction.is_active:
            with outbox.transaction(connection), Session(connection) as session:
                outbox.emit(session, *ORDER)
                session.commit()
            transaction.rollback()
    assert calls.take() == []


def test_a_session_in_a_block_of_its_connection_wakes_relays_when_the_block_commits(ready: Ready) -> None:
    engine, outbox, calls = ready
    with engine.connect() as connection:
        with outbox.transaction(connection), Session(connection) as session:
            outbox.emit(session, *ORDER)
            session.commit()
            assert calls.take() == []
        assert calls.take() == [{"one"}]


def test_two_outboxes_in_one_session_tell_each_their_own(ready: Ready) -> None:
    engine, outbox, calls = ready
    other, also = make_outbox(outbox.settings.database), Calls()
    call_with(other, also)
    with Session(engine) as session, session.begin():
        outbox.emit(session, *ORDER)
        other.emit(session, *ORDER, destinations=["two"])
    assert calls.take() == [{"one"}]
    assert also.take() == [{"two"}]


class Base(DeclarativeBase):
    pass


class Thing(EventSource, Base):
    __tablename__ = "hooked_thing"
    id: Mapped[int] = mapped_column(primary_key=True)


def test_recorded_events_wake_relays_too(ready: Ready) -> None:
    engine, outbox, calls = ready
    Base.metadata.create_all(engine)
    make_session = outbox.attach(sessionmaker(engine))
    with make_session() as session:
        thing = Thing()
        session.add(thing)
        thing.record("order.made", {})
        session.commit()
        assert calls.take() == [{"one"}]
        with session.begin_nested() as savepoint:
            thing.record("both.made", {})
            session.flush()
            savepoint.rollback()
        session.commit()
        assert calls.take() == []
        thing.record("both.made", {})
        session.commit()
        assert calls.take() == [{"one", "two"}]


def test_an_error_in_the_flush_after_an_event_tells_nobody(ready: Ready) -> None:
    engine, outbox, calls = ready
    Base.metadata.create_all(engine)
    id_ = time.time_ns() % 2**30
    with Session(engine) as session, session.begin():
        session.add(Thing(id=id_))
    with Session(engine) as session:
        outbox.emit(session, *ORDER)
        session.add(Thing(id=id_))
        with pytest.raises(sa.exc.IntegrityError):
            session.commit()
        session.rollback()
        with session.begin():
            outbox.emit(session, *ORDER, destinations=["two"])
    assert calls.take() == [{"two"}]


@pytest.fixture
def ear(prepared: Prepared) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection that listens."""
    with psycopg.connect(prepared("postgresql-18")[0], autocommit=True) as connection:
        connection.execute("LISTEN relaybox")
        yield connection


def heard(ear: psycopg.Connection[Any], seconds: float, stop_after: int | None = None) -> list[str]:
    return [one.payload for one in ear.notifies(timeout=seconds, stop_after=stop_after)]


def test_no_notification_is_sent_before_the_commit(prepared: Prepared, ear: psycopg.Connection[Any]) -> None:
    url, outbox = prepared("postgresql-18")
    notifier = Notifier(url, "relaybox")
    call_with(outbox, notifier)
    with Session(sync_engine(url)) as session:
        outbox.emit(session, *ORDER)
        session.flush()
        assert heard(ear, 0.3) == []
        session.commit()
        assert heard(ear, PATIENCE, stop_after=1) == ["one"]
        outbox.emit(session, *ORDER)
        session.rollback()
        assert heard(ear, 0.3) == []
    notifier.close()
    call_with(outbox, None)
