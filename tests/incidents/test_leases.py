"""A lease that ran out: who may write the row, and who hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from relaybox import Event
from relaybox.core.outcome import Delivered, Retried
from relaybox.database.statements import delivery as statements
from relaybox.relay.observer import Observer
from relaybox.stores.sql.outcomes import OfLease
from relaybox.stores.sql.steps import StoreSteps
from relaybox.stores.store import Settlement, Want
from tests.databases import SERVERS
from tests.incidents.conftest import Case, done_or_waiting, make_shop, take_over, variants
from tests.integration.shop import Shop, drive
from tests.waiting import await_for

REOPENED = "SET status = 'pending', delivered_at = NULL, next_attempt_at = {now}, {lease}"


def unlocked(case: Case, *, reopen: bool = False) -> None:
    """Claims read what is due without a lock, and write later what they have read."""
    leased = REOPENED if reopen else "SET {lease}"
    for name in ("claim", "claim_light", "claim_unsuspected"):
        case.rewrite(
            statements.POSTGRESQL,
            name,
            ("ctid", "id"),
            ("FOR UPDATE OF {event_alias} SKIP LOCKED", ""),
            ("SET {lease}", leased),
        )
    case.rewrite(statements.WORDS, "locked_rows", ("{skip_locked}", ""))
    case.rewrite(statements.MYSQL, "lease", ("SET {lease}", leased))


@pytest.mark.parametrize("kind", SERVERS)
@variants("a rescuer that writes what it read before")
async def test_a_rescuer_overwrites_a_row_that_was_completed_meanwhile(case: Case, kind: str) -> None:
    if case.broken:
        unlocked(case, reopen=True)
    shop = make_shop(case.database(kind))
    shop.emit(1)
    async with shop.store() as store:
        [slow] = (await store.claim(Want("shop", "slow"))).deliveries
        shop.end_leases()
        with shop.transaction() as connection:
            settled = drive(connection, store.steps.settle([Settlement(slow, Delivered())], "skip"))
            rescue = asyncio.create_task(store.claim(Want("shop", "rescuer")))
            await done_or_waiting(rescue, shop)
        rescued = (await rescue).deliveries
    assert not settled.lost, "the slow relay was in time: nobody had its row yet"
    with case.check("a completed row was opened again"):
        assert (shop.states(), rescued) == ({"delivered": 1}, ()), "a completed row was opened again"


class Losses(Observer):
    """Keeps what settles were too late."""

    def __init__(self) -> None:
        self.settled_ids: set[UUID] = set()
        self.lost: set[UUID] = set()

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        self.settled_ids |= {settlement.delivery.id for settlement in settlements}
        self.lost |= lost


@variants("a settle that does not count its rows", "a settle that names no token")
async def test_a_batch_outlives_its_lease_and_its_settle_is_silent(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    if case.broken == "a settle that does not count its rows":
        case.patch.setattr(StoreSteps, "_lost", lambda *_: frozenset())
        case.patch.setattr(OfLease, "lost", lambda *_: frozenset())
    elif case.broken:
        case.rewrite(statements.WORDS, "of_lease", (" AND e.lease_token = :token", ""))
    shop = Shop(case.database("postgresql-18"))
    begun, go_on = asyncio.Event(), asyncio.Event()

    @shop.outbox.handler("*", name="shop")
    async def stall(event: Event) -> None:
        begun.set()
        await go_on.wait()

    shop.emit(1)
    losses = Losses()
    async with shop.outbox.relay(observers=[losses]):
        await begun.wait()
        take_over(shop, "the other")
        go_on.set()
        await await_for(lambda: bool(losses.settled_ids), "the late settle")
        with case.check("the late settle"):
            assert losses.lost == set(shop.column("id")), (
                "the late settle did not learn that it wrote nothing"
            )
            assert shop.column("lease_owner") == ["the other"], "the late settle wrote another's row"
            assert any("lost a lease" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", SERVERS)
@variants("claims that read before they lock")
async def test_a_retried_row_is_claimed_by_two_relays(case: Case, kind: str) -> None:
    if case.broken:
        unlocked(case)
    shop = make_shop(case.database(kind))
    shop.emit(1)
    async with shop.store() as store:
        tried = (await store.claim(Want("shop", "relay-0"))).deliveries
        await store.settle([Settlement(delivery, Retried(0.0, "busy")) for delivery in tried])
        holders: list[Any] = []
        with shop.transaction() as connection:
            holders += drive(connection, store.steps.claim(Want("shop", "relay-1"))).deliveries
            second = asyncio.create_task(store.claim(Want("shop", "relay-2")))
            await done_or_waiting(second, shop)
        holders += (await second).deliveries
    with case.check("two relays hold it"):
        assert [delivery.lease_owner for delivery in holders] == ["relay-1"], "two relays hold it"
