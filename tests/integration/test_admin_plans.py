"""No question of an operator, and no action, reads more of the big table than a bounded part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID, uuid4

import psycopg
import pytest

from relaybox.ledger import Audit, Counted, Entry, Filter, Lane
from relaybox.stores.ledger import SqlLedger
from relaybox.stores.samples import SqlSamples
from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Query
from relaybox.stores.steps import Steps
from tests.integration.test_plans import (
    MYSQL_FILL,
    SQLITE_FILL,
    Database,
    Explained,
    Mariadb,
    Postgres,
    Sqlite,
    create_tables,
    fill,
    watch,
)

T = TypeVar("T")
CAP = 100
BOUND = 30 * CAP
"""Of 100,000 rows and more. The nearest rows of an event are 2,000."""

BACKLOG = (
    ("plain", 60_000, 0, "delivered"),
    ("keys", 20_000, 1000, "pending"),
    ("plain", 20_000, 0, "pending"),
    ("plain", 20_000, 0, "failed"),
    ("rare", 50, 0, "failed"),
    ("rare", 50, 7, "pending"),
)
FILTERS = (
    Filter(),
    Filter(status="failed"),
    Filter(status="failed", destination="rare"),
    Filter(status="pending", destination="rare", error="x"),
    Filter(status="due"),
    Filter(status="sending"),
    Filter(status="delivered", destination="rare"),
    Filter(status="discarded"),
    Filter(event_type="no.such"),
    Filter(aggregate_type="Order", aggregate_id="7"),
    Filter(ordering_key="key 7", destination="keys"),
    Filter(event_id=uuid4()),
    Filter(since=datetime.now(UTC) - timedelta(hours=1)),
    Filter(until=datetime.now(UTC) - timedelta(hours=1)),
)
LANES = {"keys": Lane(), "rare": Lane(), "plain": Lane(ordered=False, block=False)}
AUDIT = Audit("tester", "test", {})


class Watched:
    """A driver that explains whatever it runs."""

    def __init__(self, database: Database) -> None:
        self.seen: list[Explained] = []
        self._database = database

    async def run(self, begin: Callable[[], Steps[T]], **_: bool) -> T:
        result, seen = watch(self._database, begin())
        self.seen += seen
        return result

    async def close(self) -> None: ...


async def everything(ledger: SqlLedger) -> None:
    """All that a ledger can be asked to do."""
    names = await ledger.names()
    assert names == {"plain", "keys", "one", "rare"}
    counts = await ledger.counts(names)
    assert counts["plain"].capped == {"due", "failed", "delivered"}
    last = await ledger.newest()
    assert last is not None
    for filter in FILTERS:
        await ledger.search(filter, 50, last)
        await ledger.walk(filter, UUID(int=0), last)
    [entry] = (await ledger.search(Filter(), 1)).entries
    assert await ledger.find(entry.id)
    assert not await ledger.find(uuid4())
    await ledger.content(entry.id)
    assert await ledger.contents([entry.id])
    assert not await ledger.marks("nobody", "")
    await ledger.attempts(entry.id)
    [keyed] = (await ledger.search(Filter(status="pending", destination="rare"), 1)).entries
    assert await ledger.head("rare", keyed.ordering_key or "", block=True)
    await ledger.places()
    await ledger.relays()
    await look_at_the_journal(ledger)
    await change(ledger, (await ledger.search(Filter(status="failed", destination="rare"), 50)).entries)


async def look_at_the_journal(ledger: SqlLedger) -> None:
    for destination in (None, "plain"):
        await ledger.history(86_400.0, 600, destination)
        assert (await ledger.failed_rows(destination, CAP)).failures
    flows = await ledger.flows({"plain": 60.0, "keys": 60.0, "rare": 600.0})
    assert all(flow.pending for flow in flows.values())
    for filter in FILTERS:
        await ledger.count(filter)
    assert await ledger.count(Filter(status="failed", fingerprint="0" * 12)) == Counted(0, True)
    await ledger.search(Filter(status="failed", fingerprint="0" * 12), 50)
    await ledger.audits(50)
    await ledger.note(AUDIT)
    id_ = uuid4()
    await ledger.begin(id_, "retry", "tester", {}, None)
    assert await ledger.advance(id_, 1, 0)
    assert await ledger.cancel(id_)
    await ledger.finish(id_, "done", 1, 0)
    assert await ledger.operation(id_) in await ledger.operations(50)


async def take_samples(samples: SqlSamples) -> None:
    """All that the leader does for the charts."""
    assert set(await samples.names()) == {"plain", "keys", "rare"}
    taken = [await samples.measure(name, CAP) for name in ("plain", "keys", "rare")]
    assert [one.pending for one in taken] == [CAP, CAP, 30]
    position, _ = await samples.position()
    assert position is not None
    assert await samples.keep(0, datetime.now(UTC), taken) is None
    assert await samples.prune(0, "sample", 1.0, 10) is None


async def change(ledger: SqlLedger, failed: Sequence[Entry]) -> None:
    assert len(failed) == 50
    assert len(await ledger.retry(failed[:10], LANES, AUDIT)) == 10
    assert len(await ledger.discard(failed[:20], LANES, AUDIT)) == 10
    assert len(await ledger.move(failed[20:30], "keys", LANES, AUDIT)) == 10
    left = (await ledger.search(Filter(status="failed", destination="rare"), 50)).entries
    assert len(await ledger.replay(left, None, LANES, AUDIT)) == len(left) == 20
    keyed = (await ledger.search(Filter(status="pending", destination="rare"), 50)).entries
    assert len(await ledger.discard(keyed, LANES, AUDIT)) == len(keyed) == 50
    await ledger.pause("plain", "test", None, AUDIT)
    assert await ledger.resume("plain", AUDIT)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows so small that leaving one shows."""
    monkeypatch.setattr("relaybox.stores.search.CAP", CAP)
    monkeypatch.setattr("relaybox.stores.ledger.CAP", CAP)
    monkeypatch.setattr("relaybox.stores.journal.LEAST", CAP)


def ledger_of(database: Any) -> tuple[SqlLedger, Watched]:
    driver = Watched(database)
    return SqlLedger(SqlStore(database.steps, driver)), driver


@pytest.mark.parametrize("analysed", [False, True], ids=["as it is", "analysed"])
@pytest.mark.parametrize("kind", ["postgresql-18", "postgresql-15"])
async def test_postgresql_reads_windows(
    kind: str, analysed: bool, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database(kind)
    tables = create_tables(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox_event SET (autovacuum_enabled = off)")
    for destination, rows, keys, status in BACKLOG:
        fill(url, destination, rows, keys=keys, status=status)
    if analysed:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ANALYZE outbox_event")
    database = Postgres(url, tables)
    ledger, driver = ledger_of(database)
    await everything(ledger)
    await take_samples(SqlSamples(SqlStore(database.steps, driver)))
    database.close()
    for explained in driver.seen:
        assert explained.largest_sort <= BOUND, explained
        for access in explained.accesses:
            assert access.how in ("Index Scan", "Index Only Scan", "Tid Scan"), explained
            assert access.rows <= BOUND, explained


async def test_mariadb_reads_windows(fresh_database: Callable[[str], str]) -> None:
    url = fresh_database("mariadb")
    database = Mariadb(url, create_tables(url))
    database.execute(Query("SET max_recursive_iterations = 1000000", ()))
    for destination, rows, keys, status in BACKLOG:
        database.execute(Query(MYSQL_FILL, (rows, destination, keys, status, status, status)))
    database.end()
    ledger, driver = ledger_of(database)
    await everything(ledger)
    await take_samples(SqlSamples(SqlStore(database.steps, driver)))
    database.close()
    for explained in driver.seen:
        for access in explained.accesses:
            assert access.by is not None, explained
            assert access.rows <= BOUND, explained


async def test_sqlite_reads_by_indexes(fresh_database: Callable[[str], str]) -> None:
    url = fresh_database("sqlite")
    database = Sqlite(url, create_tables(url))
    for destination, rows, keys, status in BACKLOG:
        database.execute(Query(SQLITE_FILL, (rows, destination, keys, status, status, status)))
    ledger, driver = ledger_of(database)
    await everything(ledger)
    await take_samples(SqlSamples(SqlStore(database.steps, driver)))
    database.close()
    assert driver.seen
    for explained in driver.seen:
        for access in explained.accesses:
            assert access.by is not None, explained
