"""What the fixture ``outbox`` of the pytest plugin can do, on every database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from relaybox import Destination, Event, EventSource, Outbox, Reject, Retry, Route, Unavailable
from relaybox.errors import ConfigError, StoreError, UnknownDestination, UnsupportedConnection
from relaybox.testing.probe import Drained, OutboxProbe, Tally
from tests.databases import KINDS, async_url, engine

on_sqlite = pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
Migrated = Callable[[str], str]
SLOW: dict[str, Any] = {"backoff": {"base": "1h", "cap": "1h"}}


class Shop:
    """An outbox with a webhook, whose options are ``search``, and a function; and its database."""

    def __init__(self, database: str, *others: Destination, **search: Any) -> None:
        self.outbox = Outbox(
            database,
            destinations=[Destination("search", "https://search.example/index", **SLOW | search), *others],
            routes=[Route("*", to="search")],
        )
        self.handled: list[Event] = []
        self.outbox.handler("order.*", name="on_order", **SLOW)(self.handled.append)
        self.url = database
        self.engine = engine(database)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        if self.is_sqlite:
            # Left to itself, the driver begins no transaction before a savepoint.
            sa.event.listen(self.engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
            sa.event.listen(self.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))

    def emit(self, *ids: int, type_: str = "order.paid", **options: Any) -> None:
        with Session(self.engine) as session, session.begin():
            for id_ in ids:
                self.outbox.emit(session, "Order", id_, type_, {"n": id_}, **options)


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, migrated_database: Migrated) -> Shop:
    return Shop(migrated_database(request.param))


@pytest.fixture
def probe(shop: Shop) -> Iterator[OutboxProbe]:
    probe = OutboxProbe(shop.outbox)
    with probe.installed():
        yield probe


def test_an_event_is_found_with_all_that_was_emitted(shop: Shop, probe: OutboxProbe) -> None:
    shop.emit(1, headers={"trace": "x"}, tenant="acme", idempotency_key="once")
    [event] = probe.assert_emitted("order.paid", aggregate_id=1, payload={"n": 1}, headers={"tenant": "acme"})
    assert (event.type, event.aggregate_type, event.aggregate_id) == ("order.paid", "Order", "1")
    assert (event.payload, event.headers) == ({"n": 1}, {"trace": "x", "tenant": "acme"})
    assert event.idempotency_key == "once"
    assert event.statuses == {"search": "pending", "on_order": "pending"}
    assert event.destinations == ("search", "on_order")
    assert event.created_at.tzinfo is not None


def test_payloads_of_bytes_are_found(shop: Shop, probe: OutboxProbe) -> None:
    with Session(shop.engine) as session, session.begin():
        shop.outbox.emit(session, "File", "a", "file.stored", b"\x00\xff")
    probe.assert_emitted(payload=b"\x00\xff")


def test_only_what_the_test_itself_emitted_counts(shop: Shop) -> None:
    for number in range(20):
        shop.emit(number)
        OutboxProbe(shop.outbox).refute_emitted()
    probe = OutboxProbe(shop.outbox)
    shop.emit(20, 21)
    assert [event.aggregate_id for event in probe.assert_emitted(count=2)] == ["20", "21"]


def test_what_an_open_transaction_emitted_before_the_test_does_not_count(shop: Shop) -> None:
    with Session(shop.engine) as session:
        shop.outbox.emit(session, "Order", 1, "order.paid", {})
        if shop.is_sqlite:
            # Its clock has milliseconds.
            time.sleep(0.002)
        probe = OutboxProbe(shop.outbox)
        shop.outbox.emit(session, "Order", 2, "order.paid", {})
        [event] = probe.assert_emitted(session=session)
        assert event.aggregate_id == "2"


def test_an_open_transaction_is_seen_through_its_session_alone(shop: Shop, probe: OutboxProbe) -> None:
    with shop.engine.connect() as connection, connection.begin() as outer:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            shop.outbox.emit(session, "Order", 1, "order.paid", {"n": 1})
            session.commit()
            probe.assert_emitted("order.paid", session=session, count=1)
            probe.assert_emitted("order.paid", session=connection, count=1)
            shop.outbox.emit(session, "Order", 2, "order.paid", {})
            session.rollback()
            probe.refute_emitted(session=session, aggregate_id=2)
        probe.refute_emitted()
        with pytest.raises(AssertionError) as raised:
            probe.assert_emitted("order.paid")
        outer.rollback()
    assert str(raised.value).splitlines() == [
        "no event was emitted that is: order.paid",
        "nothing is committed that was emitted since the test began",
        "hint: another connection does not see what an open transaction emitted: commit it, or pass session=,"
        " a session or connection to look through",
    ]
    probe.refute_emitted()


async def test_asynchronous_sessions_are_looked_through(shop: Shop, probe: OutboxProbe) -> None:
    asynchronous = create_async_engine(async_url(shop.url))
    async with AsyncSession(asynchronous) as session:
        await shop.outbox.aemit(session, "Order", 1, "order.paid", {"n": 1})
        await probe.aassert_emitted("order.paid", session=session, aggregate_id=1)
        await probe.aassert_emitted("order.paid", session=await session.connection())
        await probe.arefute_emitted("order.shipped", session=session)
        await probe.arefute_emitted()
        with pytest.raises(AssertionError, match=r"no event was emitted that is: order\.shipped"):
            await probe.aassert_emitted("order.shipped", session=session)
        with pytest.raises(AssertionError, match="1 event emitted that should not be"):
            await probe.arefute_emitted("order.*", session=session)
        with pytest.raises(UnsupportedConnection, match="AsyncSession is asynchronous: await the"):
            probe.assert_emitted(session=session)
        await session.commit()
    await asynchronous.dispose()
    await probe.aassert_emitted("order.paid")
    probe.assert_emitted("order.paid")
    with pytest.raises(UnsupportedConnection, match="Session is synchronous: call the method without"):
        await probe.aassert_emitted(session=Session(shop.engine))


def test_recorded_events_are_seen_because_the_session_is_flushed(shop: Shop, probe: OutboxProbe) -> None:
    class Base(DeclarativeBase):
        pass

    class Order(EventSource, Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    Base.metadata.create_all(shop.engine)
    with Session(shop.engine) as session:
        order = Order()
        shop.outbox.attach(session).add(order)
        order.record("order.placed", {"total": 42})
        probe.assert_emitted("order.placed", aggregate_id=1, session=session)


def test_copies_that_nobody_emitted_do_not_count(migrated_database: Migrated) -> None:
    grave = Destination("grave", "https://grave.example")
    shop = Shop(migrated_database("sqlite"), grave, dead_letter="grave")
    probe = OutboxProbe(shop.outbox)
    shop.emit(1, destinations=["search"])
    probe.fail_next("search", Reject("no"))
    with probe.installed():
        assert probe.drain().failed == 1
        probe.drain()
    assert len(probe.sent("grave")) == 1
    [event] = probe.assert_emitted(count=1)
    assert event.statuses == {"search": "failed"}
    probe.refute_emitted(destination="grave")


def test_a_drivers_own_connection_is_looked_through(shop: Shop, probe: OutboxProbe) -> None:
    with shop.engine.connect() as connection:
        driver = connection.connection.driver_connection
        shop.outbox.emit(connection, "Order", 1, "order.paid", {})
        probe.assert_emitted("order.paid", session=driver, count=1)
        connection.rollback()


def test_a_drain_delivers_and_nothing_leaves(shop: Shop, probe: OutboxProbe) -> None:
    shop.emit(1, 2)
    shop.emit(3, type_="invoice.sent")
    assert probe.drain() == Drained(delivered=5)
    assert [event.payload for event in probe.sent("search")] == [{"n": 1}, {"n": 2}, {"n": 3}]
    # In threads, and so in any order.
    assert sorted(event.payload["n"] for event in shop.handled) == [1, 2]
    assert {event.id for event in probe.sent("on_order")} == {event.id for event in shop.handled}
    [event] = probe.assert_emitted(aggregate_id=1)
    assert event.statuses == {"search": "delivered", "on_order": "delivered"}


async def test_every_relay_of_the_outbox_sends_as_the_test_says(shop: Shop, probe: OutboxProbe) -> None:
    shop.emit(1)
    probe.fail_next("on_order", Retry("later"))
    await shop.outbox.adrain()
    assert (len(probe.sent("search")), len(shop.handled)) == (1, 0)
    with pytest.raises(ConfigError, match=r"inside a running event loop: write `await outbox.adrain\(\)`"):
        probe.drain()
    assert await probe.adrain(ignore_backoff=True) == Drained(delivered=1)


@on_sqlite
def test_afterwards_the_outbox_is_as_it_was(shop: Shop) -> None:
    with OutboxProbe(shop.outbox).installed():
        assert shop.outbox._sink_of is not None
    assert shop.outbox._sink_of is None


@on_sqlite
@pytest.mark.parametrize(
    ("trouble", "drained", "error"),
    [
        (503, Drained(retried=1), "503 Service Unavailable"),
        (500, Drained(retried=1), "500 Internal Server Error"),
        (422, Drained(failed=1), "422 Unprocessable"),
        (Retry("busy"), Drained(retried=1), "busy"),
        (Reject("no"), Drained(failed=1), "no"),
        (Reject, Drained(failed=1), "rejected"),
        (Unavailable("away"), Drained(retried=1), "away"),
        (ValueError("oops"), Drained(retried=1), "ValueError: oops"),
        (ZeroDivisionError, Drained(retried=1), "ZeroDivisionError"),
        (SystemExit(3), Drained(retried=1), "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("destination", ["search", "on_order"])
def test_a_delivery_fails_as_requested(
    shop: Shop, probe: OutboxProbe, destination: str, trouble: Any, drained: Drained, error: str
) -> None:
    shop.emit(1, destinations=[destination])
    probe.fail_next(destination, trouble)
    assert probe.drain() == drained
    assert probe.sent(destination) == []
    event = shop.outbox.tables.event.c
    with shop.engine.connect() as connection:
        assert connection.scalars(sa.select(event.error_message)).one().startswith(error)


def test_the_next_so_many_deliveries_fail_and_then_no_more(shop: Shop, probe: OutboxProbe) -> None:
    shop.emit(1, 2, 3, destinations=["search"])
    probe.fail_next("search", 500)
    probe.fail_next("search", Reject("no"), times=1)
    assert probe.drain() == Drained(delivered=1, retried=1, failed=1)
    assert [event.payload["n"] for event in probe.sent("search")] == [3]
    assert probe.drain().delivered == 0
    assert probe.drain(ignore_backoff=True) == Drained(delivered=1)
    assert [event.attempt for event in probe.sent("search")] == [1, 2]


def test_each_drain_without_backoff_is_one_more_attempt(shop: Shop, probe: OutboxProbe) -> None:
    shop.emit(1, destinations=["search"], max_attempts=3)
    probe.fail_next("search", 500, times=5)
    assert probe.drain() == Drained(retried=1)
    assert probe.drain(ignore_backoff=True) == Drained(retried=1)
    assert probe.drain(ignore_backoff=True) == Drained(failed=1)
    assert probe.assert_emitted()[0].statuses == {"search": "failed"}


def test_an_open_circuit_is_reported_and_can_be_passed_or_cleared(shop: Shop, probe: OutboxProbe) -> None:
    shop.emit(*range(8), destinations=["search"])
    probe.fail_next("search", 503, times=5)
    drained = probe.drain()
    assert drained.retried >= 5
    assert drained.held == {"search": "circuit open: 503 Service Unavailable"}
    assert probe.drain().held == {"search": "circuit open: 503 Service Unavailable"}
    assert probe.drain(ignore_backoff=True).held == {}
    assert len(probe.sent("search")) == 8
    shop.emit(9, destinations=["search"])
    probe.fail_next("search", 410)
    assert probe.drain().held == {"search": "paused: 410 Gone"}
    probe.clear()
    probe.refute_emitted()
    shop.emit(10, destinations=["search"])
    assert probe.drain() == Drained(delivered=1)


async def test_clear_is_for_asynchronous_tests_too(shop: Shop, probe: OutboxProbe) -> None:
    shop.emit(1, idempotency_key="once")
    await probe.aclear()
    await probe.arefute_emitted()
    shop.emit(1, idempotency_key="once")
    await probe.aassert_emitted(idempotency_key="once")
    assert shop.outbox.migrate() == []


@on_sqlite
def test_a_function_can_be_captured_instead_of_called(shop: Shop, probe: OutboxProbe) -> None:
    sink = probe.capture("on_order")
    shop.emit(1)
    assert probe.drain().delivered == 2
    assert [event.payload for event in sink.events] == [{"n": 1}]
    assert shop.handled == []
    assert probe.capture("search").events == probe.sent("search")


@on_sqlite
def test_a_drain_that_found_nothing_says_what_it_cannot_see(shop: Shop, probe: OutboxProbe) -> None:
    drained = probe.drain()
    assert (drained.delivered, drained.retried, drained.failed) == (0, 0, 0)
    assert "does not see what an open transaction emitted: commit it first" in drained.note


def test_what_is_deleted_on_delivery_is_hinted_at(migrated_database: Migrated) -> None:
    shop = Shop(migrated_database("sqlite"), retention=0)
    probe = OutboxProbe(shop.outbox)
    shop.emit(1, destinations=["search"])
    with probe.installed():
        probe.drain()
    with pytest.raises(AssertionError, match=r"look before drain\(\), or at outbox.sent\('search'\)"):
        probe.assert_emitted("order.paid")


@on_sqlite
def test_slips_are_refused(shop: Shop, probe: OutboxProbe) -> None:
    with pytest.raises(UnknownDestination, match="no destination is called 'serach'; did you mean 'search'"):
        probe.fail_next("serach", 503)
    with pytest.raises(UnknownDestination):
        probe.refute_emitted(destination="serach")
    with pytest.raises(UnknownDestination):
        probe.sent("serach")
    with pytest.raises(UnknownDestination):
        OutboxProbe(shop.outbox, real=["serach"])
    for trouble in (200, 99, 1000, True):
        with pytest.raises(ConfigError, match="is not an HTTP status of a failure, such as 503"):
            probe.fail_next("search", trouble)
    with pytest.raises(ConfigError, match="'503' is neither an HTTP status nor an exception"):
        probe.fail_next("search", "503")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="times=0: give 1 or more"):
        probe.fail_next("search", 503, times=0)
    with pytest.raises(TypeError, match="aggregateid"):
        probe.assert_emitted("order.paid", aggregateid=1)  # type: ignore[call-arg]


def test_a_database_in_memory_is_looked_at_through_the_session() -> None:
    memory = engine("sqlite://", poolclass=sa.StaticPool)
    outbox = Shop("sqlite://").outbox
    outbox.tables.event.metadata.create_all(memory)
    probe = OutboxProbe(outbox)
    with Session(memory) as session:
        outbox.emit(session, "Order", 1, "order.paid", {})
        probe.assert_emitted("order.paid", session=session)
        for look in (probe.assert_emitted, probe.drain, probe.clear):
            with pytest.raises(ConfigError, match="in memory, where no other connection sees it"):
                look()  # type: ignore[operator]
    memory.dispose()


@on_sqlite
def test_a_locked_file_is_explained(shop: Shop, probe: OutboxProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaybox.database.pools.sqlite.PATIENCE", 0.1)
    monkeypatch.setattr("relaybox.database.connect.BUSY", 0.1)
    with Session(shop.engine) as session:
        shop.outbox.emit(session, "Order", 1, "order.paid", {})
        for call in (probe.drain, probe.clear):
            with pytest.raises(StoreError, match="locked") as raised:
                call()
            assert "commit it, or roll it back" in raised.value.__notes__[0]


@pytest.mark.parametrize(("state", "held"), [("open", "circuit open: busy"), ("paused", "paused: busy")])
def test_a_drain_says_what_holds_a_destination_up_without_another_claim(state: str, held: str) -> None:
    tally = Tally()
    tally.circuit("search", state, "busy")
    assert tally.drained == Drained(held={"search": held})
    tally.circuit("search", "closed", "")
    assert tally.drained.held == {}
