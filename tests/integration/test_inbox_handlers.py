"""``@outbox.handler(..., once=True)``: handler and mark in one transaction of the outbox's database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from relaybox import Destination, Event, Outbox, Reject
from relaybox.emit.wakes.open import open_bell
from relaybox.errors import ConfigError
from relaybox.operate.open_relay import open_relay
from relaybox.receive import once_handler as handler
from relaybox.sinks import handler as handlers
from tests.databases import EVERY_KIND
from tests.integration.shop import Shop
from tests.waiting import PATIENCE, await_for

EVENTS = 5

effect = sa.Table("effect", sa.MetaData(), sa.Column("n", sa.Integer))


class Books:
    """A shop whose handlers write into a table of their own."""

    def __init__(self, url: str) -> None:
        self.shop = Shop(url)
        self.outbox = self.shop.outbox
        self.calls: list[int] = []
        self.trouble: list[Exception] = []
        effect.metadata.create_all(self.shop.engine)

    def register(self, asynchronous: bool, write: Any = None, base: str = "1ms") -> None:
        write = write or self.write

        async def awrite(event: Event, connection: AsyncConnection) -> None:
            await connection.run_sync(lambda inner: write(event, inner))

        options: dict[str, Any] = {"name": "books", "once": True, "backoff": {"base": base, "jitter": 0}}
        self.outbox.handler("*", **options)(awrite if asynchronous else write)

    def write(self, event: Event, connection: sa.Connection) -> None:
        self.calls.append(event.payload["n"])
        connection.execute(sa.insert(effect).values(n=event.payload["n"]))
        if self.trouble:
            raise self.trouble.pop()

    async def deliver(self, count: int) -> None:
        self.shop.emit(count)
        await self.outbox.adrain()

    def leased_until(self) -> Any:
        with self.shop.engine.connect() as connection:
            return connection.scalar(sa.text("SELECT leased_until FROM outbox_event"))

    def effects(self) -> list[int]:
        with self.shop.engine.connect() as connection:
            return sorted(connection.scalars(sa.select(effect.c.n)))

    def marks(self) -> list[str]:
        with self.shop.engine.connect() as connection:
            return list(connection.scalars(sa.select(self.outbox.tables.inbox.c.consumer)))

    def deliver_again(self) -> None:
        """Deliver again, as if the relay had died before it could record the delivery."""
        event = self.outbox.tables.event
        again = {"status": "pending", "delivered_at": None, "next_attempt_at": event.c.created_at}
        with self.shop.engine.begin() as connection:
            connection.execute(sa.update(event).values(**again))


@pytest.fixture(params=EVERY_KIND)
def books(request: pytest.FixtureRequest, migrated_database: Callable[[str], str]) -> Books:
    return Books(migrated_database(request.param))


ASYNCHRONOUS = pytest.mark.parametrize("asynchronous", [False, True], ids=["def", "async def"])


@ASYNCHRONOUS
async def test_a_delivery_that_comes_again_is_acknowledged_without_a_call(
    books: Books, asynchronous: bool
) -> None:
    books.register(asynchronous)
    await books.deliver(EVENTS)
    assert books.effects() == sorted(books.calls) == list(range(EVENTS))
    assert books.marks() == ["books"] * EVENTS
    books.deliver_again()
    await books.outbox.adrain()
    assert books.shop.states() == {"delivered": EVENTS}
    assert books.effects() == sorted(books.calls) == list(range(EVENTS))


@ASYNCHRONOUS
async def test_what_a_handler_wrote_goes_with_its_failure_and_the_next_attempt_does_it(
    books: Books, asynchronous: bool
) -> None:
    books.register(asynchronous)
    books.trouble = [ZeroDivisionError("no luck")]
    books.shop.emit(1)

    async def delivered() -> bool:
        await books.outbox.adrain()
        done = books.shop.states() == {"delivered": 1}
        assert done or (books.effects(), books.marks()) == ([], [])
        return done

    await await_for(delivered, "delivered")
    assert books.calls == [0, 0]
    assert (books.effects(), books.marks()) == ([0], ["books"])
    assert [row[1:] for row in books.shop.rows()] == [(2, "ZeroDivisionError: no luck")]


async def test_a_rejection_rolls_back_too(books: Books) -> None:
    books.register(asynchronous=True)
    books.trouble = [Reject("never")]
    await books.deliver(1)
    assert books.shop.states() == {"failed": 1}
    assert (books.effects(), books.marks()) == ([], [])


# One database is enough


@pytest.fixture
def postgres(migrated_database: Callable[[str], str]) -> Books:
    return Books(migrated_database("postgresql-18"))


async def test_a_handler_of_one_argument_gets_the_event_only(postgres: Books) -> None:
    seen = []

    @postgres.outbox.handler("*", name="one", once=True)
    def one(event: Event) -> None:
        seen.append(event.payload["n"])

    @postgres.outbox.handler("*", name="other", once=True)
    async def other(event: Event) -> None:
        seen.append(event.payload["n"])

    await postgres.deliver(1)
    assert seen == [0, 0]
    assert sorted(postgres.marks()) == ["one", "other"]


async def test_no_connection_is_left_behind(postgres: Books) -> None:
    postgres.register(asynchronous=False)
    postgres.outbox.handler("*", name="other", once=True)(_nothing)
    await postgres.deliver(20)
    count = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
    # Within one transaction the server would tell the same again and again.
    engine = postgres.shop.engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        await await_for(lambda: connection.scalar(count) == 1, "the connections closed")
    assert postgres.shop.states() == {"delivered": 40}


async def _nothing(event: Event, connection: AsyncConnection) -> None:
    assert connection.in_transaction()


async def test_a_call_that_is_late_is_delivered_when_it_returns(postgres: Books) -> None:
    """The delivery stays with it, however often its lease would have run out."""
    calls, go_on = [], asyncio.Event()
    loop = asyncio.get_running_loop()

    @postgres.outbox.handler("*", name="slow", once=True, timeout="10ms", lease="1s")
    def slow(event: Event, connection: sa.Connection) -> None:
        calls.append(event.payload["n"])
        connection.execute(sa.insert(effect).values(n=event.payload["n"]))
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(PATIENCE)

    postgres.shop.emit(1)
    async with postgres.outbox.relay():
        for _ in range(2):
            until = await await_for(postgres.leased_until, "a lease")
            await await_for(lambda until=until: postgres.leased_until() != until, "an extension")
        go_on.set()
        await await_for(lambda: postgres.shop.states() == {"delivered": 1}, "delivered")
    assert calls == [0]
    assert postgres.shop.rows()[0][1] == 1
    assert postgres.effects() == [0]


async def test_calls_that_were_given_up_leave_connections_for_others(
    postgres: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "LEAST", 0.2)
    go_on, left = threading.Event(), list[threading.Thread]()

    @postgres.outbox.handler("*", name="slow", once=True, timeout="10ms", concurrency=1)
    def slow(event: Event, connection: sa.Connection) -> None:
        if event.payload["n"] < 2:
            left.append(threading.current_thread())
            go_on.wait(PATIENCE)

    postgres.shop.emit(3)
    async with postgres.outbox.relay():
        try:
            await await_for(lambda: postgres.shop.states() == {"failed": 2, "delivered": 1}, "delivered")
        finally:
            go_on.set()
            for thread in left:
                await asyncio.to_thread(thread.join, PATIENCE)


async def test_a_plain_function_that_returns_an_awaitable_is_refused(postgres: Books) -> None:
    @postgres.outbox.handler("*", name="late", once=True)
    def late(event: Event, connection: Any) -> Any:
        return _nothing(event, connection)

    await postgres.deliver(1)
    [(status, _, error)] = postgres.shop.rows()
    assert (status, postgres.marks()) == ("failed", [])
    assert "write async def" in str(error)


@ASYNCHRONOUS
async def test_a_handler_that_commits_by_itself_is_reported_and_has_its_effect_once(
    postgres: Books, asynchronous: bool
) -> None:
    def commit(event: Event, connection: sa.Connection) -> None:
        connection.execute(sa.insert(effect).values(n=event.payload["n"]))
        connection.commit()

    postgres.register(asynchronous, commit, "1h")
    await postgres.deliver(1)
    [(status, attempts, error)] = postgres.shop.rows()
    assert (status, attempts) == ("pending", 1)
    assert "inside the block of once" in str(error)
    postgres.deliver_again()
    await postgres.outbox.adrain()
    assert postgres.shop.states() == {"delivered": 1}
    assert postgres.effects() == [0]


def test_only_a_function_can_run_once() -> None:
    with pytest.raises(ConfigError, match=r"'runner': once = True: only functions"):
        Destination("runner", "https://example.org/", once=True)
    with pytest.raises(ConfigError, match="write true or false"):
        Outbox("sqlite://").handler("*", once="yes")(print)


def test_mariadb_without_a_synchronous_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "find_spec", lambda name: None)
    outbox = Outbox("mysql://localhost/x", notify=False)
    outbox.handler("*", name="books", once=True)(lambda event: None)
    with pytest.raises(ConfigError, match=r"'books': once = true.*PyMySQL or mysqlclient"):
        outbox.relay()


async def test_a_function_that_is_not_there_leaves_the_others_running(
    migrated_database: Callable[[str], str],
) -> None:
    url, skipped = migrated_database("sqlite"), []
    missing = Destination("missing", "handler:nowhere:nothing", once=True)
    outbox = Outbox(url, destinations=[missing, Destination("there", "memory:")], routes=[])
    parts = (outbox.settings, outbox.tables, outbox.handlers, open_bell(outbox.settings))
    open_relay(*parts, patience=1.0, left_out=lambda name, error: skipped.append(name))
    assert skipped == ["missing"]


def test_where_a_later_sink_refuses_nothing_was_opened_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in ("create_engine", "create_async_engine"):
        owner = handler.sa if name == "create_engine" else handler
        monkeypatch.setattr(owner, name, lambda *_, **__: made.append("engine"))
    once = [Destination(name, f"handler:{name}", once=True) for name in ("books", "more")]
    outbox = Outbox(
        "sqlite://",
        destinations=[*once, Destination("refusing", "kafka://127.0.0.1/{nonsense}")],
        handlers={"books": lambda event: None, "more": _nothing},
        notify=False,
    )
    before = threading.active_count()
    with pytest.raises(ConfigError, match="nonsense"):
        outbox.relay()
    assert made == []
    assert threading.active_count() == before
