"""What stores cost in statements and round trips, and a relay in Python calls and objects.

Statements are counted on the wire, between the store and a real server; no clock is involved.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

from relaybox import Event
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.database.pools import mysql, sqlite
from relaybox.database.schema import Tables
from relaybox.database.statements.delivery import Query
from relaybox.emit.row import Call
from relaybox.stores.ledger import CAP
from relaybox.stores.open import open_mysql, open_postgresql, open_sqlite
from relaybox.stores.store import Claim, DeadLetter, Settlement, Store, Want
from tests.databases import POSTGRESQL
from tests.integration.filled import create_tables, emit
from tests.integration.operated import Operated
from tests.integration.shop import Databases, Shop
from tests.servers import pgbouncer


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
        self.connections = 0
        self.total = Count(0, 0)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Listen; yield the URL to connect to."""
        listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        try:
            plain = {"sslmode": "disable", "gssencmode": "disable"}
            url = self._server.set(port=port, query=plain)
            yield url.render_as_string(hide_password=False)
        finally:
            listener.close()
            while self._tasks:
                tasks, self._tasks = self._tasks, []
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._carry(reader, writer))
        # A task that is cancelled before it begins closes nothing itself.
        task.add_done_callback(lambda _: writer.close())
        self._tasks.append(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connecting = asyncio.create_task(asyncio.open_connection(self._server.host, self._server.port))
        ways: list[asyncio.Task[None]] = []
        try:
            # A connection that comes while this is cancelled must be closed too.
            above, up = await asyncio.shield(connecting)
            ways = [asyncio.create_task(self._up(reader, up)), asyncio.create_task(self._down(above, writer))]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            _, up = await connecting
            up.close()

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


def delivered(claim: Claim) -> list[Settlement]:
    return [Settlement(delivery, Delivered()) for delivery in claim.deliveries]


def mixed(claim: Claim) -> list[Settlement]:
    """Return one outcome of every kind."""
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

    async def settle(self, settlements: list[Settlement], dead_letter: DeadLetter | None = None) -> Count:
        return await self._took_of_held(lambda store: store.settle(settlements, dead_letter=dead_letter))

    async def bury(self, settlements: list[Settlement]) -> Count:
        return await self.settle(settlements, DeadLetter("grave"))

    async def extend(self, deliveries: tuple[Delivery, ...]) -> Count:
        return await self._took_of_held(lambda store: store.extend(deliveries, 60.0))

    async def release(self, deliveries: tuple[Delivery, ...]) -> Count:
        return await self._took_of_held(lambda store: store.release(deliveries))

    async def took(self, operation: Callable[[Store], Awaitable[object]]) -> Count:
        before = self._total()
        await operation(self._store)
        return self._since(before)

    async def _took_of_held(self, operation: Callable[[Store], Awaitable[object]]) -> Count:
        """Count an operation that answers which rows are no longer held."""

        async def on_held(store: Store) -> None:
            assert not await operation(store)

        return await self.took(on_held)

    def _since(self, before: Count) -> Count:
        return Count(*(after - at_first for after, at_first in zip(self._total(), before, strict=True)))


@pytest.fixture
def url(request: pytest.FixtureRequest, migrated_database: Databases) -> str:
    return migrated_database(getattr(request, "param", "postgresql-18"))


each_version = pytest.mark.parametrize("url", POSTGRESQL, indirect=True)


@asynccontextmanager
async def counted_postgres(url: str, tables: Tables) -> AsyncIterator[Counted]:
    wire = Wire(sa.make_url(url))
    async with wire.listening() as through:
        store = open_postgresql(through, tables, connections=1)
        try:
            await store.claim(Want("nobody", "me"))
            await store.vital.run(store.steps.now)
            yield Counted(store, lambda: wire.total)
        finally:
            await store.close()


@pytest.mark.parametrize("limit", [10, 100])
@each_version
async def test_an_operation_on_postgresql_is_one_round_trip(limit: int, url: str) -> None:
    engine, tables = create_tables(url)
    emit(engine, tables, 5 * limit)
    plain = Want("plain", "me", limit=limit, explain=False)
    ordered = Want("keys", "me", limit=limit, ordered=True, explain=False)
    async with counted_postgres(url, tables) as store:
        claim, took = await store.claim(plain)
        assert (len(claim.deliveries), took) == (limit, Count(statements=1, round_trips=1))
        assert await store.extend(claim.deliveries) == Count(1, 1)
        assert await store.settle(delivered(claim)) == Count(1, 1)
        assert await store.settle([]) == Count(0, 0)

        claim, took = await store.claim(ordered)
        assert (len(claim.deliveries), took) == (limit, Count(2, 1)), "the lock comes ahead of the claim"
        assert await store.extend(claim.deliveries) == Count(1, 1)
        assert await store.release(claim.deliveries) == Count(3, 1), "a lock, and heads are made due"
        claim, took = await store.claim(ordered)
        assert await store.settle(delivered(claim)) == Count(3, 1)
        claim, took = await store.claim(ordered)
        assert await store.settle(mixed(claim)) == Count(7, 1), "a lock, and one for each kind"
        claim, took = await store.claim(ordered)
        assert await store.bury(mixed(claim)) == Count(8, 1), "copies of what failed are one more"
        claim, took = await store.claim(plain)
        assert await store.bury(delivered(claim)) == Count(1, 1), "nothing to copy"
        assert (await store.claim(Want("nobody", "me")))[1] == Count(2, 1), "and why there is nothing"


async def test_behind_a_pooler_a_round_trip_says_what_a_session_would_remember(
    url: str, pgbouncer_url: str
) -> None:
    engine, tables = create_tables(url)
    emit(engine, tables, 50)
    async with counted_postgres(pgbouncer.through(pgbouncer_url, url), tables) as store:
        # Around each: BEGIN, the statement that pins the plan, and COMMIT.
        claim, took = await store.claim(Want("plain", "me", limit=10, explain=False))
        assert (len(claim.deliveries), took) == (10, Count(statements=4, round_trips=1))
        assert await store.extend(claim.deliveries) == Count(4, 1)
        assert await store.settle(delivered(claim)) == Count(4, 1)
        claim, took = await store.claim(Want("keys", "me", limit=10, ordered=True, explain=False))
        assert (len(claim.deliveries), took) == (10, Count(5, 1))
        assert await store.settle(delivered(claim)) == Count(6, 1)
        assert (await store.claim(Want("nobody", "me")))[1] == Count(5, 1), "and why there is nothing"


@each_version
async def test_what_relays_share_changes_in_one_round_trip(url: str) -> None:
    _, tables = create_tables(url)
    async with counted_postgres(url, tables) as store:
        # None of these is on the delivery path: each is planned for its own parameters, which one more says.
        for destination in ("plain", "new"):
            assert await store.took(lambda s, to=destination: s.reserve(to, 10, 100.0)) == Count(2, 1)
        assert await store.took(lambda s: s.open_circuit("plain", 0, "503")) == Count(3, 1), "row and state"
        assert await store.took(lambda s: s.probe("plain", 60)) == Count(2, 1)
        assert await store.took(lambda s: s.close_circuit("plain")) == Count(2, 1)
        assert await store.took(lambda s: s.pause("plain", "me", "410")) == Count(3, 1)


@each_version
async def test_the_first_ordered_claim_of_a_destination_makes_its_row(url: str) -> None:
    _, tables = create_tables(url)
    async with counted_postgres(url, tables) as store:
        new = Want("new", "me", ordered=True)
        assert (await store.claim(new))[1] == Count(statements=7, round_trips=3)
        assert (await store.claim(new))[1] == Count(3, 1)


@asynccontextmanager
async def counted_by_statement(
    module: Any, url: str, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Counted]:
    """Open a store of a driver without pipelines, where each statement is a round trip."""
    fetch, total = module._fetch, 0

    def counting(connection: Any, query: Any) -> Any:
        nonlocal total
        total += 1
        return fetch(connection, query)

    monkeypatch.setattr(module, "_fetch", counting)
    store = open_mysql(url, tables) if module is mysql else open_sqlite(sa.make_url(url).database, tables)
    try:
        yield Counted(store, lambda: Count(total, total))
    finally:
        await store.close()


# To settle is one statement more where it cannot return its rows: they are read first.
STATEMENTS = {"mariadb": 2, "sqlite": 1}
LOCKED = {"mariadb": 1, "sqlite": 0}
"""All rows ahead of several kinds of outcomes, where others might lock them in another order."""
EXTEND = {"mariadb": 3, "sqlite": 1}
"""MariaDB reads which rows are held, and which of those nobody has locked."""
LOCK_AND_MAKE_DUE = {"mariadb": 2, "sqlite": 2}
"""MariaDB finds the heads first: an UPDATE that looks for them would lock what others have not committed.
Here none is parked, so there is nothing to update."""


@pytest.mark.parametrize("limit", [10, 100])
@pytest.mark.parametrize(
    ("url", "kind", "module"), [("mariadb", "mariadb", mysql), ("sqlite", "sqlite", sqlite)], indirect=["url"]
)
async def test_the_number_of_statements_does_not_grow_with_the_batch(
    kind: str, module: Any, limit: int, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tables = create_tables(url)
    emit(engine, tables, 5 * limit)
    plain = Want("plain", "me", limit=limit)
    ordered = Want("keys", "me", limit=limit, ordered=True)
    fenced, keyed = STATEMENTS[kind], LOCK_AND_MAKE_DUE[kind]
    async with counted_by_statement(module, url, tables, monkeypatch) as store:
        claim, took = await store.claim(plain)
        assert (len(claim.deliveries), took.statements) == (limit, 4), "look, lock, lease, read"
        assert (await store.extend(claim.deliveries)).statements == EXTEND[kind]
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


PARKED, DUE, LIMIT = 12_000, 100, 20


async def looked_at(operated: Operated) -> int:
    def steps() -> Any:
        return (yield [Query("SHOW SESSION STATUS LIKE 'Handler_icp_attempts'", ())])

    [[[_, count]]] = await operated.store.driver.run(steps)
    return int(count)


def fill(operated: Operated) -> None:
    calls = [
        Call("Order", destinations=("shop",), aggregate_id=number, event_type="order.paid", payload={})
        for number in range(DUE + PARKED)
    ]
    rows = [row for call in calls for row in operated._builder.build(call, operated.dialect).rows]
    with operated.engine.begin() as connection:
        for start in range(0, len(rows), 500):
            query = operated.statements.insert(rows[start : start + 500])
            connection.exec_driver_sql(query.sql, query.params)
        parked = "UPDATE outbox_event SET next_attempt_at = NULL, ordering_key = 'one' WHERE position > %s"
        connection.exec_driver_sql(parked, (DUE,))
        # Drops the entries of what was due before: they stay, and are looked at, while an older transaction
        # is open on the server, such as that of another test.
        connection.exec_driver_sql("OPTIMIZE TABLE outbox_event")


async def test_parked_rows_cost_a_claim_and_a_count_nothing(fresh_database: Databases) -> None:
    """They come first in MariaDB's index of what is due; looking for due ones does not read them."""
    operated = Operated(fresh_database("mariadb"))
    try:
        fill(operated)
        before = await looked_at(operated)
        claim = await operated.claim("shop", limit=LIMIT)
        between = await looked_at(operated)
        stats = await operated.admin.stats()
        after = await looked_at(operated)
    finally:
        await operated.close()
    assert len(claim.deliveries) == LIMIT
    # Of this connection: another test may use the server.
    assert 0 < between - before < 10 * DUE
    assert stats.total.parked == CAP
    assert CAP <= after - between < CAP + 10 * DUE


EVENTS = 1_000
TRIES = 8
"""How long batches become, and how often the loop turns, is a matter of time: one good try is enough."""


class Drained(Shop):
    """A shop whose events go to a handler that does nothing but count them."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url)
        self.emitted = self.handled = 0
        self.outbox.handler("*", name="on_order", **options)(self.take)

    async def take(self, event: Event) -> None:
        self.handled += 1

    def age(self) -> None:
        """Let the events be a day old: young ones of one settle may belong to several buckets of the charts,
        which costs up to five calls each.
        """
        event = self.outbox.tables.event
        with self.engine.begin() as connection:
            connection.execute(sa.update(event).values(created_at=event.c.created_at - timedelta(days=1)))

    async def drain(self, events: int) -> tuple[int, int]:
        """Calls, of functions in Python and in C, and blocks of memory that were not there before."""
        self.emit(events, keys=100, first=self.emitted)
        self.age()
        self.emitted += events
        relay, calls = self.outbox.relay(), 0

        def count(frame: FrameType, what: str, _: Any) -> None:
            nonlocal calls
            calls += what in ("call", "c_call")

        gc.collect()
        before = sys.getallocatedblocks()
        sys.setprofile(count)
        try:
            assert await relay.drain(60) is True
        finally:
            sys.setprofile(None)
        del relay
        gc.collect()
        assert self.handled == self.emitted
        return calls, sys.getallocatedblocks() - before


@pytest.mark.parametrize(
    ("options", "measured"),
    [({"ordered": False}, 39), ({"ordered": False, "retention": 0}, 43), ({"ordered": True}, 41)],
    ids=["kept", "deleted", "ordered"],
)
async def test_an_event_takes_few_calls_and_leaves_nothing_behind(
    options: dict[str, Any], measured: int, url: str
) -> None:
    shop = Drained(url, **options)
    await shop.drain(EVENTS // 4)
    calls, kept = [], []
    while len(calls) < TRIES:
        less, more = await shop.drain(EVENTS), await shop.drain(2 * EVENTS)
        calls.append((more[0] - less[0]) / EVENTS)
        kept.append((more[1] - less[1]) / EVENTS)
        if calls[-1] <= 1.2 * measured and kept[-1] < 0.1:
            break
    assert min(calls) <= 1.2 * measured, f"{calls} calls an event; they were {measured}"
    assert min(kept) < 0.1, f"{kept} objects of each event are still there"


async def test_a_claimed_event_is_few_objects(url: str) -> None:
    shop = Drained(url)
    shop.emit(4 * EVENTS)
    blocks = []
    async with shop.store() as store:
        await store.claim(Want("on_order", "me", limit=1))
        for limit in (EVENTS // 2, EVENTS):
            gc.collect()
            before = sys.getallocatedblocks()
            claim = await store.claim(Want("on_order", "me", limit=limit))
            gc.collect()
            blocks.append(sys.getallocatedblocks() - before)
            assert len(claim.deliveries) == limit
            del claim
    objects = (blocks[1] - blocks[0]) / (EVENTS // 2)
    assert objects <= 14, f"{objects} objects; they were 12.4"
