"""A claim of chosen rows goes by their ids, however long the backlog around them is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa

from relaybox.schema import Tables
from relaybox.store import Want
from relaybox.stores.statements import Query
from tests.integration.test_plans import (
    BATCH,
    DRIVERS,
    HEADS,
    IDS,
    KINDS,
    MYSQL_FILL,
    MYSQL_HEADS,
    SQLITE_FILL,
    Explained,
    Mariadb,
    Postgres,
    Sqlite,
    create_tables,
    fill,
    indexes,
    watch,
)

ROWS = 100_000
CHOSEN = 20
SQLITE_IDS = "sqlite_autoindex_outbox_event_1"


def some_of(url: str, tables: Tables, destination: str) -> tuple[UUID, ...]:
    """Rows in the midst of a destination's backlog; where there are keys, each is the only one of its own."""
    event = tables.event.c
    parts = sa.make_url(url)
    engine = sa.create_engine(parts.set(drivername=DRIVERS[parts.drivername]))
    query = sa.select(event.id).where(event.destination == destination).order_by(event.position)
    with engine.connect() as connection:
        found = list(connection.scalars(query))
    engine.dispose()
    middle = (len(found) - CHOSEN) // 2
    return tuple(found[middle : middle + CHOSEN])


Claims = tuple[list[Explained], list[Explained]]


def claim_both(database: Any, url: str, tables: Tables) -> Claims:
    """Claim chosen rows without order and with it; how each statement was executed."""
    seen = []
    for destination, ordered in (("plain", False), ("keys", True)):
        only = some_of(url, tables, destination)
        want = Want(destination, "me", limit=BATCH, ordered=ordered, only=only)
        claim, explained = watch(database, database.steps.claim(want))
        assert {delivery.id for delivery in claim.deliveries} == set(only)
        seen.append(explained)
    return seen[0], seen[1]


def read(claims: Iterable[list[Explained]]) -> Iterator[tuple[Explained, Any]]:
    for explained in (one for claim in claims for one in claim):
        for access in explained.accesses:
            yield explained, access


@pytest.fixture
def postgres() -> Iterator[Callable[..., Postgres]]:
    opened: list[Postgres] = []

    def connect(*parts: Any, **options: Any) -> Postgres:
        opened.append(Postgres(*parts, **options))
        return opened[-1]

    yield connect
    for database in opened:
        database.close()


def fill_both(url: str, rows: int) -> None:
    fill(url, "plain", rows)
    fill(url, "keys", rows, keys=rows)


def assert_by_ids(claims: Claims) -> None:
    for explained, access in read(claims):
        assert access.how in ("Index Scan", "Tid Scan"), explained
        assert access.rows <= 2 * CHOSEN, explained
        assert explained.largest_sort <= 2 * CHOSEN, explained
        if access.by is not None:
            assert {IDS: "(id = ", HEADS: "ordering_key"}[access.by] in access.condition, explained
    assert (indexes(claims[0]), indexes(claims[1])) == ({IDS}, {IDS, HEADS})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("analysed", [False, True], ids=["without statistics", "analysed"])
def test_postgresql_goes_by_the_ids(
    kind: str, analysed: bool, fresh_database: Callable[[str], str], postgres: Callable[..., Postgres]
) -> None:
    url = fresh_database(kind)
    tables = create_tables(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox_event SET (autovacuum_enabled = off)")
        fill_both(url, ROWS)
        if analysed:
            connection.execute("ANALYZE outbox_event")
    assert_by_ids(claim_both(postgres(url, tables), url, tables))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_kept_from_a_tiny_table_goes_by_the_ids_too(
    kind: str, fresh_database: Callable[[str], str], postgres: Callable[..., Postgres]
) -> None:
    url = fresh_database(kind)
    tables = create_tables(url)
    with psycopg.connect(url) as connection:
        connection.execute("ALTER TABLE outbox_event SET (autovacuum_enabled = off)")
    database = postgres(url, tables, cached=True)
    fill_both(url, CHOSEN)
    claim_both(database, url, tables)
    with psycopg.connect(url) as connection:
        # Unlike TRUNCATE this makes no plan void.
        connection.execute("DELETE FROM outbox_event")
    fill_both(url, ROWS)
    assert_by_ids(claim_both(database, url, tables))


def test_mariadb_goes_by_the_ids(fresh_database: Callable[[str], str]) -> None:
    url = fresh_database("mariadb")
    tables = create_tables(url)
    database = Mariadb(url, tables)
    database.execute(Query("SET max_recursive_iterations = 1000000", ()))
    for destination, keys in (("plain", 0), ("keys", ROWS)):
        database.execute(Query(MYSQL_FILL, (ROWS, destination, keys, *["pending"] * 3)))
    database.end()
    claims = claim_both(database, url, tables)
    database.close()
    for explained, access in read(claims):
        assert access.how in ("const", "eq_ref", "ref", "range"), explained
        assert access.rows <= 2 * CHOSEN, explained
    assert (indexes(claims[0]), indexes(claims[1])) == ({"PRIMARY"}, {"PRIMARY", MYSQL_HEADS})


@pytest.mark.parametrize("analysed", [False, True], ids=["as it is", "analysed"])
def test_sqlite_goes_by_the_ids(analysed: bool, fresh_database: Callable[[str], str]) -> None:
    url = fresh_database("sqlite")
    tables = create_tables(url)
    database = Sqlite(url, tables)
    for destination, keys in (("plain", 0), ("keys", ROWS)):
        database.execute(Query(SQLITE_FILL, (ROWS, destination, keys, *["pending"] * 3)))
    if analysed:
        database.execute(Query("ANALYZE", ()))
    claims = claim_both(database, url, tables)
    database.close()
    by_index = {SQLITE_IDS: "id=?", HEADS: "destination=? AND ordering_key=?"}
    for explained, access in read(claims):
        assert access.how == "SEARCH", explained
        assert by_index[access.by or ""] in access.condition, explained
    assert (indexes(claims[0]), indexes(claims[1])) == ({SQLITE_IDS}, {SQLITE_IDS, HEADS})
