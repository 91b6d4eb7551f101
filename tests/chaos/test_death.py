"""What a relay's death or stall does to the rows it held."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any, TypeAlias
from uuid import UUID

import msgspec
import psycopg
import pytest
import sqlalchemy as sa

from relaybox import Outbox
from relaybox.emit.row import Call
from relaybox.event import Delivery
from relaybox.outcome import Delivered, Outcome, Retried
from relaybox.store import Settlement, Store, Want
from relaybox.stores.dialects import POSTGRESQL
from relaybox.stores.statements import Query, Statements
from relaybox.stores.steps import OneStatement, Steps, StoreSteps
from tests.chaos.crew import DESTINATION, make_outbox, open_store
from tests.chaos.mortal import POISON
from tests.chaos.scene import stored
from tests.commit import ROOT
from tests.databases import EVERY_KIND, KINDS, engine
from tests.waiting import await_for

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]
ORDER = pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
DEATHS = 5


@contextmanager
def mortal(deed: str, ordered: bool, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of ``mortal.py``, killed at the end whatever happened."""
    command = [sys.executable, "-m", "tests.chaos.mortal", deed, str(ordered).lower(), url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def heard(output: IO[bytes] | None) -> dict[str, Any]:
    assert output is not None
    line = output.readline()
    assert line, "the process ended without a word"
    said: dict[str, Any] = msgspec.json.decode(line)
    return said


def emit(url: str, count: int, *, ordered: bool, keys: int = 10, max_attempts: int = 5) -> Outbox:
    """An outbox with ``count`` rows of one destination."""
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


@pytest.mark.parametrize("kind", KINDS)
@ORDER
async def test_a_relay_that_stalls_beyond_its_lease_settles_nothing_and_is_told_so(
    kind: str, ordered: bool, migrated_database: Callable[[str], str]
) -> None:
    url = migrated_database(kind)
    outbox = emit(url, 6, ordered=ordered, keys=6)
    with mortal("stall", ordered, url) as process:
        held = [UUID(id_) for id_ in heard(process.stdout)["held"]]
        assert len(held) == 6
        process.send_signal(signal.SIGSTOP)
        await _take_over(open_store(url, outbox), ordered)
        before = stored(engine(url), outbox), attempts(url, outbox)
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        told = heard(process.stdout)
        assert process.wait(60) == 0
    assert {name: set(map(UUID, ids)) for name, ids in told.items()} == {
        "extend": set(held),
        "settle": set(held),
        "release": set(held),
    }
    assert (stored(engine(url), outbox), attempts(url, outbox)) == before


async def _take_over(store: Store, ordered: bool) -> None:
    """As another relay: take every row when its lease is over; deliver two, retry two, hold two."""
    taken = await _claim_again(store, Want(DESTINATION, "other", lease=60, ordered=ordered), 6)
    outcomes: list[Outcome] = [Delivered(), Delivered(), Retried(60, "later"), Retried(60, "later")]
    lost = await store.settle(list(map(Settlement, taken[:4], outcomes)))
    assert not lost
    await store.close()


@pytest.mark.parametrize("kind", EVERY_KIND)
@ORDER
def test_one_event_that_kills_its_relay_takes_none_of_its_batch_with_it(
    kind: str, ordered: bool, migrated_database: Callable[[str], str]
) -> None:
    url = migrated_database(kind)
    # The first two deaths are a whole batch's and count for nobody; the others are the poison's alone.
    outbox = emit(url, 100, ordered=ordered, max_attempts=DEATHS - 2)
    with mortal("poison", ordered, url) as process:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    said = [msgspec.json.decode(line) for line in output.splitlines()]
    assert said[:2] == [{"claimed": 100}] * 2
    assert all(claim == {"claimed": 1} for claim in said[2:-1])
    assert said[-1] == {"deaths": DEATHS}
    rows = stored(engine(url), outbox)
    poisonous = rows.pop(POISON)
    assert poisonous.status == "failed"
    assert f"the relay died {DEATHS} times" in poisonous.error_message
    assert [(row.status, row.attempts) for row in rows] == [("delivered", 1)] * 99


async def _claim_again(store: Store, want: Want, count: int) -> list[Delivery]:
    """The rows that a stalled relay left behind, as soon as its lease is over."""
    taken: list[Delivery] = []

    async def all_taken() -> bool:
        taken.extend((await store.claim(want)).deliveries)
        return len(taken) == count

    await await_for(all_taken, "the lease over")
    return taken


async def test_a_key_goes_on_when_two_relays_settle_its_rows_at_the_same_moment(
    migrated_database: Callable[[str], str],
) -> None:
    """One had stalled and kept the second row, the other took over the first; neither saw the other end."""
    url = migrated_database("postgresql-18")
    outbox = emit(url, 4, ordered=True, keys=1)
    stalled, other = await _two_holders_of_one_key(url, outbox)
    statements = Statements(outbox.tables, POSTGRESQL, "format")
    steps = StoreSteps(statements, POSTGRESQL, OneStatement(statements))
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
    """A stalled relay holds rows 1 and 2, another took over 1; 3 and 4 are parked."""
    store, event = open_store(url, outbox), outbox.tables.event
    stalled = await store.claim(Want(DESTINATION, "stalled", limit=2, lease=60, ordered=True))
    assert (await store.claim(Want(DESTINATION, "other", ordered=True))).parked == 2
    with engine(url).begin() as connection:
        held = event.c.lease_token.is_not(None)
        connection.execute(event.update().where(held).values(leased_until=event.c.created_at))
    other = await store.claim(Want(DESTINATION, "other", limit=1, ordered=True))
    await store.close()
    assert (len(stalled.deliveries), len(other.deliveries)) == (2, 1)
    return stalled.deliveries, other.deliveries


def _settle(steps: StoreSteps, held: Sequence[Delivery]) -> Steps[None]:
    """As a store does it: what is settled is committed before the next of the key is made due."""
    settlements = [Settlement(delivery, Delivered()) for delivery in held]
    yield from steps.settle(settlements, "block")
    yield from steps.go_on(steps.to_go_on(settlements), "block")


async def _transaction(url: str) -> Connection:
    """A connection that waits a while for locks, and not for ever."""
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
    """What a settle still has to do after its first transaction, each time in a new one."""
    with suppress(StopIteration):
        while True:
            await connection.commit()
            answer = await _execute(connection, steps.send(answer))
