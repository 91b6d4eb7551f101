"""What a relay's death or stall does to the rows it held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from typing import Any, TypeAlias

import msgspec
import psycopg
import pytest
import sqlalchemy as sa

from relaybox import Outbox
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Outcome, Retried
from relaybox.database.dialects import POSTGRESQL
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Steps
from relaybox.emit.row import Call
from relaybox.stores.sql.steps import Settled, StoreSteps
from relaybox.stores.store import Settlement, Want
from tests.chaos.crew import DESTINATION, make_outbox, open_store
from tests.chaos.scene import stored
from tests.databases import EVERY_KIND, KINDS, engine
from tests.waiting import await_for

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]
ORDER = pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
POISON = 50


def emit(url: str, count: int, *, ordered: bool, keys: int = 10, max_attempts: int = 5) -> Outbox:
    outbox = make_outbox(url)
    changed = partial(Call, "Thing", event_type="thing.changed", max_attempts=max_attempts)
    calls = [
        changed(aggregate_id=n % keys, payload={"n": n}, key=str(n % keys) if ordered else None)
        for n in range(count)
    ]
    with engine(url).begin() as connection:
        outbox.emit_many(connection, calls)
    return outbox


def attempts(url: str, outbox: Outbox) -> set[tuple[Any, ...]]:
    with engine(url).connect() as connection:
        return {tuple(row) for row in connection.execute(sa.select(outbox.tables.attempt))}


def end_leases(url: str, outbox: Outbox) -> None:
    """End them all at once, as time does."""
    event = outbox.tables.event
    with engine(url).begin() as connection:
        held = event.c.lease_token.is_not(None)
        connection.execute(event.update().where(held).values(leased_until=event.c.created_at))


@pytest.mark.parametrize("kind", KINDS)
@ORDER
async def test_a_relay_that_stalls_beyond_its_lease_settles_nothing_and_learns_it(
    kind: str, ordered: bool, migrated_database: Callable[[str], str]
) -> None:
    url = migrated_database(kind)
    outbox = emit(url, 6, ordered=ordered, keys=6)
    stalled, other = open_store(url, outbox), open_store(url, outbox)
    held = (await stalled.claim(Want(DESTINATION, "stalled", ordered=ordered))).deliveries
    ids = {delivery.id for delivery in held}
    end_leases(url, outbox)
    taken = (await other.claim(Want(DESTINATION, "other", ordered=ordered))).deliveries
    assert {delivery.id for delivery in taken} == ids
    assert len(ids) == 6
    # Two are delivered, two wait, two are held when the first goes on.
    outcomes: list[Outcome] = [Delivered(), Delivered(), Retried(60, "later"), Retried(60, "later")]
    assert not await other.settle(list(map(Settlement, taken[:4], outcomes)))
    before = stored(engine(url), outbox), attempts(url, outbox)
    late: list[Outcome] = [Delivered(), Retried(0, "too late"), Failed("too late")]
    assert set(await stalled.extend(held, 60.0)) == ids
    assert set(await stalled.settle(list(map(Settlement, held, cycle(late))))) == ids
    assert set(await stalled.release(held)) == ids
    assert (stored(engine(url), outbox), attempts(url, outbox)) == before
    for store in (stalled, other):
        await store.close()


@pytest.mark.parametrize("kind", EVERY_KIND)
@ORDER
async def test_one_event_that_kills_its_relay_takes_none_of_its_batch_with_it(
    kind: str, ordered: bool, migrated_database: Callable[[str], str]
) -> None:
    url = migrated_database(kind)
    # The first two deaths are a whole batch's and the next those of groups; the last two the poison's alone.
    outbox = emit(url, 100, ordered=ordered, max_attempts=2)
    want = Want(DESTINATION, "mortal", limit=100, ordered=ordered, on_failed="skip")
    claimed: list[int] = []
    deaths = 0
    while any(row.status == "pending" for row in stored(engine(url), outbox)):
        assert len(claimed) < 200, "it is claimed again and again"
        store = open_store(url, outbox)
        deliveries = (await store.claim(want)).deliveries
        claimed.append(len(deliveries))
        if len(deliveries) == 1 and deliveries[0].suspect:
            await store.hold_alone(deliveries[0], True)
        if any(msgspec.json.decode(delivery.payload or "")["n"] == POISON for delivery in deliveries):
            deaths += 1
            end_leases(url, outbox)
        else:
            delivered = [Settlement(delivery, Delivered()) for delivery in deliveries]
            assert not await store.settle(delivered, on_failed="skip")
        await store.close()
    assert 4 <= deaths <= 8
    assert claimed[:2] == [100, 100]
    assert max(claimed[2:]) <= 16
    rows = stored(engine(url), outbox)
    poisonous = rows.pop(POISON)
    assert poisonous.status == "failed"
    assert f"the relay died {deaths} times" in poisonous.error_message
    assert [(row.status, row.attempts) for row in rows] == [("delivered", 1)] * 99


async def test_a_key_goes_on_when_two_relays_settle_its_rows_at_the_same_moment(
    migrated_database: Callable[[str], str],
) -> None:
    """One had stalled and kept the second row, the other took over the first; neither saw the other end."""
    url = migrated_database("postgresql-18")
    outbox = emit(url, 4, ordered=True, keys=1)
    stalled, other = await _two_holders_of_one_key(url, outbox)
    statements = Statements(outbox.tables, POSTGRESQL, "format")
    steps = StoreSteps(statements)
    first, second = (_settle(steps, held) for held in (other, stalled))
    async with await _transaction(url) as one, await _transaction(url) as two:
        answer = await _execute(one, next(first))
        late = asyncio.create_task(_execute(two, next(second)))
        await _done_or_waiting(late, two, url)
        await _finish(one, first, answer)
        await _finish(two, second, await late)
    rows = stored(engine(url), outbox)
    assert [row.status for row in rows] == ["delivered", "delivered", "pending", "pending"]
    assert rows[2].next_attempt_at is not None, "the new head of the key is parked behind nothing"


async def _two_holders_of_one_key(url: str, outbox: Outbox) -> tuple[Sequence[Delivery], Sequence[Delivery]]:
    """Give rows 1 and 2 to a stalled relay and then row 1 to another relay; rows 3 and 4 are parked."""
    store = open_store(url, outbox)
    stalled = await store.claim(Want(DESTINATION, "stalled", limit=2, lease=60, ordered=True))
    assert (await store.claim(Want(DESTINATION, "other", ordered=True))).parked == 2
    end_leases(url, outbox)
    other = await store.claim(Want(DESTINATION, "other", limit=1, ordered=True))
    await store.close()
    assert (len(stalled.deliveries), len(other.deliveries)) == (2, 1)
    return stalled.deliveries, other.deliveries


def _settle(steps: StoreSteps, held: Sequence[Delivery]) -> Steps[Settled]:
    return steps.settle([Settlement(delivery, Delivered()) for delivery in held], "block")


async def _transaction(url: str) -> Connection:
    """Open a connection that waits at most a minute for locks."""
    return await psycopg.AsyncConnection.connect(url, options="-c lock_timeout=60s")


async def _execute(connection: Connection, queries: Sequence[Query]) -> list[list[Any]]:
    cursors = [await connection.execute(query.sql.encode(), query.params) for query in queries]
    return [await cursor.fetchall() if cursor.description else [] for cursor in cursors]


async def _done_or_waiting(work: asyncio.Task[Any], connection: Connection, url: str) -> None:
    """Until the work is done, or the server says that it waits for a lock."""
    waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as observer:

        async def waiting() -> bool:
            cursor = await observer.execute(waits, [connection.info.backend_pid])
            return work.done() or await cursor.fetchone() == (True,)

        await await_for(waiting, "the other settle")


async def _finish(connection: Connection, steps: Steps[Any], answer: list[list[Any]]) -> None:
    """Do what a settle has left after its first transaction, each step in a new one."""
    with suppress(StopIteration):
        while True:
            await connection.commit()
            answer = await _execute(connection, steps.send(answer))
