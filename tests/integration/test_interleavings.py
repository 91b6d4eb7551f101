"""Two transactions step by step: what a claim does while another claim or a settle is not yet committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa

from relaybox.config import Destination, Settings
from relaybox.emit.row import Call, RowBuilder
from relaybox.migrations import migrate
from relaybox.outcome import Delivered, Failed, Outcome, Retried
from relaybox.schema import Tables, make_tables
from relaybox.store import DeadLetter, Settlement, Store, Want
from relaybox.stores import mysql, postgres
from relaybox.stores.destinations import DestinationSteps
from relaybox.stores.dialects import DIALECTS
from relaybox.stores.statements import Statements
from relaybox.stores.steps import OneStatement, Steps, Stepwise, StoreSteps
from tests.integration.shop import Databases
from tests.locks import waiters

SECONDS = 60.0
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mariadb+pymysql"}
STORES = {"postgresql": postgres, "mysql": mysql}
BUILDER = RowBuilder(Settings(destinations=[Destination("shop", "console:", ordered=True)]))


def want(owner: str, limit: int = 100) -> Want:
    return Want("shop", owner, limit, 60.0, ordered=True)


class Scene(NamedTuple):
    """A database, a store on it, and the same steps to be run by hand in transactions of one's own."""

    engine: sa.Engine
    tables: Tables
    statements: Statements
    steps: StoreSteps
    store: Store

    def emit(self, *keys: str) -> list[UUID]:
        """Commit one event for each key; an empty one stands for none."""
        dialect = DIALECTS[self.engine.dialect.name]
        calls = [Call("Order", 1, "order.paid", {}, key=key or None, destinations=["shop"]) for key in keys]
        rows = [BUILDER.build(call, dialect).rows[0] for call in calls]
        with self.engine.begin() as connection:
            connection.exec_driver_sql(*self.statements.insert(rows))
        return [UUID(row[0]) for row in rows]

    def parked(self) -> set[UUID]:
        """The rows that wait behind another one."""
        event = self.tables.event.c
        query = sa.select(event.id).where(event.status == "pending", event.next_attempt_at.is_(None))
        with self.engine.connect() as connection:
            return set(connection.scalars(query))

    def status(self, id_: UUID) -> str:
        """A row's, as committed."""
        event = self.tables.event.c
        with self.engine.connect() as connection:
            return connection.execute(sa.select(event.status).where(event.id == id_)).scalar_one()

    def end_leases(self) -> None:
        """Let every lease run out."""
        event = self.tables.event
        ended = (
            sa.update(event).where(event.c.lease_token.is_not(None)).values(leased_until=event.c.created_at)
        )
        with self.engine.begin() as connection:
            connection.execute(ended)

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """An open READ COMMITTED transaction, committed at the end of the block."""
        with self.engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
            yield connection

    async def until_someone_waits(self) -> None:
        """Until another transaction waits for a lock."""
        async with asyncio.timeout(SECONDS):
            while not waiters(self.engine):  # noqa: ASYNC110 - the database sends no signal
                await asyncio.sleep(0.02)


def drive(connection: sa.Connection, steps: Steps[Any]) -> Any:
    """Run steps in the connection's transaction, without its end."""
    try:
        queries = next(steps)
        while True:
            results = [connection.exec_driver_sql(*query) for query in queries]
            queries = steps.send([list(result) if result.returns_rows else [] for result in results])
    except StopIteration as end:
        return end.value


@pytest.fixture(
    params=["postgresql-18", "postgresql-15", "postgresql-18, repeatable read by default", "mariadb"]
)
async def scene(request: pytest.FixtureRequest, migrated_database: Databases) -> AsyncIterator[Scene]:
    kind, _, default = request.param.partition(", ")
    database = migrated_database(kind)
    migrate(database)
    url = sa.make_url(database)
    if default:
        with psycopg.connect(database) as connection:
            connection.execute(
                f"ALTER DATABASE {url.database} SET default_transaction_isolation = 'repeatable read'"
            )
    engine = sa.create_engine(url.set(drivername=DRIVERS[url.drivername]))
    tables, dialect = make_tables(sa.MetaData()), DIALECTS[engine.dialect.name]
    statements = Statements(tables, dialect, "format")
    one = url.drivername == "postgresql"
    steps = StoreSteps(
        statements, dialect, OneStatement(statements) if one else Stepwise(statements, dialect)
    )
    store = STORES[url.drivername].open_store(database, tables, connections=2)
    yield Scene(engine, tables, statements, steps, store)
    await store.close()
    engine.dispose()


async def test_a_claim_waits_for_the_one_before_it_and_takes_none_of_its_keys(scene: Scene) -> None:
    scene.emit("a", "a", "b")
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
    head, later, other = scene.emit("a", "a", "b")
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
    assert scene.parked() == set()
    rest = await (next_claim if waits else scene.store.claim(want("relay-2")))
    assert [d.id for d in rest.deliveries] == ([later, other] if waits else [later])


async def test_the_next_of_a_key_waits_for_whoever_holds_the_destination(scene: Scene) -> None:
    if not scene.steps.dialect.one_statement:
        pytest.skip("a settle makes the next one due itself")
    scene.emit("a")
    head = await scene.store.claim(want("relay-1"))
    [later] = scene.emit("a")
    assert (await scene.store.claim(want("relay-2"))).parked == 1
    with scene.transaction() as connection:
        drive(connection, lock(scene, "shop"))
        settle = asyncio.create_task(scene.store.settle([Settlement(head.deliveries[0], Delivered())]))
        await scene.until_someone_waits()
        assert scene.status(head.deliveries[0].id) == "delivered", "what is settled is settled at once"
        assert scene.parked() == {later}
    assert await settle == frozenset()
    assert scene.parked() == set()


def lock(scene: Scene, destination: str) -> Steps[None]:
    yield [scene.statements("lock_destination", destination=destination)]


async def test_a_key_whose_head_is_locked_elsewhere_is_left_alone(scene: Scene) -> None:
    head, later, other = scene.emit("a", "a", "b")
    event = scene.tables.event
    with scene.transaction() as connection:
        connection.execute(sa.select(event.c.id).where(event.c.id == head).with_for_update())
        during = await scene.store.claim(want("relay-2"))
    assert ([d.id for d in during.deliveries], during.parked) == ([other], 0)
    assert [d.id for d in (await scene.store.claim(want("relay-2"))).deliveries] == [head, later]


async def test_two_relays_that_settle_one_key_at_the_same_time_make_its_next_event_due(scene: Scene) -> None:
    scene.emit("a", "a")
    late = await scene.store.claim(want("relay-1"))
    [waiting] = scene.emit("a")
    assert (await scene.store.claim(want("relay-2"))).parked == 1
    scene.end_leases()
    taken_over = await scene.store.claim(want("relay-2", limit=1))
    assert [d.id for d in taken_over.deliveries] == [late.deliveries[0].id]
    settled = [Settlement(taken_over.deliveries[0], Delivered())]
    zombie = scene.store.settle([Settlement(d, Delivered()) for d in late.deliveries])
    with scene.transaction() as connection:
        drive(connection, scene.steps.settle(settled, "block"))
        late_settle = asyncio.create_task(zombie)
        if not scene.steps.dialect.one_statement:
            await scene.until_someone_waits()
        else:
            assert await late_settle == {late.deliveries[0].id}
            assert scene.parked() == {waiting}, "the head is not settled yet"
    with scene.transaction() as connection:
        drive(connection, scene.steps.go_on(scene.steps.to_go_on(settled), "block"))
    assert await late_settle == {late.deliveries[0].id}
    assert scene.parked() == set()
    assert [d.id for d in (await scene.store.claim(want("relay-2"))).deliveries] == [waiting]


@pytest.mark.parametrize("outcome", [Delivered(), Retried(1.0, "503")], ids=repr)
async def test_a_settle_takes_its_rows_in_the_order_of_their_ids(scene: Scene, outcome: Outcome) -> None:
    """As whoever else takes several, such as an extension of the same leases."""
    first, second = sorted(scene.emit("", ""))
    claims = [(await scene.store.claim(want("relay-1", limit=1))).deliveries[0] for _ in range(2)]
    late, early = sorted(claims, key=lambda delivery: delivery.id, reverse=True)
    event = scene.tables.event
    with scene.transaction() as connection:
        connection.execute(sa.select(event.c.id).where(event.c.id == first).with_for_update())
        settle = asyncio.create_task(
            scene.store.settle([Settlement(late, Delivered()), Settlement(early, outcome)])
        )
        await scene.until_someone_waits()
        other = sa.select(event.c.id).where(event.c.id == second).with_for_update(nowait=True)
        assert connection.scalar(other) == second
    assert await settle == frozenset()


async def test_a_claim_that_is_cancelled_while_it_waits_leaves_a_clean_store(scene: Scene) -> None:
    ids = scene.emit("a", "b")
    await scene.store.release((await scene.store.claim(want("relay-1"))).deliveries)
    with scene.transaction() as connection:
        drive(connection, scene.steps.claim(want("relay-2", limit=1)))
        claim = asyncio.create_task(scene.store.claim(want("relay-1")))
        await scene.until_someone_waits()
        claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claim
    for _ in range(3):
        taken = await scene.store.claim(want("relay-1"))
        assert [d.id for d in taken.deliveries] == ids[1:]
        assert await scene.store.release(taken.deliveries) == frozenset()


async def test_rows_without_a_key_that_are_locked_elsewhere_are_left_alone(scene: Scene) -> None:
    first, second = scene.emit("", "")
    event = scene.tables.event
    with scene.transaction() as connection:
        connection.execute(sa.select(event.c.id).where(event.c.id == first).with_for_update())
        during = await scene.store.claim(want("relay-1"))
    assert [d.id for d in during.deliveries] == [second]


async def test_a_settle_finds_what_a_claim_parks_at_the_same_time(scene: Scene) -> None:
    scene.emit("a")
    head = await scene.store.claim(want("relay-1"))
    later = scene.emit("a", "a")
    with scene.transaction() as connection:
        parking = drive(connection, scene.steps.claim(want("relay-2")))
        settle = asyncio.create_task(
            scene.store.settle([Settlement(d, Delivered()) for d in head.deliveries])
        )
        await scene.until_someone_waits()
    assert (parking.deliveries, parking.parked) == ((), 2)
    assert await settle == frozenset()
    assert scene.parked() == {later[1]}
    assert [d.id for d in (await scene.store.claim(want("relay-2"))).deliveries] == later


async def test_an_extension_and_a_claim_at_the_same_time_do_not_disturb_each_other(scene: Scene) -> None:
    scene.emit("a")
    head = await scene.store.claim(want("relay-1"))
    scene.emit("a", "b")
    with scene.transaction() as connection:
        assert drive(connection, scene.steps.extend(head.deliveries, 60.0)) == frozenset()
        during = await scene.store.claim(want("relay-2"))
    assert [d.ordering_key for d in during.deliveries] == ["b"]
    assert (await scene.store.claim(want("relay-2"))).parked == 1


async def test_an_event_that_is_not_committed_yet_is_not_seen_and_is_taken_afterwards(scene: Scene) -> None:
    dialect = DIALECTS[scene.engine.dialect.name]
    row = BUILDER.build(Call("Order", 1, "order.paid", {}, key="a", destinations=["shop"]), dialect).rows[0]
    with scene.transaction() as connection:
        connection.exec_driver_sql(*scene.statements.insert([row]))
        [later] = scene.emit("a")
        during = await scene.store.claim(want("relay-1"))
        assert [d.id for d in during.deliveries] == [later]
    assert [d.id for d in (await scene.store.claim(want("relay-1"))).deliveries] == [UUID(row[0])]


async def test_a_row_that_is_taken_over_during_its_settle_is_not_copied(scene: Scene) -> None:
    scene.emit("")
    late = await scene.store.claim(Want("shop", "relay-1"))
    scene.end_leases()
    with scene.transaction() as connection:
        assert drive(connection, scene.steps.claim(Want("shop", "relay-2"))).deliveries
        failed = [Settlement(d, Failed("no")) for d in late.deliveries]
        zombie = asyncio.create_task(scene.store.settle(failed, dead_letter=DeadLetter("grave")))
        await scene.until_someone_waits()
    assert await zombie == {late.deliveries[0].id}
    assert not (await scene.store.claim(Want("grave", "relay-1"))).deliveries


async def test_a_settle_that_copies_locks_its_rows_in_the_order_of_every_other(scene: Scene) -> None:
    first, second = scene.emit("", "")
    claim = await scene.store.claim(Want("shop", "relay-1"))
    outcomes = (Delivered(), Failed("no"))
    settlements = [Settlement(*pair) for pair in zip(claim.deliveries, outcomes, strict=True)]
    event = scene.tables.event
    with scene.transaction() as connection:
        connection.execute(sa.select(event.c.id).where(event.c.id == first).with_for_update())
        settle = asyncio.create_task(scene.store.settle(settlements, dead_letter=DeadLetter("grave")))
        await scene.until_someone_waits()
        free = sa.select(event.c.id).where(event.c.id == second).with_for_update(nowait=True)
        assert connection.scalars(free).all() == [second]
    assert await settle == frozenset()
    assert len((await scene.store.claim(Want("grave", "relay-1"))).deliveries) == 1


async def test_of_two_relays_at_the_same_time_one_changes_the_circuit(scene: Scene) -> None:
    await scene.store.open_circuit("shop", 0, "503")
    destinations = DestinationSteps(scene.statements)
    with scene.transaction() as connection:
        assert drive(connection, destinations.probe("shop", 60)) is True
        other = asyncio.create_task(scene.store.probe("shop", 60))
        await scene.until_someone_waits()
    assert await other is False


async def test_a_place_is_counted_from_the_moment_it_is_handed_out(scene: Scene) -> None:
    destinations = DestinationSteps(scene.statements)
    with scene.transaction() as connection:
        assert drive(connection, destinations.reserve("shop", 100.0)) == 0
        other = asyncio.create_task(scene.store.reserve("shop", 1, 1.0))
        await scene.until_someone_waits()
    assert 90 < await other <= 100
