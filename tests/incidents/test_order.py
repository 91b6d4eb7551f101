"""Events that commit late, that clocks put in another order, and that wait behind one that failed."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from uuid_utils.compat import uuid7

from relaybox import Event, Reject
from relaybox.database.statements import delivery as statements
from relaybox.operate.admin import Admin
from relaybox.stores.ledger import Filter
from relaybox.stores.sql.ledger import SqlLedger
from tests.databases import SERVERS
from tests.incidents.conftest import BOTH_WAYS, Case, variants
from tests.integration.shop import QUICK, Shop
from tests.waiting import PATIENCE

CURSOR = """{wanted} AND position > (SELECT COALESCE(max(seen.position), 0) FROM {event} seen
    WHERE seen.status = 'delivered')"""


@pytest.mark.parametrize("kind", SERVERS)
@variants("a cursor that moves to the last position")
async def test_a_late_commit_is_skipped_by_a_cursor(case: Case, kind: str) -> None:
    if case.broken:
        case.rewrite(statements.POSTGRESQL, "claim", ("{wanted}", CURSOR))
        for name in ("claim_light", "claim_unsuspected"):
            case.rewrite(statements.POSTGRESQL, name, ("NOT {suspect}", CURSOR))
        case.rewrite(statements.WORDS, "in_line", ("{wanted}", CURSOR))
    shop = Shop(case.database(kind))
    taken = shop.collect("shop")
    with shop.engine.begin() as slow:
        shop.outbox.emit(slow, "Order", 1, "order.paid", {"n": 1})
        shop.emit(1, first=2)
        await shop.outbox.adrain()
        assert taken == [2], "what is not committed was delivered, or what is was not"
    await shop.outbox.adrain()
    with case.check("the late one was skipped"):
        assert taken == [2, 1], "the late one was skipped"


@variants("heads by the emitter's clock")
async def test_clocks_of_two_hosts_put_the_events_of_one_key_in_the_wrong_order(case: Case) -> None:
    by_id = ("ORDER BY position LIMIT 1", "ORDER BY id LIMIT 1")
    if case.broken:
        case.rewrite(statements.POSTGRESQL, "claim_ordered", by_id)
        case.rewrite(statements.WORDS, "heads_of_keys", by_id)
    shop = Shop(case.database("postgresql-18"))
    taken = shop.collect("shop", ordered=True)
    with case.patch.context() as fast_clock:
        # Ids begin with the milliseconds of the emitter's clock.
        fast_clock.setattr("relaybox.emit.row.uuid7", lambda: UUID(int=uuid7().int + (3_600_000 << 80)))
        shop.emit(1)
    shop.emit(1, first=1)
    await shop.outbox.adrain()
    with case.check("the order of the clocks"):
        assert taken == [0, 1], "the order of the clocks"


@pytest.mark.parametrize("kind", BOTH_WAYS)
@variants("heads among what is pending")
async def test_a_key_blocked_behind_a_failed_head_is_overtaken(case: Case, kind: str) -> None:
    if case.broken:
        blocked = "status IN ('pending', 'failed') AND (status = 'pending' OR :block)"
        case.rewrite(statements.WORDS, "open", (blocked, "status = 'pending'"))
    shop = Shop(case.database(kind))
    taken: list[int] = []

    @shop.outbox.handler("*", name="shop", ordered=True, **QUICK)
    async def refuse_the_first(event: Event) -> None:
        taken.append(event.payload["n"])
        if event.payload["n"] == 0:
            raise Reject("malformed")

    shop.emit(6, keys=2)
    for _ in range(2):
        await shop.outbox.adrain()
        await shop.outbox.relay().upkeep(prune=False)
    with case.check("the failed head was overtaken"):
        assert sorted(taken) == [0, 1, 3, 5], "the failed head was overtaken"
        async with shop.store() as store:
            operator = Admin(SqlLedger(store), shop.outbox.settings.destinations, "operator")
            assert (await operator.discard(Filter(status="failed"))).affected == 1
        await asyncio.wait_for(shop.outbox.adrain(), PATIENCE)
        assert taken[-2:] == [2, 4], "the key did not go on after the operator had discarded its head"
