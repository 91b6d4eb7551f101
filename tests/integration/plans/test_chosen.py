"""A claim of chosen rows goes by their ids, however long the backlog around them is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import UUID

import pytest
import sqlalchemy as sa

from relaybox.stores.store import Want
from tests.databases import POSTGRESQL, engine
from tests.integration.plans.explaining import BATCH, HEADS, IDS, Database, Explained, each_database, indexes

pytestmark = pytest.mark.full

ROWS = 100_000
CHOSEN = 20
Open = Callable[..., Database]


def backlog(rows: int) -> list[tuple[str, int, int, str]]:
    return [("plain", rows, 0, "pending"), ("keys", rows, rows, "pending")]


def some_of(database: Database, destination: str) -> tuple[UUID, ...]:
    """Rows in the midst of a destination's backlog; where there are keys, each is the only one of its own."""
    event = database.tables.event.c
    query = sa.select(event.id).where(event.destination == destination)
    with engine(database.url).connect() as connection:
        rows = connection.scalar(sa.select(sa.func.count()).select_from(query.subquery())) or 0
        middle = query.order_by(event.position).offset((rows - CHOSEN) // 2).limit(CHOSEN)
        return tuple(connection.scalars(middle))


def claims(database: Database) -> Iterator[tuple[bool, list[Explained]]]:
    """Claim chosen rows without order and with it."""
    for destination, ordered in (("plain", False), ("keys", True)):
        only = some_of(database, destination)
        want = Want(destination, "me", limit=BATCH, ordered=ordered, only=only)
        claim, seen = database.watch(database.steps.claim(want))
        assert {delivery.id for delivery in claim.deliveries} == set(only)
        yield ordered, seen


def assert_claims_go_by_ids(database: Database) -> None:
    for ordered, seen in claims(database):
        database.assert_bounded(seen, 2 * CHOSEN)
        assert indexes(seen) == ({IDS, HEADS} if ordered else {IDS})


@each_database
def test_a_claim_goes_by_the_ids(kind: str, analysed: bool, opened: Open) -> None:
    assert_claims_go_by_ids(opened(kind, backlog(ROWS), analysed=analysed))


@pytest.mark.parametrize("kind", POSTGRESQL)
def test_a_plan_kept_from_a_tiny_table_goes_by_the_ids_too(kind: str, opened: Open) -> None:
    database = opened(kind, backlog(CHOSEN), cached=True)
    assert len(list(claims(database))) == 2
    # Unlike TRUNCATE this makes no plan void.
    database.sql("DELETE FROM outbox_event")
    database.fill(backlog(ROWS))
    assert_claims_go_by_ids(database)
