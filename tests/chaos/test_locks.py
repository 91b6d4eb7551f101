"""A stranger holds locks: rows in flight, or the whole table, while a relay is at work.

The neighbours, the heartbeats and the other rows go on while the lock is held; so the order of events says
it. How long they take is asserted where RELAYBOX_BOUNDS is set: the machine is then the test's alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox import Event
from relaybox.relay.observer import Observer
from tests.databases import SERVERS, engine
from tests.integration.shop import MEMBERSHIP, SOON, Databases, Shop
from tests.waiting import await_for

BOUNDS = "RELAYBOX_BOUNDS" in os.environ
HOLDS = 25.0 if BOUNDS else 0.0  # Seconds for which rows are locked at least
NEIGHBOUR_P99 = 1.0
LOCK_WAIT = 2.0  # Seconds for which a statement waits for a lock
CONNECTIONS = 6  # What ``Outbox.relay`` documents, with the one that it has for a moment
OPTIONS: dict[str, Any] = {"poll_interval": "100ms", "lease": "30s"}
EVENTS = 40
PACE = 0.02
"""Seconds between two events: the test measures how long they wait, not how many a machine can take."""
KEYS = 1_000_000
"""More than there are events, so that none waits for the locked row of its own key."""

SESSIONS = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid() AND application_name = 'relay'",
    # Of MariaDB the relay has another user's name.
    "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE()"
    " AND id <> CONNECTION_ID() AND user = 'relay'",
}
TABLE_LOCKS = {
    "postgresql": ("LOCK TABLE outbox_event IN SHARE MODE", "SELECT 1"),
    "mariadb": ("LOCK TABLES outbox_event READ", "UNLOCK TABLES"),
}


class Troubles(Observer):
    """Counts what a relay could not do."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        self.met[doing] += 1


class Stage:
    """Two destinations whose rows are locked, and a neighbour."""

    def __init__(self, url: str) -> None:
        self.shop = Shop(url)
        self.taken: Counter[tuple[str, int]] = Counter()
        self.late: defaultdict[str, list[float]] = defaultdict(list)
        self.troubles = Troubles()
        self.begun: set[str] = set()
        self.go_on = asyncio.Event()
        for name in ("one", "two"):
            self._handle("order.paid", name)
        self._handle("order.sent", "neighbour")

    def _handle(self, event_type: str, name: str) -> None:
        @self.shop.outbox.handler(event_type, name=name, ordered=name == "two", **OPTIONS)
        async def take(event: Event) -> None:
            n = event.payload["n"]
            self.taken[name, n] += 1
            self.late[name].append(time.time() - event.created_at.timestamp())
            if (event_type, n) == ("order.paid", 0):
                self.begun.add(name)
                await self.go_on.wait()

    @asynccontextmanager
    async def locked_rows(self) -> AsyncIterator[None]:
        event = self.shop.outbox.tables.event.c
        first = sa.select(event.id).where(event.event_type == "order.paid").order_by(event.position).limit(2)
        with self.shop.transaction() as stranger:
            ids = stranger.scalars(first).all()
            lock = sa.select(event.id).where(event.id.in_(ids)).with_for_update()
            await asyncio.to_thread(stranger.execute, lock)
            yield

    @asynccontextmanager
    async def locked_table(self) -> AsyncIterator[None]:
        lock, unlock = TABLE_LOCKS[self.shop.engine.url.get_backend_name()]
        with self.shop.transaction() as stranger:
            # In a thread: the relay, whose transactions this waits for, is in the test's own loop.
            await asyncio.to_thread(stranger.exec_driver_sql, lock)
            yield
            stranger.exec_driver_sql(unlock)

    def delivered(self, destination: str) -> int:
        return self.shop.states(destination).get("delivered", 0)

    def seen_at(self) -> datetime:
        with self.shop.engine.connect() as connection:
            [seen] = connection.scalars(sa.select(self.shop.outbox.tables.relay.c.seen_at)).all()
        return seen  # type: ignore[no-any-return]

    async def beats(self, count: int) -> None:
        for _ in range(count):
            last = await asyncio.to_thread(self.seen_at)
            await await_for(lambda last=last: self.seen_at() != last, "a heartbeat")  # type: ignore[misc]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEMBERSHIP, "interval", SOON)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kind", SERVERS)
async def test_rows_that_a_stranger_has_locked_hold_up_nothing_else(
    kind: str, migrated_database: Databases, record_property: Callable[[str, object], None]
) -> None:
    stage = Stage(migrated_database(kind))
    shop, n = stage.shop, 1
    async with shop.outbox.relay(observers=[stage.troubles]):
        shop.emit(1)
        await await_for(lambda: stage.begun == {"one", "two"}, "both are being sent")
        async with stage.locked_rows():
            stage.go_on.set()
            stage.late.clear()
            ends = time.monotonic() + HOLDS
            while n <= EVENTS or time.monotonic() < ends:
                for event_type in ("order.paid", "order.sent"):
                    await asyncio.to_thread(shop.emit, 1, first=n, keys=KEYS, event_type=event_type)
                n += 1
                await asyncio.sleep(PACE)
            for name, count in (("neighbour", n - 1), ("one", n - 1), ("two", n - 1)):
                await await_for(
                    lambda name=name, count=count: stage.delivered(name) == count,  # type: ignore[misc]
                    f"all of {name!r} but the locked row, while it is locked",
                )
            await stage.beats(3)
            await await_for(lambda: stage.troubles.met["settle"] >= 2, "both settles have met the lock")
            assert stage.delivered("one") == stage.delivered("two") == n - 1
        await await_for(lambda: "pending" not in shop.states(), "the rows that were locked")
    assert set(stage.taken.values()) == {1}, "nothing is sent twice: no lease has ended"
    p99 = {name: sorted(late)[int(len(late) * 0.99) - 1] for name, late in stage.late.items()}
    record_property("p99 beside locked rows", {name: round(seconds, 3) for name, seconds in p99.items()})
    if BOUNDS:
        assert p99["neighbour"] < NEIGHBOUR_P99
        # On MariaDB a settle that waits for a locked row holds the row of its destination.
        assert max(p99.values()) < NEIGHBOUR_P99 + LOCK_WAIT


@contextmanager
def as_relay(url: str) -> Iterator[tuple[str, Callable[[], int]]]:
    """Return the URL by which a relay's connections are known, and what counts them."""
    made = sa.make_url(url)
    watcher = engine(url, poolclass=sa.StaticPool, isolation_level="AUTOCOMMIT")
    kind = made.get_backend_name()
    if kind == "postgresql":
        ours = made.update_query_dict({"application_name": "relay"})
    else:
        with watcher.connect() as connection:
            user = f"relay@'%%' IDENTIFIED BY '{made.password}'"
            connection.exec_driver_sql(f"CREATE USER IF NOT EXISTS {user}")
            connection.exec_driver_sql(f"GRANT ALL ON `{made.database}`.* TO relay@'%%'")
        ours = made.set(username="relay")

    def count() -> int:
        with watcher.connect() as connection:
            return int(connection.exec_driver_sql(SESSIONS[kind]).scalar_one())

    try:
        yield ours.render_as_string(hide_password=False), count
    finally:
        watcher.dispose()


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kind", SERVERS)
async def test_a_table_that_a_stranger_has_locked_costs_no_connection(
    kind: str, migrated_database: Databases, record_property: Callable[[str, object], None]
) -> None:
    """Every claim, settle and extension waits, again and again; the heartbeats go on."""
    url = migrated_database(kind)
    with as_relay(url) as (ours, count):
        stage = Stage(ours)
        stage.shop.engine = engine(url)
        shop, most = stage.shop, 0

        def looked() -> bool:
            nonlocal most
            most = max(most, count())
            return stage.troubles.met["settle"] >= 2 and stage.troubles.met["claim"] >= 3

        async with shop.outbox.relay(observers=[stage.troubles]):
            shop.emit(EVENTS, keys=KEYS)
            shop.emit(EVENTS, keys=KEYS, event_type="order.sent")
            await await_for(lambda: stage.begun == {"one", "two"}, "both are being sent")
            # On MariaDB a claim that finds nothing due needs no lock.
            soon = datetime.now(UTC) + timedelta(seconds=1)
            shop.emit(EVENTS, keys=KEYS, first=EVENTS, event_type="order.sent", deliver_at=soon)
            async with stage.locked_table():
                stage.go_on.set()
                await await_for(
                    looked, lambda: f"settles and claims that met the lock, beyond {stage.troubles.met}"
                )
                await stage.beats(3)
            await await_for(lambda: "pending" not in shop.states(), "everything is delivered afterwards")
    record_property("connections beside a locked table", most)
    assert 0 < most <= CONNECTIONS
    assert set(stage.taken.values()) == {1}, "nothing is sent twice: no lease has ended"
