"""Relays that die with rows in their hands: the rows are tried again, and nobody else is blamed."""

from __future__ import annotations

import pytest

from relaybox import Event, Retry
from relaybox.core.outcome import Retried
from relaybox.database.statements import delivery as statements
from relaybox.stores.store import Settlement, Want
from tests.incidents.conftest import BOTH_WAYS, Case, make_shop, variants
from tests.integration.shop import QUICK, Shop

DEATHS = 5


@pytest.mark.parametrize("kind", BOTH_WAYS)
@variants("claims of rows with attempts left")
async def test_a_crash_on_the_last_attempt_sticks_forever(case: Case, kind: str) -> None:
    if case.broken:
        whoever = "(:suspects OR NOT {suspect})"
        case.rewrite(statements.WORDS, "wanted", (whoever, f"{whoever} AND attempts < max_attempts"))
    shop = make_shop(case.database(kind), max_attempts=2)
    shop.emit(1)
    async with shop.store() as store:
        [first] = (await store.claim(Want("shop", "relay"))).deliveries
        await store.settle([Settlement(first, Retried(0.0, "busy"))])
        for _ in range(DEATHS):
            claim = await store.claim(Want("shop", "mortal"))
            for delivery in claim.deliveries:
                await store.hold_alone(delivery, delivery.suspect)
            shop.end_leases()
    with case.check("it is neither delivered nor failed"):
        [(status, _, error)] = shop.rows()
        assert status == "failed", "it is neither delivered nor failed"
        assert "the relay died" in (error or "")


@pytest.mark.parametrize("kind", BOTH_WAYS)
@variants("deaths that count for everybody")
async def test_five_crashes_of_a_relay_fail_a_whole_batch_of_innocents(case: Case, kind: str) -> None:
    if case.broken:
        case.rewrite(statements.WORDS, "suspect", (statements.WORDS["suspect"], "(crashes < 0)"))
        given_back = "CASE WHEN lease_token IS NOT NULL AND crashes < 1000 THEN 0 ELSE 1 END"
        case.rewrite(statements.WORDS, "lease", (given_back, "1"))
    shop = Shop(case.database(kind))
    seen: set[int] = set()

    @shop.outbox.handler("*", name="shop", max_attempts=DEATHS, **QUICK)
    async def hiccup(event: Event) -> None:
        if event.payload["n"] not in seen:
            seen.add(event.payload["n"])
            raise Retry("500")

    shop.emit(10)
    async with shop.store() as store:
        for _ in range(DEATHS):
            # As a relay does it: whatever is beyond suspicion at once, and the first suspect alone.
            await store.claim(Want("shop", "mortal", suspects=False))
            await store.claim(Want("shop", "mortal", limit=1))
            shop.end_leases()
    await shop.outbox.adrain()
    _killer, *innocents = shop.rows()
    with case.check("innocents were failed"):
        assert {status for status, _, _ in innocents} <= {"pending", "delivered"}, "innocents were failed"
