"""No question of an operator, and no action, reads more of the big table than a bounded part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from relaybox.stores.ledger import Audit, Counted, Entry, Filter, Policy
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.sql.upkeep.sample import SqlSamples
from tests.databases import POSTGRESQL
from tests.integration.operated import stop_counting_at
from tests.integration.plans.explaining import Driver, each_database

pytestmark = pytest.mark.full

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
LANES = {"keys": Policy(), "rare": Policy(), "plain": Policy(ordered=False, block=False)}
AUDIT = Audit("tester", "test", {})
HOW = ("Index Scan", "Index Only Scan", "Tid Scan")


async def everything(ledger: SqlLedger) -> None:
    """Ask a ledger everything that it can answer."""
    names = await ledger.overview.names()
    assert names == {"plain", "keys", "one", "rare"}
    counts = await ledger.overview.counts(names)
    assert counts["plain"].capped == {"due", "failed", "delivered"}
    last = await ledger.entries.newest()
    assert last is not None
    for filter in FILTERS:
        await ledger.entries.search(filter, 50, last)
        await ledger.entries.walk(filter, UUID(int=0), last)
    [entry] = (await ledger.entries.search(Filter(), 1)).entries
    assert await ledger.entries.find(entry.id)
    assert not await ledger.entries.find(uuid4())
    await ledger.entries.content(entry.id)
    assert await ledger.entries.contents([entry.id])
    assert not await ledger.overview.marks("nobody", "")
    await ledger.entries.attempts(entry.id)
    [keyed] = (await ledger.entries.search(Filter(status="pending", destination="rare"), 1)).entries
    assert await ledger.entries.head("rare", keyed.ordering_key or "", block=True)
    await ledger.overview.states()
    await ledger.overview.relays()
    await look_at_the_journal(ledger)
    failed = await ledger.entries.search(Filter(status="failed", destination="rare"), 50)
    await change(ledger, failed.entries)


async def look_at_the_journal(ledger: SqlLedger) -> None:
    for destination in (None, "plain"):
        await ledger.history.steps(86_400.0, 600, destination)
        assert (await ledger.history.failed_rows(destination, CAP))[0]
    flows = await ledger.history.flows({"plain": 60.0, "keys": 60.0, "rare": 600.0})
    assert all(flow.pending for flow in flows.values())
    for filter in FILTERS:
        await ledger.entries.count(filter)
    assert await ledger.entries.count(Filter(status="failed", fingerprint="0" * 12)) == Counted(0, True)
    await ledger.entries.search(Filter(status="failed", fingerprint="0" * 12), 50)
    await ledger.journal.audits(50)
    await ledger.journal.note(AUDIT)
    id_ = uuid4()
    await ledger.journal.begin(id_, "retry", "tester", {}, None)
    assert await ledger.journal.advance(id_, 1, 0)
    assert await ledger.journal.cancel(id_)
    await ledger.journal.finish(id_, "done", 1, 0)
    assert await ledger.journal.operation(id_) in await ledger.journal.operations(50)


async def take_samples(samples: SqlSamples) -> None:
    """Do everything that the leader does for the charts."""
    assert set(await samples.names()) == {"plain", "keys", "rare"}
    taken = [await samples.measure(name, CAP) for name in ("plain", "keys", "rare")]
    assert [one.pending for one in taken] == [CAP, CAP, 30]
    position, _ = await samples.position()
    assert position is not None
    assert await samples.keep(0, datetime.now(UTC), taken) is None
    assert await samples.prune(0, "sample", 1.0, 10) is None


async def change(ledger: SqlLedger, failed: Sequence[Entry]) -> None:
    assert len(failed) == 50
    assert len(await ledger.changes.retry(failed[:10], LANES, AUDIT)) == 10
    assert len(await ledger.changes.discard(failed[:20], LANES, AUDIT)) == 10
    assert len(await ledger.changes.move(failed[20:30], "keys", LANES, AUDIT)) == 10
    left = (await ledger.entries.search(Filter(status="failed", destination="rare"), 50)).entries
    assert len(await ledger.changes.replay(left, None, LANES, AUDIT)) == len(left) == 20
    keyed = (await ledger.entries.search(Filter(status="pending", destination="rare"), 50)).entries
    assert len(await ledger.changes.discard(keyed, LANES, AUDIT)) == len(keyed) == 50
    await ledger.changes.pause("plain", "test", None, AUDIT)
    assert await ledger.changes.resume("plain", AUDIT)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows so small that leaving one shows."""
    stop_counting_at(CAP, monkeypatch)
    monkeypatch.setattr("relaybox.stores.sql.ledger.journal.LEAST", CAP)


@each_database
async def test_what_operators_do_reads_windows(kind: str, analysed: bool, opened: Callable[..., Any]) -> None:
    database = opened(kind, BACKLOG, analysed=analysed)
    driver = Driver(database)
    store = SqlStore(database.steps, driver)
    await everything(SqlLedger(store))
    await take_samples(SqlSamples(store))
    assert driver.seen
    for explained in driver.seen:
        assert explained.largest_sort <= BOUND, explained
        for access in explained.of_events():
            assert access.by is not None or access.how == "Tid Scan", explained
            assert access.rows <= BOUND, explained
            assert kind not in POSTGRESQL or access.how in HOW, explained
