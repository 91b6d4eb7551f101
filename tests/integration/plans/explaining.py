"""Databases that explain each statement of a store's steps just before they execute it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import psycopg
import pymysql
import pytest
import sqlalchemy as sa

from relaybox.database.dialects import MARIADB, POSTGRESQL, SQLITE
from relaybox.database.schema import make_tables
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Steps
from relaybox.stores.sql.steps import StoreSteps
from tests.databases import POSTGRESQL as POSTGRESQL_KINDS
from tests.databases import engine

T = TypeVar("T")
BATCH = 100
PENDING, HEADS, DELIVERED, IDS = "pending", "heads", "delivered", "ids"
"""Indexes, by what they are for; each database has names of its own."""

each_database = pytest.mark.parametrize(
    ("kind", "analysed"),
    # MariaDB keeps its statistics by itself.
    [
        ("mariadb", False),
        *((kind, analysed) for kind in (*POSTGRESQL_KINDS, "sqlite") for analysed in (False, True)),
    ],
)

Backlog: TypeAlias = Iterable[tuple[str, int, int, str]]
"""Of each part: the destination, the number of rows, the number of keys (0: none), the status."""


INSERT = """INSERT INTO outbox_event (
    id, event_id, destination, aggregate_type, aggregate_id, event_type, payload, headers, ordering_key,
    idempotency_key, status, next_attempt_at, delivered_at)"""


class Access(NamedTuple):
    """One place in a plan where a table is read."""

    how: str
    by: str | None
    condition: str
    rows: float
    """Rows read, where the plan was also run."""
    table: str = "outbox_event"


class Explained(NamedTuple):
    """One statement of a step and how it was executed."""

    sql: str
    accesses: list[Access]
    largest_sort: float = 0
    buffers: int = 0
    """Pages looked at, of tables and indexes."""

    def of_events(self) -> list[Access]:
        return [access for access in self.accesses if access.table == "outbox_event"]


class Database:
    """Explains and executes statements on one connection."""

    HOW: ClassVar[tuple[str, ...]]
    """Ways to find a row without looking at others."""
    INDEXES: ClassVar[dict[str, str]]
    """What each index is for, by its name."""
    BOUNDS: ClassVar[dict[str, str]]
    """What bounds a search in an index."""
    OWN: ClassVar[set[str]] = {IDS}
    """By which a row is found that is changed once it was chosen."""
    ROWS: ClassVar[str]
    """Selects the rows of a backlog's part, by its four values, the status thrice."""
    steps: StoreSteps
    _connection: Any

    def __init__(self, url: str) -> None:
        self.url = url
        self.tables = make_tables(sa.MetaData())
        with engine(url).begin() as connection:
            names = [{"name": name} for name in ("plain", "keys", "one")]
            connection.execute(sa.insert(self.tables.destination), names)

    def close(self) -> None:
        self._connection.close()

    def explain(self, query: Query) -> Explained:
        raise NotImplementedError

    def execute(self, query: Query) -> list[Any]:
        raise NotImplementedError

    def sql(self, *statements: str) -> None:
        """Run statements without parameters, and commit them."""
        for statement in statements:
            self.execute(Query(statement, ()))
        self._connection.commit()

    def fill(self, backlog: Backlog) -> None:
        for destination, rows, keys, status in backlog:
            self.execute(Query(INSERT + self.ROWS, (rows, destination, keys, status, status, status)))
        self._connection.commit()

    def fill_all(self, rows: int) -> None:
        """Make rows due for a destination without order, one of many keys and one of a single key."""
        self.fill(
            [(name, rows, keys, "pending") for name, keys in (("plain", 0), ("keys", 1000), ("one", 1))]
        )

    def analyse(self) -> None:
        self.sql("ANALYZE")

    def watch(self, steps: Steps[T]) -> tuple[T, list[Explained]]:
        """Run the steps in one transaction; their result, and how each statement was executed."""
        seen: list[Explained] = []
        self.begin()
        try:
            queries = next(steps)
            while True:
                rows = []
                for query in queries:
                    # How many rows the last statement changed can be asked only once, and right behind it.
                    if "outbox" in query.sql:
                        seen.append(self.explain(query))
                    rows.append(self.execute(query))
                queries = steps.send(rows)
        except StopIteration as end:
            return end.value, seen
        finally:
            self.end()

    def assert_bounded(self, seen: Iterable[Explained], most: int = 2 * BATCH) -> None:
        """Check that rows are found by an index, with a condition that bounds it, and no more of them."""
        for explained in seen:
            assert explained.largest_sort <= most, explained
            for access in explained.of_events():
                assert access.how in self.HOW, explained
                assert access.by is not None or access.how == "Tid Scan", explained
                assert access.rows <= most, explained
                assert self.BOUNDS.get(access.by or "", "") in access.condition, explained


class Postgres(Database):
    """EXPLAIN ANALYZE, run and taken back, then the statement itself; always after the pinned plan.

    With ``cached`` each statement is prepared once and keeps the plan it got at its first execution.
    """

    HOW = ("Index Scan", "Tid Scan")
    INDEXES: ClassVar = {
        "idx_outbox_event_pending_next_attempt": PENDING,
        "idx_outbox_event_key_head": HEADS,
        "idx_outbox_event_delivered": DELIVERED,
        "outbox_event_pkey": IDS,
    }
    BOUNDS: ClassVar = {PENDING: "destination", HEADS: "ordering_key", IDS: "(id = "}
    OWN: ClassVar = set()
    ROWS = """
        WITH wanted AS (SELECT %s::int AS rows, %s::text AS destination, %s::int AS keys)
        SELECT id, id, destination, 'Order', (n %% 1000)::text, 'order.paid', '{}', '{}',
            'key ' || n %% nullif(keys, 0), n::text, %s::text,
            CASE WHEN %s::text = 'pending' THEN now() END, CASE WHEN %s::text = 'delivered' THEN now() END
        FROM wanted, LATERAL (SELECT n, gen_random_uuid() AS id FROM generate_series(1, rows) n) numbers"""

    def __init__(self, url: str, *, cached: bool = False) -> None:
        super().__init__(url)
        self.statements = Statements(self.tables, POSTGRESQL, "numeric" if cached else "format")
        self.steps = StoreSteps(self.statements)
        self._connection = psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor)
        self._connection.adapters.register_loader("jsonb", psycopg.types.string.TextLoader)
        self._connection.execute("ALTER TABLE outbox_event SET (autovacuum_enabled = off)")
        self._cached = cached
        self._prepared: dict[str, str] = {}
        if cached:
            self._connection.execute("SET plan_cache_mode = force_generic_plan")

    def begin(self) -> None:
        self._connection.execute("BEGIN")
        self._connection.execute(self.statements("pin_plan").sql)

    def end(self) -> None:
        self._connection.execute("COMMIT")

    def fill(self, backlog: Backlog) -> None:
        with psycopg.connect(self.url) as connection:
            for destination, rows, keys, status in backlog:
                connection.execute(INSERT + self.ROWS, (rows, destination, keys, status, status, status))

    def sql(self, *statements: str) -> None:
        for statement in statements:
            self._connection.execute(statement)

    def explain(self, query: Query) -> Explained:
        self._connection.execute("SAVEPOINT explained")
        analyze = f"EXPLAIN (ANALYZE, TIMING OFF, BUFFERS, FORMAT JSON) {self._call(query)}"
        [[[plan]]] = self._connection.execute(analyze, query.params)
        self._connection.execute("ROLLBACK TO SAVEPOINT explained")
        assert "JIT" not in plan, "a plan that costs nothing to speak of was compiled"
        nodes = list(self._nodes(plan["Plan"]))
        sorts = [self._rows(node) for node in nodes if "Sort" in node["Node Type"]]
        read = [node for node in nodes if "Relation Name" in node and node["Node Type"] != "ModifyTable"]
        buffers = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
        return Explained(query.sql, [self._access(node) for node in read], max(sorts, default=0), buffers)

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
        return f"EXECUTE {self._prepared[query.sql]}" + (f"({marks})" if marks else "")

    def _nodes(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield node
        for child in node.get("Plans", ()):
            yield from self._nodes(child)

    def _rows(self, node: dict[str, Any]) -> float:
        return float((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])

    def _access(self, node: dict[str, Any]) -> Access:
        name, condition = node.get("Index Name"), node.get("Index Cond") or node.get("TID Cond") or ""
        by = self.INDEXES.get(name, name)
        return Access(node["Node Type"], by, condition, self._rows(node), node["Relation Name"])


class Mariadb(Database):
    """ANALYZE, run and taken back, then the statement itself."""

    HOW = ("const", "eq_ref", "ref", "range")
    INDEXES: ClassVar = {
        "idx_outbox_event_due": PENDING,
        "idx_outbox_event_head": HEADS,
        "idx_outbox_event_kept": DELIVERED,
        "PRIMARY": IDS,
    }
    BOUNDS: ClassVar = {PENDING: "due_destination", HEADS: "head_destination ordering_key", IDS: "id"}
    ROWS = """
        WITH RECURSIVE numbers AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM numbers WHERE n < %s)
        SELECT LOWER(REPLACE(UUID(), '-', '')), LOWER(REPLACE(UUID(), '-', '')), %s, 'Order', n, 'order.paid',
            '{}', '{}', CONCAT('key ', MOD(n, NULLIF(%s, 0))), n, %s,
            IF(%s = 'pending', UTC_TIMESTAMP(6), NULL), IF(%s = 'delivered', UTC_TIMESTAMP(6), NULL)
        FROM numbers"""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        statements = Statements(self.tables, MARIADB, "format")
        self.steps = StoreSteps(statements)
        parts = sa.make_url(url)
        self._connection = pymysql.connect(
            host=parts.host,
            port=parts.port or 3306,
            user=parts.username,
            password=parts.password or "",
            database=parts.database,
            init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        )
        self.sql("SET max_recursive_iterations = 1000000")

    def begin(self) -> None:
        self._connection.begin()

    def end(self) -> None:
        self._connection.commit()

    def explain(self, query: Query) -> Explained:
        self.execute(Query("SAVEPOINT explained", ()))
        [[plan]] = self.execute(Query(f"ANALYZE FORMAT=JSON {query.sql}", query.params))
        self.execute(Query("ROLLBACK TO SAVEPOINT explained", ()))
        # It escapes a NUL as JSON does not know it.
        return Explained(query.sql, list(self._accesses(json.loads(plan.replace(r"\0", "")))))

    def execute(self, query: Query) -> list[Any]:
        with self._connection.cursor() as cursor:
            cursor.execute(query.sql, query.params)
            return list(cursor.fetchall())

    def _accesses(self, plan: Any) -> Iterator[Access]:
        match plan:
            case {"table": {"table_name": "outbox_event" | "e"} as table}:
                parts = " ".join(table.get("used_key_parts", ()))
                rows = float(table.get("r_rows") or 0) * table.get("r_loops", 1)
                key = table.get("key")
                yield Access(table["access_type"], self.INDEXES.get(key, key), parts, rows)
        if isinstance(plan, dict):
            plan = list(plan.values())
        for part in plan if isinstance(plan, list) else ():
            yield from self._accesses(part)


class Sqlite(Database):
    """EXPLAIN QUERY PLAN, then the statement itself."""

    HOW = ("SEARCH",)
    INDEXES: ClassVar = {**Postgres.INDEXES, "sqlite_autoindex_outbox_event_1": IDS}
    BOUNDS: ClassVar = {PENDING: "destination=?", HEADS: "destination=? AND ordering_key=?", IDS: "id=?"}
    ROWS = """
        WITH numbers AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)
        SELECT lower(hex(randomblob(16))), lower(hex(randomblob(16))), ?, 'Order', n, 'order.paid',
            '{}', '{}', 'key ' || (n % nullif(?, 0)), n, ?,
            CASE WHEN ? = 'pending' THEN datetime() || '.000000' END,
            CASE WHEN ? = 'delivered' THEN datetime() || '.000000' END
        FROM numbers"""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        statements = Statements(self.tables, SQLITE, "qmark")
        self.steps = StoreSteps(statements)
        self._connection = sqlite3.connect(sa.make_url(url).database or "", isolation_level=None)

    def begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def end(self) -> None:
        self._connection.execute("COMMIT")

    def explain(self, query: Query) -> Explained:
        lines = [row[3] for row in self.execute(Query(f"EXPLAIN QUERY PLAN {query.sql}", query.params))]
        return Explained(query.sql, [self._access(line) for line in lines if self._is_of_events(line)])

    def execute(self, query: Query) -> list[Any]:
        rows: list[Any] = self._connection.execute(query.sql, query.params).fetchall()
        return rows

    def _is_of_events(self, line: str) -> bool:
        return line.startswith(("SCAN", "SEARCH")) and line.split()[1] in ("outbox_event", "e")

    def _access(self, line: str) -> Access:
        """Read a line like ``SEARCH outbox_event USING INDEX name (destination=? AND next_attempt_at<?)``."""
        words, _, condition = line.partition(" (")
        name = words.split()[-1] if "INDEX" in words else None
        return Access(words.split()[0], name and self.INDEXES.get(name, name), condition, 0)


def indexes(explained: Iterable[Explained]) -> set[str]:
    """Return the indexes by which events were found."""
    return {access.by for one in explained for access in one.of_events() if access.by is not None}


class Driver:
    """Runs the steps of a store on a database that explains, and keeps what it saw."""

    def __init__(self, database: Database) -> None:
        self.seen: list[Explained] = []
        self._database = database

    async def run(self, begin: Callable[[], Steps[T]], **_: bool) -> T:
        result, seen = self._database.watch(begin())
        self.seen += seen
        return result

    async def close(self) -> None: ...

    def take(self) -> list[Explained]:
        seen, self.seen = self.seen, []
        return seen
