"""No question of an operator, and no action, reads more of the big table than a bounded part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from relaybox.stores.ledger import Audit, Counted, Entry, Filter, Lane
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.stores.sql.samples import SqlSamples
from relaybox.stores.sql.store import SqlStore
from tests.databases import POSTGRESQL
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
LANES = {"keys": Lane(), "rare": Lane(), "plain": Lane(ordered=False, block=False)}
AUDIT = Audit("tester", "test", {})
HOW = ("Index Scan", "Index Only Scan", "Tid Scan")


async def everything(ledger: SqlLedger) -> None:
    """Ask a ledger everything that it can answer."""
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
    monkeypatch.setattr("relaybox.stores.sql.search.CAP", CAP)
    monkeypatch.setattr("relaybox.stores.sql.ledger.CAP", CAP)
    monkeypatch.setattr("relaybox.stores.sql.journal.LEAST", CAP)


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
