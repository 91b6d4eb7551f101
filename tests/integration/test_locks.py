"""What a store does while a stranger holds locks: a row, a destination, a whole table."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relaybox.core.event import Delivery
from relaybox.core.ordering import ALONE
from relaybox.core.outcome import Delivered, Failed, Outcome, Retried
from relaybox.database.pools import postgresql
from relaybox.database.statements.delivery import LOCK_SECONDS, STATEMENT_SECONDS, Query
from relaybox.errors import Locked, RowsLocked
from relaybox.operate import open_relay as parts
from relaybox.stores.sql.claims import lock_settles
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.store import Settlement, Want
from tests.databases import POSTGRESQL, SERVERS
from tests.integration.filled import create_tables, emit
from tests.integration.shop import Databases
from tests.locks import waiters
from tests.servers import pgbouncer
from tests.waiting import PATIENCE, await_for

KINDS = [*SERVERS, pytest.param("postgresql-15")]


class Place:
    """Two destinations, a store, and a stranger who takes locks there."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self.engine, self.tables = create_tables(url)
        self.store: SqlStore = parts.open_store(url, self.tables, **options)

    @contextmanager
    def locked(self, table: sa.Table, *conditions: Any) -> Iterator[None]:
        """Lock the rows in another transaction."""
        key = next(iter(table.primary_key))
        # Where a transaction sees a snapshot, MariaDB locks also what it looks at.
        with self.engine.execution_options(isolation_level="READ COMMITTED").begin() as stranger:
            assert stranger.execute(sa.select(key).where(*conditions).with_for_update()).all()
            yield

    def locked_row(self, delivery: Delivery) -> Any:
        return self.locked(self.tables.event, self.tables.event.c.id == delivery.id)

    def leased_until(self, deliveries: Sequence[Delivery]) -> list[Any]:
        """Return the end of each lease."""
        event = self.tables.event.c
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(event.id, event.leased_until))
            known = {row.id: row.leased_until for row in rows}
        return [known[delivery.id] for delivery in deliveries]

    def exhaust(self) -> None:
        """Let relays have died with every row in all of its attempts."""
        event = self.tables.event
        lease = {"lease_token": event.c.id, "lease_owner": "dead", "leased_until": event.c.created_at}
        died = {"crashes": ALONE + 5, "attempts": event.c.max_attempts}
        with self.engine.begin() as connection:
            connection.execute(event.update().values(**died, **lease))

    def status(self, deliveries: Sequence[Delivery]) -> list[str | None]:
        """Return the status of each row."""
        event = self.tables.event.c
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(event.id, event.status))
            known = {row.id: row.status for row in rows}
        return [known.get(delivery.id) for delivery in deliveries]

    async def claim(self, destination: str, limit: int = 100) -> tuple[Delivery, ...]:
        want = Want(destination, "me", limit=limit, ordered=destination == "keys")
        return (await self.store.claim(want)).deliveries


@asynccontextmanager
async def opened(url: str, events: int = 10, **options: Any) -> AsyncIterator[Place]:
    place = Place(url, **options)
    emit(place.engine, place.tables, events)
    try:
        yield place
    finally:
        await place.store.close()


def delivered(deliveries: Sequence[Delivery]) -> list[Settlement]:
    return [Settlement(delivery, Delivered()) for delivery in deliveries]


@pytest.mark.parametrize("destination", ["plain", "keys"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_settle_goes_on_without_the_row_that_somebody_has_locked(
    kind: str, destination: str, migrated_database: Databases
) -> None:
    async with opened(migrated_database(kind)) as place:
        held = await place.claim(destination)
        assert len(held) == 10
        with place.locked_row(held[3]):
            with pytest.raises(RowsLocked) as refused:
                await place.store.settle(delivered(held))
            assert refused.value.rows == {held[3].id}
            assert refused.value.lost == frozenset()
            assert place.status(held) == [*["delivered"] * 3, "pending", *["delivered"] * 6]
            with pytest.raises(RowsLocked):
                await place.store.settle(delivered(held[3:4]), wait=False)
        assert await place.store.settle(delivered(held[3:4]), wait=False) == frozenset()
        assert place.status(held) == ["delivered"] * 10


@pytest.mark.parametrize("kind", KINDS)
async def test_outcomes_of_every_kind_are_written_beside_a_locked_row(
    kind: str, migrated_database: Databases
) -> None:
    async with opened(migrated_database(kind)) as place:
        held = await place.claim("plain")
        kinds: list[Outcome] = [Delivered(), Delivered(keep=False), Retried(60, "503"), Failed("400")]
        outcomes = [*kinds, *kinds, Delivered(), Delivered()]
        with place.locked_row(held[9]), pytest.raises(RowsLocked) as refused:
            await place.store.settle(list(map(Settlement, held, outcomes)), wait=False)
        assert refused.value.rows == {held[9].id}
        four = ["delivered", None, "pending", "failed"]
        assert place.status(held) == [*four, *four, "delivered", "pending"]
        leased = sa.select(place.tables.event.c.id).where(place.tables.event.c.lease_token.is_not(None))
        with place.engine.connect() as connection:
            assert list(connection.scalars(leased)) == [held[9].id]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_key_whose_next_row_is_locked_is_settled_when_that_can_be_made_due(
    kind: str, migrated_database: Databases
) -> None:
    """Otherwise it would be settled before, and nothing would make the next row due."""
    async with opened(migrated_database(kind)) as place:
        heads = await place.claim("keys", limit=5)
        keys = {delivery.ordering_key for delivery in heads}
        assert (len(heads), len(keys)) == (5, 5)
        assert not await place.claim("keys")
        event = place.tables.event.c
        parked = (event.next_attempt_at.is_(None), event.status == "pending")
        behind = (event.destination == "keys", event.ordering_key == heads[0].ordering_key, *parked)
        with place.locked(place.tables.event, *behind), pytest.raises(RowsLocked) as refused:
            await place.store.settle(delivered(heads), wait=False)
        assert refused.value.rows == {heads[0].id}
        assert place.status(heads) == ["pending", *["delivered"] * 4]
        assert await place.store.settle(delivered(heads[:1]), wait=False) == frozenset()
        assert {delivery.ordering_key for delivery in await place.claim("keys")} == keys


@pytest.mark.parametrize("kind", KINDS)
async def test_a_row_that_is_gone_or_taken_over_is_lost_and_not_locked(
    kind: str, migrated_database: Databases
) -> None:
    async with opened(migrated_database(kind)) as place:
        held = await place.claim("plain")
        event = place.tables.event
        with place.engine.begin() as connection:
            connection.execute(event.delete().where(event.c.id == held[0].id))
            taken = event.update().where(event.c.id == held[1].id)
            connection.execute(taken.values(lease_token=held[0].id))
        lost = await place.store.settle(delivered(held), wait=False)
        assert lost == {held[0].id, held[1].id}
        assert place.status(held) == [None, "pending", *["delivered"] * 8]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_extension_says_which_rows_it_left_because_they_are_locked(
    kind: str, migrated_database: Databases
) -> None:
    async with opened(migrated_database(kind)) as place:
        held = await place.claim("plain")
        until = place.leased_until(held)
        with place.locked_row(held[3]), pytest.raises(RowsLocked) as refused:
            await place.store.extend(held, 600.0)
        assert (refused.value.rows, refused.value.lost) == ({held[3].id}, frozenset())
        extended = [later > before for later, before in zip(place.leased_until(held), until, strict=True)]
        assert extended == [at != 3 for at in range(10)]
        assert await place.store.extend(held, 600.0) == frozenset()
        assert all(map(operator.gt, place.leased_until(held), until))


@pytest.mark.parametrize("destination", ["plain", "keys"])
@pytest.mark.parametrize("kind", POSTGRESQL)
async def test_a_claim_hands_out_the_row_that_it_could_not_fail(
    kind: str, destination: str, migrated_database: Databases
) -> None:
    """It is leased already: without a wake, it would wait for the end of its lease."""
    async with opened(migrated_database(kind), events=1) as place:
        place.exhaust()
        with place.engine.connect() as stranger, pytest.MonkeyPatch.context() as patch:
            settle = place.store.steps.settle

            def locked_before(*given: Any) -> Any:
                stranger.execute(sa.select(place.tables.event.c.id).with_for_update())
                return settle(*given)

            patch.setattr(place.store.steps, "settle", locked_before)
            [delivery] = await place.claim(destination)
        assert delivery.exhausted
        assert await place.store.settle([Settlement(delivery, Failed("enough"))]) == frozenset()


@pytest.mark.parametrize("kind", KINDS)
async def test_settles_that_somebody_holds_back_are_tried_again_later(
    kind: str, migrated_database: Databases
) -> None:
    """Another has what makes settles of a destination wait for each other, so nothing is written."""
    async with opened(migrated_database(kind)) as place:
        held = await place.claim("keys")
        with place.engine.begin() as stranger:
            execute(stranger, lock_settles(place.store.steps.statements, "keys"))
            with pytest.raises(Locked, match="end its transaction"):
                await place.store.settle(delivered(held))
            assert place.status(held) == ["pending"] * 10
        assert await place.store.settle(delivered(held)) == frozenset()


def execute(connection: sa.Connection, query: Query) -> None:
    if connection.dialect.name == "postgresql":
        raw = psycopg.RawCursor(connection.connection.driver_connection)  # type: ignore[arg-type]
        raw.execute(query.sql.encode(), query.params)
    else:
        connection.exec_driver_sql(*query)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lane_that_waits_for_a_lock_leaves_connections_to_the_others(
    kind: str, migrated_database: Databases
) -> None:
    async with opened(migrated_database(kind)) as place:
        destination = place.tables.destination
        with place.locked(destination, destination.c.name == "keys"):
            blocked = [asyncio.create_task(place.claim("keys")) for _ in range(3)]
            await await_for(lambda: waiters(place.engine) == 2, "two calls of the lane wait")
            for _ in range(10):
                [delivery] = await place.claim("plain", limit=1)
                assert await place.store.settle(delivered([delivery])) == frozenset()
                assert await place.store.extend([delivery], 60.0) == {delivery.id}
            assert not any(task.done() and not task.exception() for task in blocked)
            refused = await asyncio.gather(*blocked, return_exceptions=True)
        assert {type(error) for error in refused} == {Locked}
        assert await place.claim("keys")


async def test_the_loop_goes_on_while_sqlite_waits_for_another_writer(migrated_database: Databases) -> None:
    async with opened(migrated_database("sqlite")) as place:
        other = place.engine.raw_connection()
        other.driver_connection.execute("BEGIN IMMEDIATE")  # type: ignore[union-attr]
        claim = asyncio.create_task(place.claim("plain"))
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert not claim.done()
        other.rollback()
        other.close()
        assert len(await claim) == 10


async def settings(store: SqlStore, *names: str) -> list[str]:
    def steps() -> Any:
        results = yield [Query(f"SELECT current_setting('{name}', true)", ()) for name in names]
        return [value for [[value]] in results]

    return await store.driver.run(steps)


WAITS = ("lock_timeout", "statement_timeout", "client_connection_check_interval")
EXPECTED = [f"{LOCK_SECONDS}s", f"{STATEMENT_SECONDS}s", "5s"]


@pytest.mark.parametrize("kind", POSTGRESQL)
async def test_the_server_gives_up_before_the_client_does(kind: str, migrated_database: Databases) -> None:
    assert LOCK_SECONDS < STATEMENT_SECONDS < postgresql.ANSWER_SECONDS
    async with opened(migrated_database(kind)) as place:
        assert await settings(place.store, *WAITS) == EXPECTED


async def test_behind_a_pooler_each_transaction_has_its_own_limits(
    migrated_database: Databases, pgbouncer_url: str
) -> None:
    direct = migrated_database("postgresql-18")
    _, tables = create_tables(direct)
    store: SqlStore = parts.open_store(pgbouncer.through(pgbouncer_url, direct), tables)
    try:
        assert await settings(store, *WAITS) == EXPECTED
        with psycopg.connect(pgbouncer.through(pgbouncer_url, direct)) as other:
            assert other.execute("SHOW lock_timeout").fetchone() == ("0",), "the session is somebody else's"
    finally:
        await store.close()


@pytest.mark.parametrize("pooled", [False, True], ids=["direct", "pooled"])
async def test_a_connection_that_met_a_lock_is_kept(
    pooled: bool, migrated_database: Databases, pgbouncer_url: str
) -> None:
    direct = migrated_database("postgresql-18")
    async with opened(direct) as place:
        url = pgbouncer.through(pgbouncer_url, direct) if pooled else direct
        store: SqlStore = parts.open_store(url, place.tables, connections=1)
        connect, made = postgresql.AsyncConnection.connect, []

        async def counted(**options: Any) -> Any:
            made.append(1)
            return await connect(**options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(postgresql.AsyncConnection, "connect", counted)
            want = Want("keys", "me", ordered=True)
            destination = place.tables.destination
            with place.locked(destination, destination.c.name == "keys"), pytest.raises(Locked):
                await store.claim(want)
            held = (await store.claim(want)).deliveries
            assert len(held) == 10
            assert await store.settle(delivered(held)) == frozenset()
        await store.close()
        assert len(made) == 1


async def test_a_statement_is_cancelled_before_the_client_hangs_up(
    migrated_database: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the server would go on with it, on a connection that is not counted."""
    url = migrated_database("postgresql-18")
    monkeypatch.setattr(postgresql, "ANSWER_SECONDS", 0.5)
    asleep = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'"
        " AND query LIKE '%pg_sleep(50)%' AND pid <> pg_backend_pid()"
    )
    async with opened(url) as place, asyncio.timeout(PATIENCE):

        def steps() -> Any:
            # The server would notice by itself after some seconds that the client is gone.
            yield [
                Query("SELECT set_config('client_connection_check_interval', '0', false)", ()),
                Query("SELECT pg_sleep(50)", ()),
            ]

        with pytest.raises(Exception, match=r"no answer within 0\.5 s"):
            await place.store.driver.run(steps)
        with psycopg.connect(url, autocommit=True) as observer:
            await await_for(lambda: observer.execute(asleep).fetchone() == (0,), "it ends", 20.0)
