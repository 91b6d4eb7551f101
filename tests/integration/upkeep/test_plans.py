"""Upkeep finds its rows by index, and never looks through more than a batch of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import psycopg
import pytest

from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Query
from relaybox.stores.steps import Steps
from relaybox.stores.upkeep import SqlUpkeep
from relaybox.upkeep import Slice
from tests.integration.test_plans import (
    BATCH,
    HEADS,
    IDS,
    MYSQL_FILL,
    MYSQL_HEADS,
    MYSQL_PENDING,
    PENDING,
    SQLITE_FILL,
    Access,
    Database,
    Explained,
    Mariadb,
    Postgres,
    Sqlite,
    _actual,
    _nodes,
    create_tables,
    fill,
    indexes,
    watch,
)

T = TypeVar("T")
DELIVERED = "idx_outbox_event_delivered"
MYSQL_DELIVERED = "idx_outbox_event_kept"
PARK = "UPDATE outbox_event SET next_attempt_at = NULL WHERE status = 'pending' AND destination <> 'plain'"
DISCARD = """
UPDATE outbox_event SET status = 'discarded', next_attempt_at = NULL
WHERE status = 'pending' AND destination = 'plain'"""


class AllTables(Postgres):
    """Looks at how every table is read."""

    def explain(self, query: Query) -> Explained:
        self._connection.execute("SAVEPOINT explained")
        [[[plan]]] = self._connection.execute(
            f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {query.sql}", query.params
        )
        self._connection.execute("ROLLBACK TO SAVEPOINT explained")
        nodes = [node for node in _nodes(plan["Plan"]) if node["Node Type"] != "ModifyTable"]
        accesses = [
            Access(node["Node Type"], node.get("Index Name"), node["Relation Name"], _actual(node))
            for node in nodes
            if "Relation Name" in node
        ]
        sorts = [_actual(node) for node in nodes if "Sort" in node["Node Type"]]
        return Explained(query.sql, accesses, max(sorts, default=0))


class Explaining:
    """A driver that explains every statement before it executes it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.seen: list[Explained] = []

    async def run(self, begin: Callable[[], Steps[T]], **_: bool) -> T:
        result, seen = watch(self, begin())
        self.seen += seen
        return result

    def begin(self) -> None:
        self.database.begin()

    def end(self) -> None:
        self.database.end()

    def explain(self, query: Query) -> Explained:
        # How many rows the last statement changed can be asked only once, and right behind it.
        return self.database.explain(query) if "outbox" in query.sql else Explained(query.sql, [])

    def execute(self, query: Query) -> list[Any]:
        return self.database.execute(query)

    async def close(self) -> None: ...

    def take(self) -> list[Explained]:
        seen, self.seen = self.seen, []
        return seen


class Bench:
    """Upkeep on a database that explains; what is led is led by this test."""

    def __init__(self, database: AllTables | Mariadb | Sqlite) -> None:
        self.driver = Explaining(database)
        self.upkeep = SqlUpkeep(SqlStore(database.steps, self.driver))

    async def lead(self) -> int:
        term = await self.upkeep.lead("me", 3600.0)
        assert term is not None
        return term

    async def do_all(self) -> dict[str, list[Explained]]:
        """Everything that is led, with how it was done."""
        upkeep, take, term = self.upkeep, self.driver.take, await self.lead()
        take()
        seen = {}
        assert "keys" in await upkeep.kept()
        seen["kept"] = take()
        assert await upkeep.prune_delivered(term, "keys", 86_400.0, None, BATCH) == Slice(0, None)
        pruned = await upkeep.prune_delivered(term, "keys", 0.0, None, BATCH)
        assert pruned is not None
        assert pruned.changed == BATCH
        await upkeep.prune_delivered(term, "keys", 0.0, pruned.after, BATCH)
        seen["delivered"] = take()
        walked = await upkeep.prune_discarded(term, lambda _: 0.0, None, BATCH)
        assert walked is not None
        assert walked.after is not None
        await upkeep.prune_discarded(term, lambda _: 0.0, walked.after, BATCH)
        seen["discarded"] = take()
        walked = await upkeep.prune_orphans(term, None, BATCH)
        assert walked is not None
        assert walked.changed > 0
        seen["orphans"] = take()
        # One key, whose head failed: nothing to do. Many keys, each with a head to make due.
        blocked = await upkeep.sweep(term, "one", True, None, BATCH)
        assert blocked is not None
        assert blocked.changed == 0
        swept = await upkeep.sweep(term, "keys", True, None, BATCH)
        assert swept is not None
        assert swept.changed == BATCH
        seen["sweep"] = take()
        assert await upkeep.unpark(term, "one", BATCH) == BATCH
        seen["unpark"] = take()
        return seen


BACKLOG = (
    ("keys", 50_000, 1000, "delivered"),
    ("plain", 10_000, 0, "pending"),
    ("one", 1, 1, "failed"),
    ("keys", 20_000, 1000, "pending"),
    ("one", 20_000, 1, "pending"),
)
SIDE_TABLES = (
    """INSERT INTO outbox_attempt (delivery_id, attempt, relay, error_message)
    SELECT gen_random_uuid(), 1, 'r', 'e' FROM generate_series(1, 20000)""",
    """INSERT INTO outbox_idempotency (event_type, idempotency_key, event_id, created_at)
    SELECT 'order.paid', n::text, gen_random_uuid(), now() - n * interval '1 minute'
    FROM generate_series(1, 20000) AS n""",
    """INSERT INTO outbox_stats (minute, destination, relay, lag)
    SELECT now() - n * interval '1 minute', 'shop', 'r', '{}' FROM generate_series(1, 20000) AS n""",
    """INSERT INTO inbox_message (consumer, message_id, processed_at)
    SELECT 'c', n, now() - n * interval '1 minute' FROM generate_series(1, 20000) AS n""",
    """INSERT INTO outbox_audit (actor, action, details, at)
    SELECT 'me', 'retry', '{}', now() - n * interval '1 minute' FROM generate_series(1, 20000) AS n""",
)


@pytest.fixture
async def postgresql(
    fresh_database: Callable[[str], str], request: pytest.FixtureRequest
) -> AsyncIterator[Bench]:
    url = fresh_database("postgresql-18")
    tables = create_tables(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox_event SET (autovacuum_enabled = off)")
        for destination, rows, keys, status in BACKLOG:
            fill(url, destination, rows, keys=keys, status=status)
        for statement in (PARK, DISCARD, *SIDE_TABLES, *request.param):
            connection.execute(statement)
    database = AllTables(url, tables)
    yield Bench(database)
    database.close()


@pytest.mark.parametrize("postgresql", [(), ("ANALYZE",)], ids=["as it is", "analysed"], indirect=True)
async def test_postgresql_with_a_hundred_thousand_rows(postgresql: Bench) -> None:
    seen = await postgresql.do_all()
    term = await postgresql.lead()
    for history in ("idempotency", "inbox", "stats", "audit"):
        assert await postgresql.upkeep.prune_history(term, history, 86_400.0, BATCH) == BATCH
        seen[history] = postgresql.driver.take()
    for explained in (one for several in seen.values() for one in several):
        assert explained.largest_sort <= 2 * BATCH, explained
        for access in explained.accesses:
            assert access.rows <= 2 * BATCH, explained
            assert access.how != "Seq Scan", explained
    assert indexes_of_events(seen["kept"]) == {DELIVERED}
    assert indexes_of_events(seen["delivered"]) == {DELIVERED, IDS}
    assert indexes_of_events(seen["discarded"]) == {IDS}
    assert indexes_of_events(seen["orphans"]) == {IDS}
    assert indexes_of_events(seen["sweep"]) == {PENDING, HEADS, IDS}
    assert indexes_of_events(seen["unpark"]) == {PENDING, IDS}


def indexes_of_events(seen: list[Explained]) -> set[str]:
    return {a.by for one in seen for a in one.accesses if a.condition == "outbox_event" and a.by is not None}


async def test_mariadb_reads_by_its_indexes(fresh_database: Callable[[str], str]) -> None:
    url = fresh_database("mariadb")
    database = Mariadb(url, create_tables(url))
    database.execute(Query("SET max_recursive_iterations = 1000000", ()))
    for destination, rows, keys, status in BACKLOG:
        database.execute(Query(MYSQL_FILL, (rows, destination, keys, status, status, status)))
    attempts = """INSERT INTO outbox_attempt (delivery_id, attempt, relay, error_message)
        SELECT REVERSE(id), 1, 'r', 'e' FROM outbox_event LIMIT 1000"""
    for statement in (PARK, DISCARD, attempts):
        database.execute(Query(statement, ()))
    database.end()
    seen = await Bench(database).do_all()
    database.close()
    for explained in (one for several in seen.values() for one in several):
        for access in explained.accesses:
            assert access.how in ("const", "eq_ref", "ref", "range"), explained
            assert access.rows <= 2 * BATCH, explained
    assert indexes(seen["delivered"]) == {MYSQL_DELIVERED, "PRIMARY"}
    assert indexes(seen["discarded"]) == indexes(seen["orphans"]) == {"PRIMARY"}
    assert indexes(seen["sweep"]) == {MYSQL_PENDING, MYSQL_HEADS, "PRIMARY"}
    assert indexes(seen["unpark"]) == {MYSQL_PENDING, "PRIMARY"}


@pytest.mark.parametrize("analysed", [False, True], ids=["as it is", "analysed"])
async def test_sqlite_reads_by_its_indexes(analysed: bool, fresh_database: Callable[[str], str]) -> None:
    url = fresh_database("sqlite")
    database = Sqlite(url, create_tables(url))
    fill_sql = SQLITE_FILL.replace("n % nullif(?, 0)", "(n % nullif(?, 0))")
    for destination, rows, keys, status in BACKLOG:
        database.execute(Query(fill_sql, (rows, destination, keys, status, status, status)))
    attempts = """INSERT INTO outbox_attempt (delivery_id, attempt, relay, error_message)
        SELECT lower(hex(randomblob(16))), 1, 'r', 'e' FROM outbox_event LIMIT 1000"""
    for statement in (PARK, DISCARD, attempts, *["ANALYZE"] * analysed):
        database.execute(Query(statement, ()))
    seen = await Bench(database).do_all()
    database.close()
    for explained in (one for several in seen.values() for one in several):
        for access in explained.accesses:
            assert access.how == "SEARCH", explained
    ids = "sqlite_autoindex_outbox_event_1"
    assert indexes(seen["kept"]) == {DELIVERED}
    assert indexes(seen["delivered"]) == {DELIVERED, ids}
    assert indexes(seen["discarded"]) == indexes(seen["orphans"]) == {ids}
    assert indexes(seen["sweep"]) == {PENDING, HEADS, ids}
    assert indexes(seen["unpark"]) == {PENDING, ids}
