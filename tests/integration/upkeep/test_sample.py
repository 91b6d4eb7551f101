"""The leader's samples in every database: written once a minute, pruned, fenced by the term."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox.core.clock import MonotonicClock
from relaybox.core.settings import Destination
from relaybox.errors import SchemaError
from relaybox.relay.upkeep.sample import Sampling
from relaybox.relay.upkeep.tally import DatabaseTime
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.sql.upkeep.sample import SqlSamples
from relaybox.stores.upkeep import Sample
from tests.integration.upkeep.bench import DAY, Bench, go_on, leading

MINUTE = datetime(2026, 1, 31, 12, tzinfo=UTC)


def found(bench: Bench) -> list[tuple[str, int, int]]:
    sample = bench.tables.sample.c
    with bench.engine.connect() as connection:
        query = sa.select(sample.destination, sample.pending, sample.failed).order_by(sample.destination)
        return [tuple(row) for row in connection.execute(query)]  # type: ignore[misc]


def operation(bench: Bench, age: float) -> None:
    then = datetime.now(UTC) - timedelta(seconds=age)
    values = {"id": uuid4(), "action": "retry", "actor": "ann", "details": {}, "started_at": then}
    bench.execute(sa.insert(bench.tables.operation).values(**values))


async def test_every_destination_and_the_whole_are_sampled(bench: Bench) -> None:
    store = bench.store()
    bench.put("shop")
    bench.put("shop", "failed")
    bench.park("shop", "k")
    bench.put("")
    bench.put("gone")
    time = DatabaseTime(MonotonicClock(), lambda: datetime.now(UTC))
    destinations = [Destination("shop", "console:"), Destination("mail", "console:")]
    sampling = Sampling(SqlSamples(store), destinations, time, MonotonicClock(), go_on)
    assert (await sampling(await leading(SqlUpkeep(store)))).led
    assert found(bench) == [("", 4, 1), ("gone", 1, 0), ("mail", 0, 0), ("shop", 2, 1)]
    with bench.engine.connect() as connection:
        sample = bench.tables.sample.c
        [position] = connection.scalars(sa.select(sample.position).where(sample.destination == ""))
    assert position >= 5


async def test_a_sample_is_written_in_place_of_the_one_before(bench: Bench) -> None:
    store = bench.store()
    samples, term = SqlSamples(store), await leading(SqlUpkeep(store))
    assert await samples.keep(term, MINUTE, [Sample("shop", 1, 2, 3.5)]) == 1
    assert await samples.keep(term, MINUTE, [Sample("shop", 5, 6, None, 7), Sample("mail", 1, 1, 1.0)]) == 2
    assert found(bench) == [("mail", 1, 1), ("shop", 5, 6)]


async def test_who_does_not_lead_writes_and_removes_nothing(bench: Bench) -> None:
    store = bench.store()
    samples, term = SqlSamples(store), await leading(SqlUpkeep(store))
    await samples.keep(term, MINUTE - timedelta(days=4000), [Sample("shop", 1, 2, 3.5)])
    assert await samples.keep(term + 1, MINUTE, [Sample("shop", 1, 2, 3.5)]) is None
    assert await samples.prune(term + 1, "sample", DAY, 10) is None
    assert len(found(bench)) == 1


async def test_what_is_old_is_pruned(bench: Bench) -> None:
    store = bench.store()
    samples, term = SqlSamples(store), await leading(SqlUpkeep(store))
    now = datetime.now(UTC).replace(microsecond=0)
    for days in (1, 2, 3, 4):
        await samples.keep(term, now - timedelta(days=days), [Sample(str(days), 0, 0, None)])
        operation(bench, days * DAY)
    assert await samples.prune(term, "sample", 2.5 * DAY, 1) == 1
    assert [name for name, *_ in found(bench)] == ["1", "2", "3"]
    assert await samples.prune(term, "sample", 2.5 * DAY, 10) == 1
    assert await samples.prune(term, "operation", 2.5 * DAY, 10) == 2
    assert await samples.prune(term, "operation", 2.5 * DAY, 10) == 0
    assert len(bench.column(bench.tables.operation.c.id)) == 2


async def test_where_the_tables_are_older_it_says_so(bench: Bench) -> None:
    store = bench.store()
    samples, term = SqlSamples(store), await leading(SqlUpkeep(store))
    with bench.engine.begin() as connection:
        bench.tables.sample.drop(connection)
    try:
        with pytest.raises(SchemaError, match="too old for this version"):
            await samples.keep(term, MINUTE, [Sample("shop", 1, 2, 3.5)])
    finally:
        with bench.engine.begin() as connection:
            bench.tables.sample.create(connection)
