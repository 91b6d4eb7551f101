"""A claim costs PostgreSQL the same, whatever else is in the table.

The plans are those of a relay's session: made once, for any parameters. Counted are the pages that a claim
looks at; no clock is involved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from relaybox.stores.store import Want
from tests.databases import POSTGRESQL
from tests.integration.plans.explaining import BATCH, HEADS, PENDING, Database, Explained, indexes

Open = Callable[..., Database]
WANTS = {
    "plain": Want("plain", "me", limit=BATCH),
    "keys": Want("keys", "me", limit=BATCH, ordered=True),
    "one": Want("one", "me", limit=BATCH, ordered=True),
}
MOST_PAGES = {"plain": 6, "keys": 12, "one": 7.5}
"""For each row of a batch that is all there is; measured 5.4, 10.2 and 6.4."""
# Of keys other than those that are due: the first of each waits, the others are parked behind it.
BACK_OFF = """
INSERT INTO outbox_event (id, event_id, destination, aggregate_type, aggregate_id, event_type, payload,
                          headers, ordering_key, idempotency_key, attempts, next_attempt_at)
SELECT id, id, '{destination}', 'Order', n::text, 'order.paid', '{{}}', '{{}}',
       'late ' || n % nullif({keys}, 0), n::text, 1,
       CASE WHEN n <= {keys} OR {keys} = 0 THEN now() + interval '1 hour' END
FROM (SELECT n, gen_random_uuid() AS id FROM generate_series(1, 100000) AS n) AS numbers"""


Cost: TypeAlias = dict[str, list[Explained]]
"""The statements of a claim of each destination, explained."""


def claim(database: Database) -> Cost:
    """Claim a batch of each destination, as the session of a relay would."""
    cost: Cost = {}
    for name, want in WANTS.items():
        claimed, cost[name] = database.watch(database.steps.claim(want))
        assert (len(claimed.deliveries), claimed.parked) == (BATCH, 0)
    return cost


def assert_as_cheap_as_alone(kind: str, database: Database, opened: Open) -> None:
    """Compare with what claims cost where nothing else is in the table than what they take."""
    alone = opened(kind, cached=True)
    alone.fill_all(BATCH)
    assert_the_same(database, claim(database), claim(alone))


def assert_the_same(database: Database, cost: Cost, empty: Cost) -> None:
    """Check for full scans, for sorts larger than the batch, and for more pages than in an empty table."""
    for name, explained in cost.items():
        database.assert_bounded(explained)
        assert indexes(explained) == ({PENDING} if name == "plain" else {PENDING, HEADS})
        pages, at_first = (sum(one.buffers for one in of[name]) for of in (cost, empty))
        # Deeper indexes: the head and the run of each of a hundred keys are looked up one by one.
        most = 1.6 if name == "keys" else 1.2
        assert pages <= most * at_first, f"{name}: {pages} pages; {at_first} where there is nothing else"
        assert at_first <= MOST_PAGES[name] * BATCH, f"{name}: {at_first} pages of an empty table"


@pytest.mark.parametrize("kind", POSTGRESQL)
@pytest.mark.full
def test_100_000_rows_that_back_off_cost_a_claim_nothing(kind: str, opened: Open) -> None:
    database = opened(kind, cached=True)
    for destination, keys in (("plain", 0), ("keys", 1_000)):
        database.sql(BACK_OFF.format(destination=destination, keys=keys))
    database.fill_all(BATCH)
    assert_as_cheap_as_alone(kind, database, opened)


@pytest.mark.parametrize("kind", POSTGRESQL)
def test_a_key_of_100_000_events_costs_a_claim_no_more_than_one_of_a_hundred(kind: str, opened: Open) -> None:
    backlog = [("plain", BATCH, 0), ("keys", BATCH, 1000), ("one", 100_000, 1)]
    database = opened(kind, [(*part, "pending") for part in backlog], cached=True)
    assert_as_cheap_as_alone(kind, database, opened)


@pytest.mark.full
def test_a_million_delivered_rows_cost_a_claim_nothing(opened: Open) -> None:
    backlog = [(name, 500_000, keys, "delivered") for name, keys in (("plain", 0), ("keys", 1_000))]
    database = opened("postgresql-18", backlog, cached=True)
    database.fill_all(BATCH)
    assert_as_cheap_as_alone("postgresql-18", database, opened)
