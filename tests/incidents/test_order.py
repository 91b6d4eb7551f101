"""Events that commit late, that clocks put in another order, and that wait behind one that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID

import pytest
from uuid_utils.compat import uuid7

from relaybox import Event, Reject
from relaybox.admin import Admin
from relaybox.ledger import Filter
from relaybox.stores import statements
from relaybox.stores.ledger import SqlLedger
from tests.incidents.stage import BOTH_WAYS, QUICK, SERVERS, store_of
from tests.incidents.variants import check, rewrite, variants
from tests.integration.shop import Shop

CURSOR = """{wanted} AND position > (SELECT COALESCE(max(seen.position), 0) FROM {event} seen
    WHERE seen.status = 'delivered')"""


def collecting(shop: Shop, **options: object) -> list[int]:
    """What the destination ``shop`` took, in the order of arrival."""
    taken: list[int] = []

    @shop.outbox.handler("*", name="shop", **QUICK, **options)
    async def take(event: Event) -> None:
        taken.append(event.payload["n"])

    return taken


@pytest.mark.parametrize("kind", SERVERS)
@variants("a cursor that moves to the last position")
async def test_a_late_commit_is_skipped_by_a_cursor(
    broken: str | None,
    kind: str,
    fresh_database: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if broken:
        rewrite(monkeypatch, statements.POSTGRESQL, "claim", ("{wanted}", CURSOR))
        rewrite(monkeypatch, statements.POSTGRESQL, "claim_unsuspected", ("NOT {suspect}", CURSOR))
        rewrite(monkeypatch, statements.WORDS, "in_line", ("{wanted}", CURSOR))
    shop = Shop(fresh_database(kind))
    taken = collecting(shop)
    with shop.engine.begin() as slow:
        shop.outbox.emit(slow, "Order", 1, "order.paid", {"n": 1})
        shop.emit(1, first=2)
        await shop.outbox.adrain()
        assert taken == [2], "what is not committed was delivered, or what is was not"
    await shop.outbox.adrain()
    with check(broken, "the late one was skipped"):
        assert taken == [2, 1], "the late one was skipped"


@variants("heads by the emitter's clock")
async def test_clocks_of_two_hosts_put_the_events_of_one_key_in_the_wrong_order(
    broken: str | None, fresh_database: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_id = ("ORDER BY position LIMIT 1", "ORDER BY id LIMIT 1")
    if broken:
        rewrite(monkeypatch, statements.POSTGRESQL, "claim_ordered", by_id)
        rewrite(monkeypatch, statements.WORDS, "heads_of_keys", by_id)
    shop = Shop(fresh_database("postgresql-18"))
    taken = collecting(shop, ordered=True)
    with monkeypatch.context() as fast_clock:
        # Ids begin with the milliseconds of the clock of whoever emits.
        fast_clock.setattr("relaybox.emit.row.uuid7", lambda: UUID(int=uuid7().int + (3_600_000 << 80)))
        shop.emit(1)
    shop.emit(1, first=1)
    await shop.outbox.adrain()
    with check(broken, "the order of the clocks"):
        assert taken == [0, 1], "the order of the clocks"


@pytest.mark.parametrize("kind", BOTH_WAYS)
@variants("heads among what is pending")
async def test_a_key_blocked_behind_a_failed_head_is_overtaken(
    broken: str | None,
    kind: str,
    fresh_database: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if broken:
        blocked = "status IN ('pending', 'failed') AND (status = 'pending' OR :block)"
        rewrite(monkeypatch, statements.WORDS, "open", (blocked, "status = 'pending'"))
    shop = Shop(fresh_database(kind))
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
    with check(broken, "the failed head was overtaken"):
        assert sorted(taken) == [0, 1, 3, 5], "the failed head was overtaken"
        async with store_of(shop) as store:
            operator = Admin(SqlLedger(store), shop.outbox.settings.destinations, "operator")
            assert (await operator.discard(Filter(status="failed"))).affected == 1
        await asyncio.wait_for(shop.outbox.adrain(), 10)
        assert taken[-2:] == [2, 4], "the key did not go on after the operator had discarded its head"
