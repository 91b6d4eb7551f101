"""A drain on real databases: in the time it was given, counted, and with what it sweeps."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox import Destination, Event, Outbox, Reject, Retry
from relaybox.emit.wakes.local import LocalWake
from relaybox.errors import Locked, StoreError
from relaybox.operate.open_relay import open_relay
from relaybox.relay.observer import Observer
from relaybox.relay.relay import Relay
from relaybox.relay.upkeep.schedule import Round
from relaybox.stores.open import open_store
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.sql.upkeep.sweep import SqlSweep
from relaybox.stores.store import Claim, Want
from tests.databases import KINDS
from tests.integration.receivers import doing
from tests.integration.shop import Databases, Shop, shop_for
from tests.waiting import PATIENCE

QUICK: dict[str, Any] = {"poll_interval": "20ms", "backoff": {"base": "1h", "cap": "1h"}}


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, migrated_database: Databases) -> Shop:
    return Shop(migrated_database(request.param))


def made_relay(outbox: Outbox, **parts: Any) -> Relay:
    return open_relay(outbox.settings, outbox.tables, outbox.handlers, outbox._bell, patience=1.0, **parts)


class Troubles(Observer):
    """Remembers what went wrong."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        self.seen.append(doing)


def counted(shop: Shop) -> tuple[int, int, int]:
    """Return how many the statistics count as delivered, retried and failed."""
    stats = shop.outbox.tables.stats.c
    columns = [
        sa.func.coalesce(sa.func.sum(column), 0) for column in (stats.delivered, stats.retried, stats.failed)
    ]
    with shop.engine.connect() as connection:
        delivered, retried, failed = connection.execute(sa.select(*columns)).one()
    return int(delivered), int(retried), int(failed)


async def test_a_drain_whose_time_is_over_gives_back_what_a_hanging_receiver_holds(
    migrated_database: Databases,
) -> None:
    release = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()

    async with doing(hang) as receiver:
        runner = Destination("runner", receiver.url, allow=["127.0.0.0/8"], concurrency=4)
        shop = shop_for(migrated_database("postgresql-18"), runner)
        shop.emit(20)
        # On a busy machine the time may be over before anything is sent.
        for seconds in (0.5, 5, PATIENCE):
            assert await shop.outbox.relay(patience=0.2).drain(seconds) is False
            if receiver.requests:
                break
        assert 1 <= len(receiver.requests) <= 4
        assert shop.leases() == 0
        assert shop.rows() == [("pending", 0, None)] * 20
        release.set()


async def test_drains_that_follow_one_another_deliver_what_one_could_not(shop: Shop) -> None:
    seen: list[int] = []

    @shop.outbox.handler("order.*", name="on_order", concurrency=1, batch_size=5, **QUICK)
    async def handler(event: Event) -> None:
        await asyncio.sleep(0.02)
        seen.append(event.payload["n"])

    shop.emit(30)
    drains = 1
    async with asyncio.timeout(PATIENCE):
        while not await shop.outbox.relay(patience=5).drain(0.2):
            drains += 1
    assert (sorted(seen), shop.states()) == (list(range(30)), {"delivered": 30})
    assert drains > 1


async def test_what_a_drain_does_is_in_the_statistics(shop: Shop) -> None:
    @shop.outbox.handler("order.*", name="on_order", max_attempts=5, **QUICK)
    async def handler(event: Event) -> None:
        match event.payload["n"] % 4:
            case 0:
                raise Retry("later")
            case 1:
                raise Reject("never")

    shop.emit(20)
    await shop.outbox.adrain()
    assert counted(shop) == (10, 5, 5)
    await shop.outbox.adrain()
    assert counted(shop) == (10, 5, 5)


@pytest.mark.parametrize(
    ("part", "method", "doing"), [(SqlUpkeep, "record", "write statistics"), (SqlSweep, "unpark", "sweep")]
)
async def test_upkeep_that_fails_does_not_fail_a_drain(
    shop: Shop, part: type, method: str, doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise StoreError("no room")

    shop.collect()
    monkeypatch.setattr(part, method, refuse)
    shop.emit(3)
    troubles = Troubles()
    assert await shop.outbox.relay(observers=[troubles]).drain(sweep=doing == "sweep") is True
    assert (shop.states(), troubles.seen) == ({"delivered": 3}, [doing])


async def test_a_lock_at_one_destination_does_not_end_the_drain_of_another(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, really_claim = asyncio.Event(), SqlStore.claim

    async def claim(store: SqlStore, want: Want) -> Claim:
        if want.destination == "books":
            met.set()
            raise Locked("a stranger has locked it")
        return await really_claim(store, want)

    async def take(event: Event) -> None:
        await met.wait()

    monkeypatch.setattr(SqlStore, "claim", claim)
    for name in ("books", "papers"):
        shop.outbox.handler("*", name=name, batch_size=1, concurrency=1, **QUICK)(take)
    shop.emit(9)
    with pytest.raises(Locked):
        await shop.outbox.adrain()
    assert shop.column("status", destination="papers") == ["delivered"] * 9


def change(shop: Shop, status: str, **values: Any) -> None:
    event = shop.outbox.tables.event
    with shop.engine.begin() as connection:
        connection.execute(sa.update(event).where(event.c.status == status).values(**values))


def park(shop: Shop) -> None:
    """Park rows as a destination leaves them that was ordered before."""
    change(shop, "pending", next_attempt_at=None, ordering_key=sa.literal_column("aggregate_id"))


async def test_a_drain_that_sweeps_delivers_what_it_made_due(shop: Shop) -> None:
    shop.collect()
    shop.emit(3)
    park(shop)
    assert await shop.outbox.relay().drain() is True
    assert shop.states() == {"pending": 3}
    assert await shop.outbox.relay().drain(20, sweep=True) is True
    assert shop.states() == {"delivered": 3}


async def test_what_an_older_version_left_parked_is_delivered_by_the_next_drain(shop: Shop) -> None:
    seen = shop.collect(ordered=True)
    shop.emit(2)
    park(shop)
    async with shop.store() as store:
        assert (
            await SqlUpkeep(store).members.lead("a leader that does not know this destination", 60.0)
            is not None
        )
    await shop.outbox.adrain()
    assert (seen, shop.states()) == ([0, 1], {"delivered": 2})


async def test_a_drain_that_sweeps_routes_what_no_route_took_before(migrated_database: Databases) -> None:
    url = migrated_database("postgresql-18")
    before = Shop(url, unrouted="store")
    before.emit(3)
    after = Shop(url, unrouted="store")

    after.collect()
    assert await after.outbox.relay().drain(20, sweep=True) is True
    assert after.states("on_order") == {"delivered": 3}


async def test_upkeep_prunes_or_sweeps_and_does_not_deliver(shop: Shop) -> None:
    shop.collect(retention="1h")
    shop.emit(1)
    await shop.outbox.adrain()
    change(shop, "delivered", delivered_at=datetime(2020, 1, 1, tzinfo=UTC))
    shop.emit(1)
    park(shop)
    swept = await shop.outbox.relay().upkeep(prune=False)
    assert (swept.pruned, swept.swept) == (None, Round(1))
    assert shop.states() == {"delivered": 1, "pending": 1}
    pruned = await shop.outbox.relay().upkeep(sweep=False)
    assert (pruned.pruned, pruned.swept, pruned.routed) == (Round(1), None, None)
    assert shop.states() == {"pending": 1}


async def test_upkeep_ends_when_it_is_stopped(shop: Shop) -> None:
    names = [f"d{n}" for n in range(100)]
    for name in names:
        shop.outbox.handler("order.*", name=name)(print)
    relay = shop.outbox.relay()
    keeping = asyncio.create_task(relay.upkeep())
    relay.stop()
    chores = await asyncio.wait_for(keeping, PATIENCE)
    assert chores.swept == Round(done=False), "it was ended ahead of the last of a hundred destinations"


async def test_a_store_and_a_wake_that_are_handed_in_are_used_and_not_closed(shop: Shop) -> None:
    class Closing(LocalWake):
        closed = False

        async def close(self) -> None:
            self.closed = True

    shop.collect()
    shop.emit(2)
    outbox = shop.outbox
    store: SqlStore = open_store(outbox.settings.database, outbox.tables)
    closed: list[SqlStore] = []
    close = store.close

    async def seen() -> None:
        closed.append(store)
        await close()

    store.close = seen  # type: ignore[method-assign]
    wake = Closing()
    for left in (2, 0):
        assert shop.states() == ({"pending": 2} if left else {"delivered": 2})
        assert await made_relay(outbox, store=store, wake=wake).drain()
    assert (closed, wake.closed) == ([], False)
    await close()


@pytest.mark.parametrize("circuit", ["closed", "open"])
async def test_a_drain_of_chosen_rows_delivers_no_others(shop: Shop, circuit: str) -> None:
    seen = {"plain": shop.collect("plain"), "keys": shop.collect("keys", ordered=True)}
    shop.emit(12, keys=3)
    outbox = shop.outbox
    place = outbox.tables.destination
    with shop.engine.begin() as connection:
        then = datetime(2020, 1, 1, tzinfo=UTC)
        rows = [{"name": name, "circuit": circuit, "circuit_until": then} for name in seen]
        connection.execute(sa.insert(place), rows)
    keys_ids = shop.column("id", destination="keys")
    only = {"plain": shop.column("id", destination="plain")[5:8], "keys": [*keys_ids[:5], keys_ids[11]]}
    assert await made_relay(outbox, only=only).drain(20) is True
    assert (sorted(seen["plain"]), sorted(seen["keys"])) == ([5, 6, 7], [0, 1, 2, 3, 4])
    assert (shop.leases(), shop.circuit("plain"), shop.circuit("keys")) == (0, "closed", "closed")
    assert await shop.outbox.relay().drain(20) is True
    assert (sorted(seen["plain"]), sorted(seen["keys"])) == (list(range(12)), list(range(12)))
