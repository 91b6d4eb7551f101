"""Upkeep finds its rows by index, and never looks through more than a batch of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from relaybox.stores.sql.store import SqlStore
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.upkeep import Slice, StoredEvent, Target
from tests.databases import POSTGRESQL
from tests.integration.plans.explaining import (
    BATCH,
    DELIVERED,
    HEADS,
    IDS,
    PENDING,
    Database,
    Driver,
    Explained,
    each_database,
    indexes,
)
from tests.integration.upkeep.bench import some

pytestmark = pytest.mark.full

Open = Callable[..., Database]
PARK = "UPDATE outbox_event SET next_attempt_at = NULL WHERE status = 'pending' AND destination <> 'plain'"
DISCARD = """
UPDATE outbox_event SET status = 'discarded', next_attempt_at = NULL
WHERE status = 'pending' AND destination = 'plain'"""


class Bench:
    """Upkeep on a database that explains; what is led is led by this test."""

    def __init__(self, database: Database) -> None:
        self.driver = Driver(database)
        self.upkeep = SqlUpkeep(SqlStore(database.steps, self.driver))

    async def lead(self) -> int:
        return some(await self.upkeep.members.lead("me", 3600.0))

    async def do_all(self) -> dict[str, list[Explained]]:
        """Do every job of the leader; return how each was done."""
        upkeep, take, term = self.upkeep, self.driver.take, await self.lead()
        take()
        seen = {}
        assert "keys" in await upkeep.prune.kept()
        seen["kept"] = take()
        assert await upkeep.prune.delivered(term, "keys", 86_400.0, None, BATCH) == Slice(0, None)
        pruned = some(await upkeep.prune.delivered(term, "keys", 0.0, None, BATCH))
        assert pruned.changed == BATCH
        await upkeep.prune.delivered(term, "keys", 0.0, pruned.after, BATCH)
        seen["delivered"] = take()
        walked = some(await upkeep.prune.discarded(term, lambda _: 0.0, None, BATCH))
        assert walked.after is not None
        await upkeep.prune.discarded(term, lambda _: 0.0, walked.after, BATCH)
        seen["discarded"] = take()
        assert some(await upkeep.prune.orphans(term, None, BATCH)).changed > 0
        seen["orphans"] = take()
        # One key, whose head failed: nothing to do. Many keys, each with a head to make due.
        assert (await upkeep.sweep.make_due("one", True, None, BATCH)).changed == 0
        swept = await upkeep.sweep.make_due("keys", True, None, BATCH)
        assert (0 < swept.changed <= BATCH, swept.after is not None) == (True, True)
        assert 0 < (await upkeep.sweep.make_due("keys", True, swept.after, BATCH)).changed <= BATCH
        seen["sweep"] = take()
        assert await upkeep.sweep.unpark("one", BATCH) == BATCH
        seen["unpark"] = take()
        return seen


BACKLOG = (
    ("keys", 50_000, 1000, "delivered"),
    ("plain", 10_000, 0, "pending"),
    ("one", 1, 1, "failed"),
    ("keys", 20_000, 1000, "pending"),
    ("one", 20_000, 1, "pending"),
)
ATTEMPT = "INSERT INTO outbox_attempt (delivery_id, attempt, relay, error_message) "
ATTEMPTS = {
    "postgresql": "SELECT gen_random_uuid(), 1, 'r', 'e' FROM generate_series(1, 20000)",
    "mariadb": "SELECT REVERSE(id), 1, 'r', 'e' FROM outbox_event LIMIT 1000",
    "sqlite": "SELECT lower(hex(randomblob(16))), 1, 'r', 'e' FROM outbox_event LIMIT 1000",
}
SIDE_TABLES = (
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


def assert_none_is_read_through(database: Database, seen: Iterable[Explained], on_postgresql: bool) -> None:
    """Check every table that a plan of PostgreSQL reads, and the events of the others."""
    for explained in seen:
        assert explained.largest_sort <= 2 * BATCH, explained
        for access in explained.accesses:
            assert access.rows <= 5 * BATCH, explained
            assert access.how != "Seq Scan" if on_postgresql else access.how in database.HOW, explained


@each_database
async def test_what_is_led_reads_by_indexes(kind: str, analysed: bool, opened: Open) -> None:
    database, on_postgresql = opened(kind, BACKLOG), kind in POSTGRESQL
    attempts = ATTEMPT + ATTEMPTS[kind.partition("-")[0]]
    database.sql(PARK, DISCARD, attempts, *SIDE_TABLES * on_postgresql)
    if analysed:
        database.analyse()
    bench = Bench(database)
    seen = await bench.do_all()
    if on_postgresql:
        term = await bench.lead()
        keys = await bench.upkeep.prune.keys(term, 86_400.0, None, BATCH)
        assert keys is not None
        assert keys.changed == BATCH
        seen["keys"] = bench.driver.take()
        for history in ("inbox", "stats", "audit"):
            assert await bench.upkeep.prune.history(term, history, 86_400.0, BATCH) == BATCH
            seen[history] = bench.driver.take()
    assert_none_is_read_through(
        database, (one for several in seen.values() for one in several), on_postgresql
    )
    if kind != "mariadb":
        assert indexes(seen["kept"]) == {DELIVERED}
    assert indexes(seen["delivered"]) == {DELIVERED, IDS}
    assert indexes(seen["discarded"]) == indexes(seen["orphans"]) == {IDS}
    assert indexes(seen["sweep"]) == {PENDING, HEADS, IDS}
    assert indexes(seen["unpark"]) == {PENDING, IDS}


class EveryTenth:
    """Takes one of ten, for two destinations."""

    def __init__(self) -> None:
        self._seen = 0

    def takes(self, event_type: str) -> bool:
        self._seen += 1
        return self._seen % 10 == 0

    def targets(self, event: StoredEvent) -> Sequence[Target]:
        return [Target("mail", None, 5), Target("index", "k", 5)]


@each_database
async def test_unrouted_rows_are_gone_through_by_indexes(kind: str, analysed: bool, opened: Open) -> None:
    rows = 100_000 if kind in POSTGRESQL else 20_000
    database = opened(kind, [("", rows, 0, "pending")], analysed=analysed)
    bench = Bench(database)
    term = await bench.lead()
    bench.driver.take()
    by, after = EveryTenth(), None
    for _ in range(3):
        step = some(await bench.upkeep.unrouted.route(term, by, after, BATCH))
        assert (step.changed, step.after is not None) == (BATCH // 10, True)
        after = step.after
    seen = bench.driver.take()
    assert_none_is_read_through(database, seen, kind in POSTGRESQL)
    assert indexes(seen) == {PENDING, IDS}
