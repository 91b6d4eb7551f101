"""From committed row to delivered: the relay on real databases, into functions and over HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import defaultdict
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa

from relaybox import Destination, Event, Outbox, Reject, Retry, Unavailable
from relaybox.errors import ConfigError, SchemaError, StoreError
from relaybox.relay.extend import LOOKS
from relaybox.relay.observer import Observer
from relaybox.relay.process import died, this_process
from relaybox.stores.store import Want
from tests.databases import KINDS, POSTGRESQL
from tests.integration.receivers import answer, answering
from tests.integration.shop import QUICK, Databases, Shop, in_order, shop_for
from tests.waiting import PATIENCE, await_for, cancel

SLOW: dict[str, Any] = {"poll_interval": "20ms", "backoff": {"base": "1h", "cap": "1h"}}


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, migrated_database: Databases) -> Shop:
    return Shop(migrated_database(request.param))


async def test_committed_events_arrive_at_asynchronous_and_synchronous_functions(shop: Shop) -> None:
    loop: list[Event] = []
    thread: list[Event] = []

    @shop.outbox.handler("order.*", name="in the loop", **QUICK)
    async def in_the_loop(event: Event) -> None:
        loop.append(event)

    @shop.outbox.handler("order.*", name="in a thread", **QUICK)
    def in_a_thread(event: Event) -> None:
        assert threading.current_thread() is not threading.main_thread()
        thread.append(event)

    shop.emit(30, keys=5)
    with shop.engine.connect() as connection:
        shop.outbox.emit(connection, "Order", 1, "order.paid", {"n": -1})
        connection.rollback()
    await shop.outbox.adrain()
    for events in (loop, thread):
        assert sorted(event.payload["n"] for event in events) == list(range(30))
        found = {(event.type, event.aggregate_type, event.attempt) for event in events}
        assert found == {("order.paid", "Order", 1)}
    assert {event.id for event in loop} == {event.id for event in thread}
    assert {row[0] for row in shop.rows()} == {"delivered"}


async def test_events_of_a_key_arrive_in_order_through_retries(shop: Shop) -> None:
    arrived: list[Event] = []
    failures: dict[Any, int] = defaultdict(int)

    @shop.outbox.handler("order.*", name="on_order", ordered=True, batch_size=7, **QUICK)
    async def handler(event: Event) -> None:
        if event.payload["n"] % 5 == 0 and failures[event.id] < 2:
            failures[event.id] += 1
            raise Retry("not yet")
        arrived.append(event)

    shop.emit(60, keys=4)
    async with shop.outbox.relay():
        await await_for(lambda: len(arrived) >= 60, "60 events")
    assert in_order((event.payload["n"] for event in arrived), keys=4)
    assert {row[0] for row in shop.rows()} == {"delivered"}


async def test_what_a_function_raises_decides(shop: Shop) -> None:
    @shop.outbox.handler("order.*", name="on_order", max_attempts=2, **SLOW)
    async def handler(event: Event) -> None:
        errors = [Reject("no such order"), Retry("busy"), Unavailable("gone fishing"), ValueError("oops")]
        raise errors[event.payload["n"]]

    shop.emit(4)
    await shop.outbox.adrain()
    assert shop.rows() == [
        ("failed", 1, "no such order"),
        ("pending", 1, "busy"),
        ("pending", 0, "gone fishing"),
        ("pending", 1, "ValueError: oops"),
    ]


async def test_attempts_are_used_up_and_then_it_is_failed(shop: Shop) -> None:
    seen: list[int] = []

    @shop.outbox.handler("order.*", name="on_order", max_attempts=3, **QUICK)
    async def handler(event: Event) -> None:
        seen.append(event.attempt)
        raise Retry("busy")

    shop.emit(1)
    async with shop.outbox.relay():
        await await_for(lambda: shop.states() == {"failed": 1}, "the event is failed")
    assert seen == [1, 2, 3]
    assert shop.rows() == [("failed", 3, "busy")]


async def test_a_running_relay_finds_what_is_emitted_while_it_runs(shop: Shop) -> None:
    arrived = shop.collect()
    async with shop.outbox.relay():
        for n in range(3):
            shop.emit(1, first=n)
            await await_for(lambda: arrived[n:], "the next one")  # noqa: B023
    assert {row[0] for row in shop.rows()} == {"delivered"}


async def test_a_relay_that_is_stopped_finishes_what_it_sends(shop: Shop) -> None:
    started, go_on = asyncio.Semaphore(0), asyncio.Event()

    @shop.outbox.handler("order.*", name="on_order", concurrency=3, **QUICK)
    async def handler(event: Event) -> None:
        started.release()
        await go_on.wait()

    shop.emit(5)
    relay = shop.outbox.relay()
    running = asyncio.create_task(relay.run())
    for _ in range(3):
        await started.acquire()
    relay.stop()
    go_on.set()
    await running
    sent, not_begun = [("delivered", 1, None)] * 3, [("pending", 0, None)] * 2
    assert (shop.rows(), shop.leases()) == (sent + not_begun, 0)


def hanging(shop: Shop) -> asyncio.Event:
    """Emit five events to a function that hangs; what is returned is set when it was called."""
    started = asyncio.Event()

    @shop.outbox.handler("order.*", name="on_order", **QUICK)
    async def handler(event: Event) -> None:
        started.set()
        await asyncio.Event().wait()

    shop.emit(5)
    return started


async def test_a_relay_that_is_out_of_patience_gives_back_what_it_holds(shop: Shop) -> None:
    started = hanging(shop)
    relay = shop.outbox.relay(patience=0.05)
    running = asyncio.create_task(relay.run())
    await started.wait()
    relay.stop()
    await running
    assert (shop.rows(), shop.leases()) == ([("pending", 0, None)] * 5, 0)


async def test_a_relay_that_is_cancelled_leaves_its_leases_to_run_out(shop: Shop) -> None:
    started = hanging(shop)
    running = asyncio.create_task(shop.outbox.relay().run())
    await started.wait()
    await cancel(running)
    assert shop.leases() == 5


async def test_one_destination_that_hangs_does_not_hold_up_the_others(shop: Shop) -> None:
    @shop.outbox.handler("order.*", name="hangs", **QUICK)
    async def hangs(event: Event) -> None:
        await asyncio.Event().wait()

    arrived = shop.collect("works")
    shop.emit(200)
    running = asyncio.create_task(shop.outbox.relay().run())
    await await_for(lambda: len(arrived) >= 200, "200 events")
    await cancel(running)


async def test_what_a_dead_relay_held_does_not_hold_up_fresh_events_of_any_lane(shop: Shop) -> None:
    go_on = asyncio.Event()

    @shop.outbox.handler("order.*", name="slow", **QUICK)
    async def slow(event: Event) -> None:
        await go_on.wait()

    fresh = shop.collect("fast")
    shop.emit(3)
    async with shop.store() as store:
        for name in ("slow", "fast"):
            assert len((await store.claim(Want(name, "dead", 100, 0.001))).deliveries) == 3
    async with shop.outbox.relay():
        await await_for(lambda: shop.states("slow") == {"pending": 3}, "the relay looks at what is slow")
        await asyncio.to_thread(shop.emit, 20, first=100)
        await await_for(lambda: set(fresh) >= set(range(100, 120)), "fresh events of the other lane")
        go_on.set()
        await await_for(lambda: shop.states() == {"delivered": 46}, "all of them")
    assert sorted(fresh) == [0, 1, 2, *range(100, 120)]


async def test_one_drain_delivers_what_is_behind_a_suspect_of_its_key(shop: Shop) -> None:
    arrived = shop.collect("on_order", ordered=True)
    shop.emit(200)
    event = shop.outbox.tables.event
    with shop.engine.begin() as connection:
        first = connection.scalar(sa.select(sa.func.min(event.c.position)))
        connection.execute(sa.update(event).where(event.c.position == first).values(crashes=2))
    await shop.outbox.adrain()
    assert arrived == list(range(200))


def test_a_relay_is_known_to_have_died_when_its_process_has_ended() -> None:
    me = this_process().name
    host, pid, tail = me.rsplit(":", 2)
    same_place = tail.partition("-")[0]
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert not died(me)
    assert not died(f"another host:{ended.pid}:{same_place}-00")
    assert not died(f"{host}:{ended.pid}:another container-00")
    assert not died(f"{host}:1:{same_place}-00")
    assert not died("a name of another form")
    assert died(f"{host}:{ended.pid}:{same_place}-00")
    assert died(f"{host}:{pid}:{same_place}-00"), "it had this process's number before"


class Extensions(Observer):
    """Counts how often leases were extended."""

    count = 0

    def extended(self, destination: str, dropped: frozenset[UUID]) -> None:
        self.count += 1


@pytest.mark.filterwarnings("ignore:.*lease 3s is shorter than timeout")
async def test_leases_of_a_slow_function_are_extended(migrated_database: Databases) -> None:
    shop, extensions = Shop(migrated_database("postgresql-18")), Extensions()
    calls = 0

    @shop.outbox.handler("order.*", name="on_order", lease="3s", timeout="60s", poll_interval="20ms")
    async def handler(event: Event) -> None:
        nonlocal calls
        calls += 1
        await await_for(lambda: extensions.count > LOOKS, "longer than a lease")

    shop.emit(200)
    async with shop.outbox.relay(observers=[extensions]):
        await await_for(lambda: shop.states() == {"delivered": 200}, "all of them")
    assert calls == 200
    assert {row[:2] for row in shop.rows()} == {("delivered", 1)}


async def test_events_arrive_over_http_and_a_failing_endpoint_is_tried_again(
    migrated_database: Databases,
) -> None:
    async with answering(answer("500 Oops"), answer("200 OK")) as receiver:
        runner = Destination("runner", receiver.url, ordered=True, allow=["127.0.0.0/8"], **QUICK)
        shop = shop_for(migrated_database("sqlite"), runner)
        shop.emit(1)
        async with shop.outbox.relay():
            await await_for(lambda: shop.states() == {"delivered": 1}, "the event is delivered")
        first, second = receiver.requests
        assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert json.loads(second.body)["data"] == {"n": 0}
        assert shop.rows() == [("delivered", 2, "500 Oops")]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_drain_without_tables_says_what_to_do(kind: str, fresh_database: Databases) -> None:
    outbox = Outbox(fresh_database(kind), destinations=[Destination("runner", "console:")])
    with pytest.raises(SchemaError, match=r"outbox_destination|outbox_event") as raised:
        await outbox.adrain()
    assert str(raised.value).startswith("the tables are missing or too old for this version (")
    assert str(raised.value).endswith("; run `relaybox migrate`, or call outbox.migrate()")
    # For a relay that runs, one more trouble of the database, which may be over in a moment.
    assert isinstance(raised.value, StoreError)


async def tables_are_dropped(shop: Shop) -> bool:
    try:
        await asyncio.to_thread(shop.outbox.tables.event.metadata.drop_all, shop.engine)
    except sa.exc.OperationalError:
        return False
    return True


async def test_a_relay_that_runs_waits_for_its_tables(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    seen = shop.collect()
    async with shop.outbox.relay():
        shop.emit(1)
        await await_for(lambda: len(seen) == 1, "the relay is at work")
        await await_for(lambda: tables_are_dropped(shop), "no deadlock with what the relay is doing")
        trouble = "database  cannot claim, trying again: the tables are missing"
        await await_for(lambda: trouble in caplog.text, "its trouble is logged")
        await shop.outbox.amigrate()
        shop.emit(1, first=1)
        await await_for(lambda: len(seen) == 2, "what was emitted since arrives")
    assert shop.states() == {"delivered": 1}, "the tables are new"


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        ("handler:nowhere:nothing", "register it with @outbox.handler"),
        ("handler:json:missing", "register it with @outbox.handler"),
        ("handler:json:__name__", "is not a function"),
        ("opensearch:///documents", "write host:port"),
    ],
)
def test_a_sink_that_cannot_be_had_is_named_before_anything_starts(sink: str, message: str) -> None:
    outbox = Outbox("sqlite://", destinations=[Destination("runner", sink)])
    with pytest.raises(ConfigError, match="'runner'") as raised:
        outbox.relay()
    assert message in str(raised.value)


DESTINATIONS = 50
ROUNDS = 4
CONNECTIONS = 4
"""Two of the store, one that listens, and for a moment the one that proves that it hears."""
OTHERS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"""


@pytest.mark.full
async def test_the_others_go_on_while_one_hangs_and_take_no_more_connections(
    migrated_database: Databases,
) -> None:
    shop = Shop(migrated_database("postgresql-18"))
    hangs, go_on = asyncio.Event(), asyncio.Event()

    @shop.outbox.handler("*", name="hangs", timeout="10m", lease="10m")
    async def hang(event: Event) -> None:
        hangs.set()
        await go_on.wait()

    taken = {name: shop.collect(name) for name in (f"d{n}" for n in range(1, DESTINATIONS))}
    async with shop.outbox.relay(patience=1):
        for n in range(ROUNDS):
            shop.emit(1, first=n)
            await hangs.wait()
            expected = {name: list(range(n + 1)) for name in taken}
            await await_for(lambda: taken == expected, lambda: f"all of the healthy ones: {taken}")  # noqa: B023
            with shop.engine.connect() as connection:
                assert connection.scalars(sa.text(OTHERS)).one() <= CONNECTIONS
        assert shop.states("hangs") == {"pending": ROUNDS}
        go_on.set()
        await await_for(lambda: shop.states() == {"delivered": ROUNDS * DESTINATIONS}, "all of them")


FORK = """
import asyncio, os, sys
import psycopg
from relaybox import Outbox
from tests.integration.shop import Databases
from tests.databases import POSTGRESQL

url = sys.argv[1]
outbox = Outbox(url)
seen = []

@outbox.handler("order.*", name="in_a_thread")
def in_a_thread(event):
    seen.append(event.payload["n"])

@outbox.handler("order.*", name="in_the_loop", ordered=True)
async def in_the_loop(event):
    seen.append(event.payload["n"])

def emit(n):
    with psycopg.connect(url) as connection:
        with outbox.transaction(connection):
            outbox.emit(connection, "Order", n, "order.paid", {"n": n})

async def relay_until(count):
    async with asyncio.timeout(30), outbox.relay():
        while len(seen) < count:
            await asyncio.sleep(0.01)

emit(0)
outbox.drain()
assert sorted(seen) == [0, 0], seen
asyncio.run(relay_until(2))
child = os.fork()
emit(2 if child else 1)
if not child:
    outbox.drain()
    emit(11)
    outbox.drain()
    os._exit(0)
outbox.drain()
_, status = os.waitpid(child, 0)
assert status == 0, status
emit(22)
outbox.drain()
assert 22 in seen, seen
"""


@pytest.mark.parametrize("kind", POSTGRESQL)
def test_parent_and_child_deliver_side_by_side(kind: str, migrated_database: Databases) -> None:
    url = migrated_database(kind)
    done = subprocess.run(
        [sys.executable, "-c", FORK, url], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT destination, status, attempts, count(*) FROM outbox_event GROUP BY 1, 2, 3 ORDER BY 1"
        ).fetchall()
    assert rows == [("in_a_thread", "delivered", 1, 5), ("in_the_loop", "delivered", 1, 5)]
