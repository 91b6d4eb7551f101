"""What a relay leaves in the database: while it sends, and when it stops."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import psycopg
import sqlalchemy as sa

from relaybox import Event
from relaybox.relay.release import Releases
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.store import Claim, Want
from tests.incidents.conftest import Case, variants
from tests.integration.shop import QUICK, Shop
from tests.waiting import await_for

OPEN = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND state LIKE 'idle in transaction%'"""
LOCK = "SELECT id FROM outbox_event FOR UPDATE NOWAIT"


def hold_rows(url: str, case: Case) -> None:
    """Keep the rows of a claim locked in a transaction until they are settled."""
    opened, really_claim, really_settle = ExitStack(), SqlStore.claim, SqlStore.settle

    async def claim(self: SqlStore, want: Want) -> Claim:
        got = await really_claim(self, want)
        if got.deliveries:
            connection = opened.enter_context(psycopg.connect(url))
            connection.execute("SELECT id FROM outbox_event FOR UPDATE")
        return got

    async def settle(self: SqlStore, *given: Any, **policy: Any) -> Any:
        opened.close()
        return await really_settle(self, *given, **policy)

    case.patch.setattr(SqlStore, "claim", claim)
    case.patch.setattr(SqlStore, "settle", settle)


@variants("rows that stay locked until they are sent")
async def test_a_transaction_is_open_while_the_sink_is_called(case: Case) -> None:
    url = case.database("postgresql-18")
    shop = Shop(url)
    found: list[Any] = []

    @shop.outbox.handler("*", name="shop", **QUICK)
    async def look_around(event: Event) -> None:
        with shop.engine.connect() as connection:
            found.append(connection.scalar(sa.text(OPEN)))
            try:
                connection.execute(sa.text(LOCK))
            except sa.exc.OperationalError as locked:
                found.append(locked)

    shop.emit(3)
    if case.broken:
        hold_rows(url, case)
    await shop.outbox.adrain()
    assert shop.states() == {"delivered": 3}
    with case.check("transactions or locks were open"):
        assert found == [0, 0, 0], "transactions or locks were open while the sink was called"


async def keep(self: Releases, deliveries: Any) -> bool:
    """Leave it to the leases to run out."""
    return True


@variants("a stop that gives nothing back")
async def test_a_relay_that_is_stopped_keeps_its_claims(case: Case) -> None:
    if case.broken:
        case.patch.setattr(Releases, "release", keep)
    shop = Shop(case.database("sqlite"))
    begun: list[Event] = []

    @shop.outbox.handler("*", name="shop", concurrency=2, **QUICK)
    async def hang(event: Event) -> None:
        begun.append(event)
        await asyncio.Event().wait()

    shop.emit(10)
    async with shop.outbox.relay(patience=0.1):
        await await_for(lambda: len(begun) == 2, "two being sent, the rest waiting")
    with case.check("rows are still leased"):
        assert shop.leases() == 0, "rows are still leased"
        assert {row[:2] for row in shop.rows()} == {("pending", 0)}, "attempts were not given back"
