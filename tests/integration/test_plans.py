"""How the databases go about the statements of the stores: by index, and never through more than a batch.

The very steps of a store are run, and each statement is explained just before it is executed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import psycopg
import pymysql
import pytest
import sqlalchemy as sa

from relaybox.event import Delivery
from relaybox.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.schema import Tables, make_tables
from relaybox.store import Claim, DeadLetter, Settlement, Want
from relaybox.stores.dialects import MARIADB, POSTGRESQL, SQLITE
from relaybox.stores.statements import Query, Statements
from relaybox.stores.steps import OneStatement, Steps, Stepwise, StoreSteps

T = TypeVar("T")
BATCH = 100
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mariadb+pymysql", "sqlite": "sqlite"}
KINDS = ["postgresql-18", "postgresql-15"]

PENDING = "idx_outbox_event_pending_next_attempt"
HEADS = "idx_outbox_event_key_head"
IDS = "outbox_event_pkey"
MYSQL_PENDING = "idx_outbox_event_due"
MYSQL_HEADS = "idx_outbox_event_head"


class Access(NamedTuple):
    """One place in a plan where ``outbox_event`` is read."""

    how: str
    by: str | None
    condition: str
    rows: float
    """Rows read, where the plan was also run."""


class Explained(NamedTuple):
    """One statement of a step and how it was executed."""

    sql: str
    accesses: list[Access]
    largest_sort: float = 0
    buffers: int = 0
    """Pages looked at, of tables and indexes."""


class Database(Protocol):
    """Explains and executes statements on one connection."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def explain(self, query: Query) -> Explained: ...

    def execute(self, query: Query) -> list[Any]: ...


def watch(database: Database, steps: Steps[T]) -> tuple[T, list[Explained]]:
    """Run the steps in one transaction; their result, and how each statement was executed."""
    seen: list[Explained] = []
    database.begin()
    try:
        queries = next(steps)
        while True:
            rows = []
            for query in queries:
                seen.append(database.explain(query))
                rows.append(database.execute(query))
            queries = steps.send(rows)
    except StopIteration as end:
        return end.value, seen
    finally:
        database.end()


def mixed(deliveries: Iterable[Delivery]) -> list[Settlement]:
    """Every outcome there is, in turns."""
    outcomes: list[Outcome] = [
        Delivered(), Delivered(keep=False), Retried(60.0, "busy"), Failed("refused"), Released()
    ]  # fmt: skip
    return [Settlement(delivery, outcomes[at % 5]) for at, delivery in enumerate(deliveries)]


class Seen(NamedTuple):
    """Whatever a store does, explained."""

    claim: list[Explained]
    ordered: list[Explained]
    one_key: list[Explained]
    parking: list[Explained]
    extend: list[Explained]
    settle: list[Explained]

    def all(self) -> list[Explained]:
        """Every statement."""
        return [explained for operation in self for explained in operation]


def work(database: Database, steps: StoreSteps) -> Seen:
    """Everything a store does: on a destination without order, one of many keys and one of a single key."""
    whole, with_suspects = watch(database, steps.claim(Want("plain", "me", limit=BATCH)))
    claimed, claim = watch(database, steps.claim(Want("plain", "me", limit=BATCH, suspects=False)))
    first, ordered = watch(database, steps.claim(Want("keys", "me", limit=BATCH, ordered=True)))
    _, one_key = watch(database, steps.claim(Want("one", "me", limit=BATCH, ordered=True)))
    nothing, parking = watch(database, steps.claim(Want("one", "me", limit=BATCH, ordered=True)))
    held = (*claimed.deliveries, *first.deliveries)
    assert len(held) == 2 * BATCH
    assert nothing == Claim(parked=BATCH)
    lost, extend = watch(database, steps.extend(held, 60.0))
    assert not lost
    outcomes = mixed(held)
    lost, settle = watch(database, steps.settle(outcomes, "block", DeadLetter("grave")))
    assert not lost
    _, go_on = watch(database, steps.go_on(steps.to_go_on(outcomes), "block"))
    delivered = [Settlement(delivery, Delivered()) for delivery in whole.deliveries]
    lost, settle_lease = watch(database, steps.settle(delivered, "block"))
    assert len(delivered) == BATCH
    assert not lost
    settles = [*settle, *go_on, *settle_lease]
    return Seen([*with_suspects, *claim], ordered, one_key, parking, extend, settles)


class Postgres:
    """EXPLAIN ANALYZE, run and taken back, then the statement itself; always after the pinned plan.

    With ``cached`` each statement is prepared once and keeps the plan it got at its first execution.
    """

    def __init__(self, url: str, tables: Tables, *, cached: bool = False) -> None:
        self.statements = Statements(tables, POSTGRESQL, "numeric" if cached else "format")
        self.steps = StoreSteps(self.statements, POSTGRESQL, OneStatement(self.statements))
        self._connection = psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor)
        self._connection.adapters.register_loader("jsonb", psycopg.types.string.TextLoader)
        self._cached = cached
        self._prepared: dict[str, str] = {}
        if cached:
            self._connection.execute("SET plan_cache_mode = force_generic_plan")

    def close(self) -> None:
        self._connection.close()

    def begin(self) -> None:
        self._connection.execute("BEGIN")
        self._connection.execute(self.statements("pin_plan").sql)

    def end(self) -> None:
        self._connection.execute("COMMIT")

    def explain(self, query: Query) -> Explained:
        call = self._call(query)
        self._connection.execute("SAVEPOINT explained")
        analyze = f"EXPLAIN (ANALYZE, TIMING OFF, BUFFERS, FORMAT JSON) {call}"
        [[[plan]]] = self._connection.execute(analyze, query.params)
        self._connection.execute("ROLLBACK TO SAVEPOINT explained")
        assert "JIT" not in plan, "a plan that costs nothing to speak of was compiled"
        nodes = list(_nodes(plan["Plan"]))
        sorts = [_actual(node) for node in nodes if "Sort" in node["Node Type"]]
        accesses = [_access(node) for node in nodes if _reads_events(node)]
        buffers = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
        return Explained(query.sql, accesses, max(sorts, default=0), buffers)

    def execute(self, query: Query) -> list[Any]:
        cursor = self._connection.execute(self._call(query), query.params)
        return list(cursor) if cursor.description else []

    def _call(self, query: Query) -> str:
        if not self._cached:
            return query.sql
        if query.sql not in self._prepared:
            name = self._prepared[query.sql] = f"statement_{len(self._prepared)}"
            self._connection.execute(f"PREPARE {name} AS {query.sql}")
        marks = ", ".join(["%s"] * len(query.params))
        return (
            f"EXECUTE {self._prepared[query.sql]}({marks})"
            if marks
            else f"EXECUTE {self._prepared[query.sql]}"
        )


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def _reads_events(node: dict[str, Any]) -> bool:
    return node.get("Relation Name") == "outbox_event" and node["Node Type"] != "ModifyTable"


def _actual(node: dict[str, Any]) -> float:
    return float((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])


def _access(node: dict[str, Any]) -> Access:
    condition = node.get("Index Cond") or node.get("TID Cond") or ""
    return Access(node["Node Type"], node.get("Index Name"), condition, _actual(node))


FILL = """
INSERT INTO outbox_event (id, event_id, destination, aggregate_type, aggregate_id, event_type, payload,
                          headers, ordering_key, idempotency_key, status, next_attempt_at, delivered_at)
SELECT id, id, %(destination)s, 'Order', (n %% 1000)::text, 'order.paid', '{}', '{}',
       'key ' || n %% nullif(%(keys)s, 0), n::text, %(status)s::text,
       CASE WHEN %(status)s::text = 'pending' THEN now() END,
       CASE WHEN %(status)s::text = 'delivered' THEN now() END
FROM (SELECT n, gen_random_uuid() AS id FROM generate_series(1, %(rows)s) AS n) AS numbers"""


def fill(url: str, destination: str, rows: int, *, keys: int = 0, status: str = "pending") -> None:
    values = {"destination": destination, "rows": rows, "keys": keys, "status": status}
    with psycopg.connect(url) as connection:
        connection.execute(FILL, values)


def fill_all(url: str, rows: int) -> None:
    """Due rows for each of the three destinations."""
    fill(url, "plain", rows)
    fill(url, "keys", rows, keys=1000)
    fill(url, "one", rows, keys=1)


def create_tables(url: str) -> Tables:
    parts = sa.make_url(url)
    engine = sa.create_engine(parts.set(drivername=DRIVERS[parts.drivername]))
    metadata = sa.MetaData()
    tables = make_tables(metadata)
    metadata.create_all(engine)
    with engine.begin() as connection:
        names = [{"name": name} for name in ("plain", "keys", "one")]
        connection.execute(sa.insert(tables.destination), names)
    engine.dispose()
    return tables


@pytest.fixture
def postgres() -> Iterator[Callable[..., Postgres]]:
    """Connects to a database; closed after the test."""
    opened: list[Postgres] = []

    def connect(url: str, tables: Tables, *, cached: bool = False) -> Postgres:
        opened.append(Postgres(url, tables, cached=cached))
        return opened[-1]

    yield connect
    for database in opened:
        database.close()


def assert_bounded(seen: Seen) -> None:
    """By the index that serves, with a condition that bounds it, and never through more than the batch."""
    by_index = {PENDING: "destination", HEADS: "ordering_key", IDS: "(id = "}
    for explained in seen.all():
        # A parking claim looks at the rows of the batch and at one head.
        assert explained.largest_sort <= 2 * BATCH, explained
        for access in explained.accesses:
            assert access.how in ("Index Scan", "Tid Scan"), explained
            assert access.rows <= 2 * BATCH, explained
            if access.by is not None:
                assert by_index[access.by] in access.condition, explained
    assert indexes(seen.claim) == {PENDING}
    for ordered in (seen.ordered, seen.one_key, seen.parking):
        assert indexes(ordered) == {PENDING, HEADS}
    assert indexes(seen.extend) == {IDS}
    assert indexes(seen.settle) == {IDS, HEADS}


def indexes(explained: Iterable[Explained]) -> set[str]:
    """The indexes by which rows were found."""
    return {access.by for one in explained for access in one.accesses if access.by is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_without_statistics_is_read_by_index(
    kind: str, fresh_database: Callable[[str], str], postgres: Callable[..., Postgres]
) -> None:
    url = fresh_database(kind)
    tables = create_tables(url)
    with psycopg.connect(url) as connection:
        connection.execute("ALTER TABLE outbox_event SET (autovacuum_enabled = off)")
    fill_all(url, 5_000)
    database = postgres(url, tables)
    assert_bounded(work(database, database.steps))


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_from_before_the_backlog_do_no_harm(
    kind: str, fresh_database: Callable[[str], str], postgres: Callable[..., Postgres]
) -> None:
    url = fresh_database(kind)
    tables = create_tables(url)
    fill(url, "keys", 20_000, keys=1000, status="delivered")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox_event SET (autovacuum_enabled = off)")
        connection.execute("ANALYZE outbox_event")
    fill_all(url, 20_000)
    database = postgres(url, tables)
    assert_bounded(work(database, database.steps))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_kept_from_a_tiny_table_serves_a_large_one(
    kind: str, fresh_database: Callable[[str], str], postgres: Callable[..., Postgres]
) -> None:
    url = fresh_database(kind)
    tables = create_tables(url)
    with psycopg.connect(url) as connection:
        connection.execute("ALTER TABLE outbox_event SET (autovacuum_enabled = off)")
    database = postgres(url, tables, cached=True)
    fill_all(url, BATCH)
    fill(url, "plain", BATCH)
    fill(url, "one", BATCH, keys=1)
    work(database, database.steps)
    with psycopg.connect(url) as connection:
        # Unlike TRUNCATE this makes no plan void.
        connection.execute("DELETE FROM outbox_event")
    fill_all(url, 35_000)
    assert_bounded(work(database, database.steps))


@pytest.fixture(scope="module")
def million(module_database: Callable[[str], str]) -> tuple[str, Tables]:
    """A database with a million delivered rows, and a backlog."""
    url = module_database("postgresql-18")
    tables = create_tables(url)
    fill(url, "keys", 1_000_000, keys=1000, status="delivered")
    fill_all(url, 2_000)
    return url, tables


@pytest.mark.slow
@pytest.mark.parametrize("analysed", [False, True], ids=["as it is", "analysed"])
def test_a_million_delivered_rows_are_not_looked_at(
    analysed: bool, million: tuple[str, Tables], postgres: Callable[..., Postgres]
) -> None:
    if analysed:
        with psycopg.connect(million[0], autocommit=True) as connection:
            connection.execute("ANALYZE outbox_event")
    database = postgres(*million)
    assert_bounded(work(database, database.steps))


class Mariadb:
    """ANALYZE, run and taken back, then the statement itself."""

    def __init__(self, url: str, tables: Tables) -> None:
        statements = Statements(tables, MARIADB, "format")
        self.steps = StoreSteps(statements, MARIADB, Stepwise(statements, MARIADB))
        parts = sa.make_url(url)
        self._connection = pymysql.connect(
            host=parts.host,
            port=parts.port or 3306,
            user=parts.username,
            password=parts.password or "",
            database=parts.database,
            init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        )

    def close(self) -> None:
        self._connection.close()

    def begin(self) -> None:
        self._connection.begin()

    def end(self) -> None:
        self._connection.commit()

    def explain(self, query: Query) -> Explained:
        self.execute(Query("SAVEPOINT explained", ()))
        [[plan]] = self.execute(Query(f"ANALYZE FORMAT=JSON {query.sql}", query.params))
        self.execute(Query("ROLLBACK TO SAVEPOINT explained", ()))
        return Explained(query.sql, list(_mysql_accesses(json.loads(plan))))

    def execute(self, query: Query) -> list[Any]:
        with self._connection.cursor() as cursor:
            cursor.execute(query.sql, query.params)
            return list(cursor.fetchall())


def _mysql_accesses(plan: Any) -> Iterator[Access]:
    match plan:
        case {"table": {"table_name": "outbox_event" | "e"} as table}:
            parts = " ".join(table.get("used_key_parts", ()))
            rows = float(table.get("r_rows") or 0) * table.get("r_loops", 1)
            yield Access(table["access_type"], table.get("key"), parts, rows)
    if isinstance(plan, dict):
        for part in plan.values():
            yield from _mysql_accesses(part)
    elif isinstance(plan, list):
        for part in plan:
            yield from _mysql_accesses(part)


MYSQL_FILL = """
INSERT INTO outbox_event (id, event_id, destination, aggregate_type, aggregate_id, event_type, payload,
                          headers, ordering_key, idempotency_key, status, next_attempt_at, delivered_at)
WITH RECURSIVE numbers AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM numbers WHERE n < %s)
SELECT LOWER(REPLACE(UUID(), '-', '')), LOWER(REPLACE(UUID(), '-', '')), %s, 'Order', n, 'order.paid',
       '{}', '{}', CONCAT('key ', MOD(n, NULLIF(%s, 0))), n, %s,
       IF(%s = 'pending', UTC_TIMESTAMP(6), NULL), IF(%s = 'delivered', UTC_TIMESTAMP(6), NULL)
FROM numbers"""
BACKLOG = (
    ("keys", 20_000, 1000, "delivered"),
    ("plain", 2_000, 0, "pending"),
    ("keys", 2_000, 1000, "pending"),
    ("one", 2_000, 1, "pending"),
)


def test_mariadb_reads_by_the_indexes_of_its_generated_columns(fresh_database: Callable[[str], str]) -> None:
    url = fresh_database("mariadb")
    database = Mariadb(url, create_tables(url))
    database.execute(Query("SET max_recursive_iterations = 1000000", ()))
    for destination, rows, keys, status in BACKLOG:
        database.execute(Query(MYSQL_FILL, (rows, destination, keys, status, status, status)))
    database.end()
    seen = work(database, database.steps)
    database.close()
    by_index = {
        MYSQL_PENDING: "due_destination",
        MYSQL_HEADS: "head_destination ordering_key",
        "PRIMARY": "id",
    }
    for explained in seen.all():
        for access in explained.accesses:
            assert access.how in ("const", "eq_ref", "ref", "range"), explained
            assert by_index[access.by or ""] in access.condition, explained
            assert access.rows <= 2 * BATCH, explained
    assert indexes(seen.claim) == {MYSQL_PENDING, "PRIMARY"}
    for ordered in (seen.ordered, seen.one_key, seen.parking):
        assert indexes(ordered) == {MYSQL_PENDING, MYSQL_HEADS, "PRIMARY"}
    assert indexes(seen.extend) == {"PRIMARY"}
    assert indexes(seen.settle) == {"PRIMARY", MYSQL_HEADS}


class Sqlite:
    """EXPLAIN QUERY PLAN, then the statement itself."""

    def __init__(self, url: str, tables: Tables) -> None:
        statements = Statements(tables, SQLITE, "qmark")
        self.steps = StoreSteps(statements, SQLITE, Stepwise(statements, SQLITE))
        self._connection = sqlite3.connect(sa.make_url(url).database or "", isolation_level=None)

    def close(self) -> None:
        self._connection.close()

    def begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def end(self) -> None:
        self._connection.execute("COMMIT")

    def explain(self, query: Query) -> Explained:
        details = [row[3] for row in self.execute(Query(f"EXPLAIN QUERY PLAN {query.sql}", query.params))]
        return Explained(query.sql, [_sqlite_access(line) for line in details if _is_of_events(line)])

    def execute(self, query: Query) -> list[Any]:
        return self._connection.execute(query.sql, query.params).fetchall()


def _is_of_events(line: str) -> bool:
    return line.startswith(("SCAN", "SEARCH")) and line.split()[1] in ("outbox_event", "e")


def _sqlite_access(line: str) -> Access:
    """Of lines like ``SEARCH outbox_event USING INDEX name (destination=? AND next_attempt_at<?)``."""
    words, _, condition = line.partition(" (")
    return Access(words.split()[0], words.split()[-1] if "INDEX" in words else None, condition, 0)


SQLITE_FILL = """
INSERT INTO outbox_event (id, event_id, destination, aggregate_type, aggregate_id, event_type, payload,
                          headers, ordering_key, idempotency_key, status, next_attempt_at, delivered_at)
WITH numbers AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)
SELECT lower(hex(randomblob(16))), lower(hex(randomblob(16))), ?, 'Order', n, 'order.paid',
       '{}', '{}', 'key ' || (n % nullif(?, 0)), n, ?,
       CASE WHEN ? = 'pending' THEN datetime() || '.000000' END,
       CASE WHEN ? = 'delivered' THEN datetime() || '.000000' END
FROM numbers"""


@pytest.mark.parametrize("analysed", [False, True], ids=["as it is", "analysed"])
def test_sqlite_reads_by_its_partial_indexes(analysed: bool, fresh_database: Callable[[str], str]) -> None:
    url = fresh_database("sqlite")
    database = Sqlite(url, create_tables(url))
    for destination, rows, keys, status in BACKLOG:
        database.execute(Query(SQLITE_FILL, (rows, destination, keys, status, status, status)))
    if analysed:
        database.execute(Query("ANALYZE", ()))
    seen = work(database, database.steps)
    database.close()
    ids = "sqlite_autoindex_outbox_event_1"
    by_index = {PENDING: "destination=?", HEADS: "destination=? AND ordering_key=?", ids: "id=?"}
    for explained in seen.all():
        for access in explained.accesses:
            assert access.how == "SEARCH", explained
            assert by_index[access.by or ""] in access.condition, explained
    assert indexes(seen.claim) == {PENDING, ids}
    for ordered in (seen.ordered, seen.one_key, seen.parking):
        assert indexes(ordered) == {PENDING, HEADS, ids}
    assert indexes(seen.extend) == {ids}
    assert indexes(seen.settle) == {ids, HEADS}
