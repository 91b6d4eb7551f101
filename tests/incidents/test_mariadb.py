"""MariaDB: locking reads that go through a sort or past their end, and keys that are cut to fit."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
import sqlalchemy as sa

from relaybox.database.statements import delivery as statements
from relaybox.emit import row
from relaybox.errors import InvalidField
from relaybox.stores.store import Want
from tests.incidents.conftest import Case, make_shop, variants
from tests.integration.shop import drive
from tests.waiting import PATIENCE


@variants("an order that no index has")
async def test_a_locking_read_through_a_filesort_locks_every_row(case: Case) -> None:
    if case.broken:
        sorted_ = ("ORDER BY next_attempt_at, position", "ORDER BY next_attempt_at, position + 0")
        case.rewrite(statements.WORDS, "in_line", sorted_)
    shop = make_shop(case.database("mariadb"))
    shop.emit(30)
    async with shop.store() as store:
        with shop.transaction() as one, shop.transaction() as two:
            # The second finds that another has all that it looks at, and scans on.
            first = [drive(each, store.steps.claim(Want("shop", "relay-1", limit=5))) for each in (one, two)]
            rest = await store.claim(Want("shop", "relay-3"))
            # An emitter does not wait.
            await asyncio.wait_for(asyncio.to_thread(shop.emit, 1, first=30), PATIENCE)
    assert [len(claim.deliveries) for claim in first] == [5, 5]
    with case.check("a claim of five locked the rows of others too"):
        assert len(rest.deliveries) == 20, "a claim of five locked the rows of others too"


@variants("a scan that locks")
async def test_a_claim_hides_the_first_row_of_the_next_destination(case: Case) -> None:
    if case.broken:
        case.rewrite(statements.MYSQL, "due", ("{due_rows}", "{due_rows} {skip_locked}"))
    shop = make_shop(case.database("mariadb"))
    shop.emit(1)
    async with shop.store() as store:
        with shop.transaction() as connection:
            drive(connection, store.steps.claim(Want("a neighbour", "relay-1")))
            claim = await store.claim(Want("shop", "relay-2"))
    with case.check("a claim that found nothing locked another destination's row"):
        assert claim.deliveries, "a claim that found nothing locked another destination's row"


KEYS = ["k" * 255 + end for end in ("-first", "-second")]


def cut_keys(case: Case) -> None:
    """Keys of any length are let through, and INSERT IGNORE makes them fit."""
    checked = row.text_field
    case.patch.setattr(row, "text_field", lambda field, value, longest: checked(field, value, 10_000))
    ignore = ("INSERT INTO", "INSERT IGNORE INTO")
    case.rewrite(statements.MYSQL, "insert", ignore)
    case.rewrite(statements.MYSQL, "remember_key", ignore, ("{or_nothing_but_the_key}", ""))
    case.rewrite(statements.MYSQL, "recall_key", (":key", "LEFT(:key, 255)"))


@pytest.mark.parametrize("sql_mode", ["STRICT_TRANS_TABLES", ""], ids=["strict", "lax"])
@variants("INSERT IGNORE")
def test_insert_ignore_truncates_a_key_and_two_events_become_one(case: Case, sql_mode: str) -> None:
    if case.broken:
        cut_keys(case)
    shop = make_shop(case.database("mariadb"))
    written = refused = 0
    with shop.engine.begin() as connection:
        connection.execute(sa.text("SET SESSION sql_mode = :mode"), {"mode": sql_mode})
        for key in KEYS:
            refused += 1
            with suppress(InvalidField):
                emitted = shop.outbox.emit(connection, "Order", 1, "order.paid", {}, idempotency_key=key)
                refused -= 1
                written += not emitted.duplicate
        # The caller's transaction goes on, and a key that fits is kept whole.
        assert not shop.outbox.emit(
            connection, "Order", 1, "order.paid", {}, idempotency_key="k" * 254
        ).duplicate
    with case.check("an event was swallowed as the duplicate of another"):
        whole = written + refused == len(KEYS)
        assert whole, "an event was swallowed as the duplicate of another"
    assert case.broken or refused == len(KEYS), "a key that does not fit was taken"
