"""Events that models record are emitted with the flush, in its transaction, once each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from relaybox import EventSource, Outbox
from relaybox.errors import NotInTransaction, PayloadError, TransactionFailed, UnsupportedConnection
from tests.databases import EVERY_KIND, async_url
from tests.integration.emit.conftest import Prepared, make_outbox, reader, sync_engine
from tests.waiting import PATIENCE


class Base(DeclarativeBase):
    pass


class Order(EventSource, Base):
    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[int] = mapped_column(default=0)
    code: Mapped[str | None] = mapped_column(sa.String(50), unique=True)


class Line(EventSource, Base):
    __tablename__ = "shop_line"

    order_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


@dataclass
class Shop:
    """A database with models and an outbox; ``tag`` marks the events of one test."""

    url: str
    outbox: Outbox
    engine: sa.Engine
    tag: str

    def session(self) -> Session:
        return self.outbox.attach(sessionmaker(self.engine))()

    @contextmanager
    def ordering(self) -> Iterator[tuple[Session, Order]]:
        """Yield a session with a new order in it."""
        with self.session() as session:
            order = Order()
            session.add(order)
            yield session, order

    def emitted(self) -> list[tuple[str, str, Any]]:
        event = self.outbox.tables.event
        columns = event.c.aggregate_type, event.c.aggregate_id, event.c.payload
        own = event.c.event_type == f"order.{self.tag}"
        query = sa.select(*columns).where(own).order_by(event.c.position)
        return [tuple(row) for row in reader(self.url).execute(query)]

    def payloads(self) -> list[Any]:
        return [payload for _, _, payload in self.emitted()]

    def record(self, order: EventSource, payload: Any, **options: Any) -> None:
        order.record(f"order.{self.tag}", payload, **options)


@pytest.fixture(params=EVERY_KIND)
def shop(request: pytest.FixtureRequest, prepared: Prepared) -> Shop:
    url, outbox = prepared(request.param)
    engine = sync_engine(url)
    Base.metadata.create_all(engine)
    return Shop(url, outbox, engine, uuid4().hex)


def test_a_new_object_has_its_id_when_its_event_is_written(shop: Shop) -> None:
    with shop.session() as session:
        order = Order(total=1)
        shop.record(order, {"n": 1})
        session.add(order)
        shop.record(order, {"n": 2})
        session.commit()
        assert shop.emitted() == [("Order", str(order.id), {"n": 1}), ("Order", str(order.id), {"n": 2})]


def test_an_event_is_written_once_however_often_the_session_flushes(shop: Shop) -> None:
    with shop.ordering() as (session, order):
        shop.record(order, 1)
        session.flush()
        order.total = 2
        session.flush()
        shop.record(order, 2)
        order.total = 3
        session.flush()
        assert shop.payloads() == []
        session.commit()
        session.commit()
    assert shop.payloads() == [1, 2]


def test_an_object_without_changes_is_heard_before_the_commit(shop: Shop) -> None:
    with shop.session() as session:
        session.add(Order(code=shop.tag))
        session.commit()
        order = session.scalars(sa.select(Order).filter_by(code=shop.tag)).one()
        shop.record(order, "kept")
        session.commit()
        shop.record(order, "without a transaction before it")
        session.commit()
    assert shop.payloads() == ["kept", "without a transaction before it"]


@pytest.mark.parametrize("changed", [False, True], ids=["clean", "dirty"])
@pytest.mark.parametrize("when", ["before_commit", "after_flush_postexec"])
def test_what_a_listener_records_in_the_commit_is_written(shop: Shop, when: str, changed: bool) -> None:
    with shop.ordering() as (session, order):
        session.commit()
        order.total = 2 if changed else order.total

        def record(session: Session, *_: Any) -> None:
            shop.record(order, "late")

        sa.event.listen(session, when, record, once=True)
        shop.record(order, "early")
        session.commit()
        assert shop.payloads() == ["early", "late"]
        shop.record(order, "rolled back")
        session.rollback()
        session.commit()
    assert shop.payloads() == ["early", "late"]


@pytest.mark.parametrize("ended", ["released", "rolled back"])
def test_what_a_listener_records_after_a_savepoint_of_its_own_is_written(shop: Shop, ended: str) -> None:
    with shop.ordering() as (session, order):
        session.commit()

        def record(session: Session) -> None:
            with session.begin_nested() as savepoint:
                session.execute(sa.select(Order.id))
                if ended == "rolled back":
                    savepoint.rollback()
            shop.record(order, "late")

        sa.event.listen(session, "before_commit", record, once=True)
        order.total = 2
        session.commit()
    assert shop.payloads() == ["late"]


def test_what_a_listener_records_in_the_commit_after_a_refused_one_is_written(shop: Shop) -> None:
    with shop.ordering() as (session, order):
        session.commit()

        def refuse(*_: object) -> None:
            raise ValueError("too large")

        def record(session: Session) -> None:
            shop.record(order, "late")

        sa.event.listen(session, "before_flush", refuse, once=True)
        order.total = 2
        with pytest.raises(ValueError, match="too large"):
            session.commit()
        session.refresh(order)
        sa.event.listen(session, "before_commit", record, once=True)
        session.commit()
    assert shop.payloads() == ["late"]


def test_what_a_listener_records_in_the_commit_on_a_deleted_object_is_written(shop: Shop) -> None:
    with shop.ordering() as (session, order):
        session.commit()
        session.delete(order)
        session.flush()

        def record(session: Session) -> None:
            shop.record(order, "deleted")

        sa.event.listen(session, "before_commit", record, once=True)
        session.commit()
    assert shop.payloads() == ["deleted"]


@pytest.mark.filterwarnings("error::sqlalchemy.exc.SAWarning")
@pytest.mark.parametrize("when", ["before_flush", "after_flush"])
def test_what_a_listener_records_in_the_flush_of_a_commit_does_not_touch_the_object(
    shop: Shop, when: str
) -> None:
    updates: list[Order] = []

    def note(_mapper: object, _connection: object, order: Order) -> None:
        updates.append(order)

    with shop.ordering() as (session, order):
        session.commit()
        assert order.total == 0
        session.add(Line(order_id=order.id, number=1))
        sa.event.listen(session, when, lambda *_: shop.record(order, "line added"), once=True)
        sa.event.listen(Order, "before_update", note)
        try:
            session.commit()
        finally:
            sa.event.remove(Order, "before_update", note)
    assert shop.payloads() == ["line added"]
    assert updates == []


def test_events_of_several_objects_keep_the_order_in_which_they_were_recorded(shop: Shop) -> None:
    with shop.session() as session:
        orders = [Order(), Order()]
        session.add_all(orders)
        for n in range(6):
            shop.record(orders[n % 2], n)
        session.commit()
    assert shop.payloads() == list(range(6))


def test_a_deleted_object_may_say_so(shop: Shop) -> None:
    with shop.ordering() as (session, order):
        session.commit()
        id_ = order.id
        session.delete(order)
        shop.record(order, "deleted")
        session.commit()
    assert shop.emitted() == [("Order", str(id_), "deleted")]


def test_the_aggregate_and_the_options_of_emit_can_be_given(shop: Shop) -> None:
    with shop.session() as session:
        line = Line(order_id=uuid4().int % 2**30, number=2)
        session.add(line)
        shop.record(line, 1)
        shop.record(line, 2, aggregate_type="Basket", aggregate_id="b-7", idempotency_key=shop.tag)
        shop.record(line, 3, idempotency_key=shop.tag)
        session.commit()
        assert shop.emitted() == [("Line", f"{line.order_id}:2", 1), ("Basket", "b-7", 2)]


def test_a_rollback_forgets_what_was_recorded(shop: Shop) -> None:
    with shop.ordering() as (session, order):
        session.commit()
        shop.record(order, "before a flush")
        session.rollback()
        shop.record(order, "after a flush")
        order.total = 5
        session.flush()
        session.rollback()
        shop.record(order, "closed")
        session.close()
        session.add(order)
        order.total = 6
        session.commit()
    assert shop.payloads() == []


def test_a_savepoint_that_is_rolled_back_forgets_what_was_recorded_in_it(shop: Shop) -> None:
    with shop.ordering() as (session, order):
        shop.record(order, "outer")
        session.flush()
        for flushes in (True, False):
            inner = session.begin_nested()
            shop.record(order, f"inner {flushes}")
            if flushes:
                order.total += 1
                session.flush()
            inner.rollback()
        with session.begin_nested():
            shop.record(order, "released")
        session.commit()
    assert shop.payloads() == ["outer", "released"]


def test_what_was_recorded_before_a_savepoint_survives_it_and_what_it_released_does_not(shop: Shop) -> None:
    with shop.ordering() as (session, order):
        session.flush()
        shop.record(order, "outer")
        one = session.begin_nested()
        with session.begin_nested():
            shop.record(order, "inner")
            order.total = 7
            session.flush()  # writes both inside the savepoints
        shop.record(order, "between")
        one.rollback()
        shop.record(order, "after")
        session.commit()
    assert shop.payloads() == ["outer", "after"]


def test_a_released_savepoint_is_not_touched_by_the_next_one(shop: Shop) -> None:
    with shop.ordering() as (session, order):
        session.flush()
        for flushes in (True, False):
            with session.begin_nested():
                shop.record(order, f"released {flushes}")
                order.total += flushes
            session.begin_nested().rollback()
        session.commit()
    assert shop.payloads() == ["released True", "released False"]


def test_a_flush_that_fails_forgets_and_the_session_says_so(shop: Shop) -> None:
    with shop.session() as session:
        session.add(Order(code=shop.tag))
        session.commit()
        order = Order(code=shop.tag)
        session.add(order)
        shop.record(order, "never")
        with pytest.raises(sa.exc.IntegrityError):
            session.flush()
        with pytest.raises(TransactionFailed):
            shop.outbox.emit(session, "Order", 1, f"order.{shop.tag}", "never")
        session.rollback()
        session.add(Order())
        session.commit()
    assert shop.payloads() == []


def test_a_bad_payload_stops_the_commit(shop: Shop) -> None:
    with shop.session() as session:
        order = Order(code=shop.tag)
        session.add(order)
        shop.record(order, float("nan"))
        with pytest.raises(PayloadError):
            session.commit()
        session.rollback()
        assert session.scalars(sa.select(Order).filter_by(code=shop.tag)).all() == []
    assert shop.payloads() == []


def test_an_object_expunged_before_it_was_written_says_nothing(shop: Shop) -> None:
    with shop.ordering() as (session, order):
        shop.record(order, "never")
        session.expunge(order)
        session.commit()
    assert shop.payloads() == []


def test_a_session_that_was_not_attached_refuses(shop: Shop) -> None:
    with Session(shop.engine) as session:
        order = Order()
        session.add(order)
        with pytest.raises(UnsupportedConnection, match="attach"):
            shop.record(order, 1)
        kept = Order()
        shop.record(kept, 2)
        with pytest.raises(UnsupportedConnection, match="attach"):
            session.add(kept)
        assert kept not in session
        session.commit()
    with shop.session() as attached:
        attached.add(kept)
        attached.commit()
    assert shop.payloads() == [2]


async def test_an_asynchronous_session_that_was_not_attached_refuses(shop: Shop) -> None:
    engine = create_async_engine(async_url(shop.url), poolclass=sa.NullPool)
    async with AsyncSession(engine) as session:
        order, kept = Order(), Order()
        session.add(order)
        with pytest.raises(UnsupportedConnection, match="attach"):
            shop.record(order, 1)
        shop.record(kept, 2)
        with pytest.raises(UnsupportedConnection, match="attach"):
            session.add(kept)


@pytest.mark.filterwarnings("ignore:Session's state has been changed on a non-active transaction")
def test_an_event_kept_through_a_failed_session_is_written_by_the_next_try(shop: Shop) -> None:
    with shop.session() as session:
        session.add(Order(code=shop.tag))
        session.commit()
        session.add(Order(code=shop.tag))
        with pytest.raises(sa.exc.IntegrityError):
            session.flush()
        order = Order()
        shop.record(order, "kept")
        with pytest.raises(TransactionFailed):
            session.add(order)
        session.rollback()
        session.add(order)
        session.commit()
    assert shop.payloads() == ["kept"]


def test_an_unknown_option_is_refused_where_it_is_written(shop: Shop) -> None:
    with pytest.raises(TypeError, match="foo"):
        Order().record("order.paid", 1, foo=1)  # type: ignore[call-arg]


def test_each_of_many_short_lived_makers_is_attached() -> None:
    """Often a new object gets the id of one that is gone."""
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    outbox = make_outbox("sqlite://")
    for metadata in (outbox.tables.event.metadata, Base.metadata):
        metadata.create_all(engine)
    for n in range(50):
        with outbox.attach(sessionmaker(engine))() as session:
            order = Order(code=str(n))
            session.add(order)
            order.record("order.paid", n)
            session.commit()
    with engine.connect() as connection:
        written = connection.execute(sa.select(outbox.tables.event.c.payload)).scalars().all()
    assert sorted(written) == list(range(50))


WITHOUT_GREENLET = """
import sys
sys.modules["greenlet"] = None
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from relaybox import Destination, EventSource, Outbox, Route

class Base(DeclarativeBase): pass
class Order(EventSource, Base):
    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)

outbox = Outbox(sys.argv[1], destinations=[Destination("one", "memory:")], routes=[Route("*", to="one")])
outbox.migrate()
engine = sa.create_engine(sys.argv[1])
Base.metadata.create_all(engine)
with outbox.attach(sessionmaker(engine))() as session:
    order = Order()
    session.add(order)
    order.record("order.paid", 1)
    outbox.emit(session, "Order", 2, "order.paid", 2)
    session.commit()
    print(len(session.execute(sa.select(outbox.tables.event.c.payload)).all()))
assert "sqlalchemy.ext.asyncio" not in sys.modules
"""


def test_synchronous_applications_need_no_greenlet(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_GREENLET, f"sqlite:///{tmp_path}/shop.db"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_a_session_that_does_not_begin_by_itself_must_have_begun(shop: Shop) -> None:
    maker = shop.outbox.attach(sessionmaker(shop.engine, autobegin=False))
    with maker() as session:
        with session.begin():
            order = Order()
            session.add(order)
        with pytest.raises(NotInTransaction, match=r"session\.begin"):
            shop.record(order, 1)


def test_sessions_their_classes_and_scoped_sessions_can_be_attached_and_twice_is_as_once(shop: Shop) -> None:
    class Mine(Session):
        pass

    shop.outbox.attach(Mine)
    single = shop.outbox.attach(Session(shop.engine))
    scoped = shop.outbox.attach(scoped_session(sessionmaker(shop.engine)))
    twice = shop.outbox.attach(shop.outbox.attach(sessionmaker(shop.engine)))
    for n, session in enumerate((Mine(shop.engine), single, scoped(), twice())):
        with session:
            order = Order()
            shop.record(order, n)
            session.add(order)
            session.commit()
    assert shop.payloads() == [0, 1, 2, 3]
    with pytest.raises(UnsupportedConnection, match=r"not an SQLAlchemy session.*pass the sessionmaker"):
        shop.outbox.attach(shop.engine)


async def test_asynchronous_sessions_do_the_same(shop: Shop) -> None:
    engine = create_async_engine(async_url(shop.url), poolclass=sa.NullPool)
    maker = shop.outbox.attach(async_sessionmaker(engine, expire_on_commit=False))
    scoped = shop.outbox.attach(async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 0))
    single = shop.outbox.attach(AsyncSession(engine))
    for n, session in enumerate((maker(), scoped(), single)):
        async with session:
            order = Order()
            session.add(order)
            shop.record(order, n)
            await session.flush()
            inner = await session.begin_nested()
            shop.record(order, "rolled back")
            order.total = 1
            await session.flush()
            await inner.rollback()
            await session.commit()
    assert shop.payloads() == [0, 1, 2]
    async with maker() as session:
        session.add(Order())
        await session.rollback()
