"""Two transactions step by step: what a claim does while another claim or a settle is not yet committed."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa

from relaybox import Call, Destination
from relaybox.core.outcome import Delivered, Failed, Outcome, Retried
from relaybox.database.steps import Steps
from relaybox.stores.sql.steps import StoreSteps
from relaybox.stores.sql.store import DestinationSteps, SqlStore
from relaybox.stores.store import Claim, DeadLetter, Settlement, Want
from tests.integration.shop import Databases, Shop, drive
from tests.locks import waiters
from tests.waiting import PATIENCE, await_for, cancel


def want(owner: str, limit: int = 100) -> Want:
    return Want("shop", owner, limit, 60.0, ordered=True)


class Scene(Shop):
    """A database, a store on it, and the same steps to be run by hand in transactions of one's own."""

    store: SqlStore  # type: ignore[assignment]

    @property
    def steps(self) -> StoreSteps:
        return self.store.steps

    def insert(self, connection: sa.Connection, *keys: str) -> list[UUID]:
        """Emit one event for each key; an empty one stands for none."""
        calls = [Call("Order", 1, "order.paid", {}, key=key or None, destinations=["shop"]) for key in keys]
        return [emitted.event_id for emitted in self.outbox.emit_many(connection, calls)]

    def put(self, *keys: str) -> list[UUID]:
        """Commit one event for each key."""
        with self.engine.begin() as connection:
            return self.insert(connection, *keys)

    def lock(self, connection: sa.Connection, id_: UUID, **options: Any) -> list[UUID]:
        """Lock a row."""
        event = self.outbox.tables.event.c
        return list(connection.scalars(sa.select(event.id).where(event.id == id_).with_for_update(**options)))

    async def until_someone_waits(self) -> None:
        await await_for(lambda: waiters(self.engine), "another transaction waits for a lock")


@asynccontextmanager
async def opened(database: str) -> AsyncIterator[Scene]:
    scene = Scene(database, destinations=[Destination("shop", "console:", ordered=True)])
    async with Shop.store(scene, connections=2) as store:
        scene.store = store
        yield scene


@pytest.fixture(
    params=["postgresql-18", "postgresql-15", "postgresql-18, repeatable read by default", "mariadb"]
)
async def scene(request: pytest.FixtureRequest, migrated_database: Databases) -> AsyncIterator[Scene]:
    kind, _, default = request.param.partition(", ")
    database = migrated_database(kind)
    if default:
        name, level = sa.make_url(database).database, "default_transaction_isolation = 'repeatable read'"
        with psycopg.connect(database) as connection:
            connection.execute(f"ALTER DATABASE {name} SET {level}")
    async with opened(database) as scene:
        yield scene


async def test_a_claim_waits_for_the_one_before_it_and_takes_none_of_its_keys(scene: Scene) -> None:
    scene.put("a", "a", "b")
    await scene.store.release(
        (await scene.store.claim(want("first, so that there is a row to lock"))).deliveries
    )
    with scene.transaction() as connection:
        first = drive(connection, scene.steps.claim(want("relay-1", limit=1)))
        second = asyncio.create_task(scene.store.claim(want("relay-2")))
        await scene.until_someone_waits()
    assert [d.ordering_key for d in first.deliveries] == ["a"]
    assert [d.ordering_key for d in (await second).deliveries] == ["b"]


async def test_a_claim_and_a_settle_at_the_same_time_leave_nothing_parked(scene: Scene) -> None:
    """On PostgreSQL neither waits for the other; elsewhere the claim does, and finds the next of the key."""
    head, later, other = scene.put("a", "a", "b")
    claim = await scene.store.claim(want("relay-1", limit=1))
    assert [d.id for d in claim.deliveries] == [head]
    settled = [Settlement(claim.deliveries[0], Delivered())]
    waits = not scene.steps.dialect.one_statement
    with scene.transaction() as connection:
        drive(connection, scene.steps.settle(settled, "block"))
        next_claim = asyncio.create_task(scene.store.claim(want("relay-2")))
        if waits:
            await scene.until_someone_waits()
        else:
            assert [d.id for d in (await next_claim).deliveries] == [other]
    assert scene.parked() == []
    rest = await (next_claim if waits else scene.store.claim(want("relay-2")))
    assert [d.id for d in rest.deliveries] == ([later, other] if waits else [later])


async def test_a_settle_waits_for_another_one_and_no_claim_waits_for_either(scene: Scene) -> None:
    if not scene.steps.dialect.one_statement:
        pytest.skip("there is one lock for both")
    scene.put("a")
    head = await scene.store.claim(want("relay-1"))
    [later, other] = scene.put("a", "b")
    with scene.transaction() as connection:
        drive(connection, lock(scene, "lock_settles"))
        settle = asyncio.create_task(scene.store.settle([Settlement(head.deliveries[0], Delivered())]))
        await scene.until_someone_waits()
        claim = await scene.store.claim(want("relay-2"))
        assert ([d.id for d in claim.deliveries], scene.parked()) == ([other], [later])
        assert scene.column("status", id=head.deliveries[0].id) == ["pending"], "nothing is settled in part"
    assert await settle == frozenset()
    assert scene.parked() == []


async def test_a_settle_does_not_wait_for_the_holder_of_the_destination(scene: Scene) -> None:
    if not scene.steps.dialect.one_statement:
        pytest.skip("there is one lock for both")
    scene.put("a")
    head = await scene.store.claim(want("relay-1"))
    scene.put("a")
    assert (await scene.store.claim(want("relay-2"))).parked == 1
    with scene.transaction() as connection:
        drive(connection, lock(scene, "lock_destination"))
        async with asyncio.timeout(PATIENCE):
            assert await scene.store.settle([Settlement(head.deliveries[0], Delivered())]) == frozenset()
        assert scene.parked() == []


def lock(scene: Scene, name: str) -> Steps[None]:
    yield [scene.steps.statements(name, destination="shop")]


async def test_what_is_locked_elsewhere_is_left_alone_with_all_of_its_key(scene: Scene) -> None:
    head, later, other, alone, free = scene.put("a", "a", "b", "", "")
    with scene.transaction() as connection:
        for locked in (head, alone):
            scene.lock(connection, locked)
        during = await scene.store.claim(want("relay-2"))
    assert ({d.id for d in during.deliveries}, during.parked) == ({other, free}, 0)
    assert {d.id for d in (await scene.store.claim(want("relay-2"))).deliveries} == {head, later, alone}


async def test_two_relays_that_settle_one_key_at_the_same_time_make_its_next_event_due(scene: Scene) -> None:
    scene.put("a", "a")
    late = await scene.store.claim(want("relay-1"))
    [waiting] = scene.put("a")
    assert (await scene.store.claim(want("relay-2"))).parked == 1
    scene.end_leases()
    taken_over = await scene.store.claim(want("relay-2", limit=1))
    assert [d.id for d in taken_over.deliveries] == [late.deliveries[0].id]
    settled = [Settlement(taken_over.deliveries[0], Delivered())]
    zombie = scene.store.settle([Settlement(d, Delivered()) for d in late.deliveries])
    with scene.transaction() as connection:
        drive(connection, scene.steps.settle(settled, "block"))
        late_settle = asyncio.create_task(zombie)
        await scene.until_someone_waits()
    assert await late_settle == {late.deliveries[0].id}
    assert scene.parked() == []
    assert [d.id for d in (await scene.store.claim(want("relay-2"))).deliveries] == [waiting]


@pytest.mark.parametrize("outcome", [Delivered(), Retried(1.0, "503"), Failed("no")], ids=repr)
async def test_a_settle_takes_its_rows_in_the_order_of_their_ids(scene: Scene, outcome: Outcome) -> None:
    """Everything that locks several rows does so, such as an extension of the same leases."""
    first, second = sorted(scene.put("", ""))
    claims = [(await scene.store.claim(want("relay-1", limit=1))).deliveries[0] for _ in range(2)]
    late, early = sorted(claims, key=lambda delivery: delivery.id, reverse=True)
    settlements = [Settlement(late, Delivered()), Settlement(early, outcome)]
    with scene.transaction() as connection:
        scene.lock(connection, first)
        settle = asyncio.create_task(scene.store.settle(settlements, dead_letter=DeadLetter("grave")))
        await scene.until_someone_waits()
        assert scene.lock(connection, second, nowait=True) == [second]
    assert await settle == frozenset()
    buried = (await scene.store.claim(Want("grave", "relay-1"))).deliveries
    assert len(buried) == isinstance(outcome, Failed)


async def test_a_claim_that_is_cancelled_while_it_waits_leaves_a_clean_store(scene: Scene) -> None:
    ids = scene.put("a", "b")
    await scene.store.release((await scene.store.claim(want("relay-1"))).deliveries)
    with scene.transaction() as connection:
        drive(connection, scene.steps.claim(want("relay-2", limit=1)))
        claim = asyncio.create_task(scene.store.claim(want("relay-1")))
        await scene.until_someone_waits()
        await cancel(claim)
    for _ in range(3):
        taken = await scene.store.claim(want("relay-1"))
        assert [d.id for d in taken.deliveries] == ids[1:]
        assert await scene.store.release(taken.deliveries) == frozenset()


async def test_a_settle_finds_what_a_claim_parks_at_the_same_time(scene: Scene) -> None:
    scene.put("a")
    head = await scene.store.claim(want("relay-1"))
    later = scene.put("a", "a")
    with scene.transaction() as connection:
        parking = drive(connection, scene.steps.claim(want("relay-2")))
        settle = asyncio.create_task(
            scene.store.settle([Settlement(d, Delivered()) for d in head.deliveries])
        )
        await scene.until_someone_waits()
    assert (parking.deliveries, parking.parked) == ((), 2)
    assert await settle == frozenset()
    assert scene.parked() == [later[1]]
    assert [d.id for d in (await scene.store.claim(want("relay-2"))).deliveries] == later


async def test_an_extension_and_a_claim_at_the_same_time_do_not_disturb_each_other(scene: Scene) -> None:
    scene.put("a")
    head = await scene.store.claim(want("relay-1"))
    scene.put("a", "b")
    with scene.transaction() as connection:
        assert drive(connection, scene.steps.extend(head.deliveries, 60.0)).lost == frozenset()
        during = await scene.store.claim(want("relay-2"))
    assert [d.ordering_key for d in during.deliveries] == ["b"]
    assert (await scene.store.claim(want("relay-2"))).parked == 1


async def test_an_event_that_is_not_committed_yet_is_not_seen_and_is_taken_afterwards(scene: Scene) -> None:
    with scene.transaction() as connection:
        late = scene.insert(connection, "a")
        [later] = scene.put("a")
        during = await scene.store.claim(want("relay-1"))
        assert [d.id for d in during.deliveries] == [later]
    assert [d.id for d in (await scene.store.claim(want("relay-1"))).deliveries] == late


async def test_a_row_that_is_taken_over_during_its_settle_is_not_copied(scene: Scene) -> None:
    scene.put("")
    late = await scene.store.claim(Want("shop", "relay-1"))
    scene.end_leases()
    with scene.transaction() as connection:
        assert drive(connection, scene.steps.claim(Want("shop", "relay-2"))).deliveries
        failed = [Settlement(d, Failed("no")) for d in late.deliveries]
        zombie = asyncio.create_task(scene.store.settle(failed, dead_letter=DeadLetter("grave")))
        await scene.until_someone_waits()
    assert await zombie == {late.deliveries[0].id}
    assert not (await scene.store.claim(Want("grave", "relay-1"))).deliveries


async def test_of_two_relays_at_the_same_time_one_changes_the_circuit(scene: Scene) -> None:
    await scene.store.open_circuit("shop", 0, "503")
    destinations = DestinationSteps(scene.steps.statements)
    with scene.transaction() as connection:
        assert drive(connection, destinations.change("probe", "shop", seconds=60)) is True
        other = asyncio.create_task(scene.store.probe("shop", 60))
        await scene.until_someone_waits()
    assert await other is False


async def test_a_place_is_counted_from_the_moment_it_is_handed_out(scene: Scene) -> None:
    destinations = DestinationSteps(scene.steps.statements)
    with scene.transaction() as connection:
        assert drive(connection, destinations.reserve("shop", 100.0)) == 0
        other = asyncio.create_task(scene.store.reserve("shop", 1, 1.0))
        await scene.until_someone_waits()
    assert 90 < await other <= 100


OPEN = {
    "postgresql-18": (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend'"
    ),
    "mariadb": "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE()",
}


@pytest.mark.parametrize("kind", OPEN)
async def test_operations_that_begin_together_share_the_connections(
    kind: str, migrated_database: Databases
) -> None:
    async with opened(migrated_database(kind)) as scene:
        claims = (scene.store.claim(Want("shop", f"relay-{n}")) for n in range(12))
        assert await asyncio.gather(*claims) == [Claim()] * 12
        with scene.engine.connect() as connection:
            held = connection.scalar(sa.text(OPEN[kind])) - 1  # the one that asks
    assert 1 <= held <= 2


async def test_a_claim_that_is_cancelled_while_it_waits_for_the_writer_of_sqlite(
    migrated_database: Databases,
) -> None:
    async with opened(migrated_database("sqlite")) as scene:
        assert await scene.store.claim(want("relay-1")) == Claim()
        writer = sqlite3.connect(str(scene.engine.url.database), isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(scene.store.claim(want("relay-1")))
        await asyncio.sleep(0.1)  # until its BEGIN is in the driver's thread, which gives no sign
        waiting.cancel()
        writer.execute("COMMIT")
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await scene.store.claim(want("relay-1")) == Claim()
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("ROLLBACK")
        writer.close()
