"""The contract of a store as tests, for every store there is and for one of your own.

Subclass ``StoreContract`` in a test module, give it a ``harness`` fixture, and pytest (with
pytest-asyncio in auto mode) runs the whole contract on it::

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def harness(self): ...
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Literal, NamedTuple, Protocol
from uuid import UUID

from relaybox.event import Delivery
from relaybox.outcome import Delivered, Failed, Outcome, Released, Retried
from relaybox.store import Claim, Settlement, Store, Want

State = Literal["due", "scheduled", "leased", "parked", "delivered", "failed", "discarded"]


class Seen(NamedTuple):
    """What a test looks at in a row."""

    state: State
    attempts: int
    crashes: int
    error: str | None


class Harness(Protocol):
    """What the contract needs to know of a store beyond its four methods."""

    store: Store

    async def emit(
        self, destination: str, *, key: str | None = None, max_attempts: int = 5, delay: float = 0
    ) -> UUID:
        """Commit one event, due ``delay`` seconds from now; the row's id."""
        ...

    async def emit_many(self, destination: str, count: int) -> list[UUID]:
        """Commit events without keys, in one transaction; the rows' ids."""
        ...

    async def see(self, id_: UUID) -> Seen | None:
        """The row now; None where there is none."""
        ...

    async def pass_time(self, seconds: float) -> None:
        """Make leases and due times ``seconds`` older, as if that time had passed."""
        ...

    async def hold(self, destination: str, held: bool) -> None:
        """Pause the destination, or go on."""
        ...


LEASE = 60.0


def want(limit: int = 100, *, ordered: bool = False, skip: bool = False, owner: str = "relay-1") -> Want:
    """A claim of the destination that most tests use."""
    return Want("shop", owner, limit, LEASE, ordered=ordered, on_failed="skip" if skip else "block")


class StoreContract:
    """Each test is a sentence of the contract in ``relaybox.store``."""

    async def test_a_claim_leases_due_rows_and_counts_the_attempt(self, harness: Harness) -> None:
        ids = await emit(harness, 3)
        claim = await harness.store.claim(want())
        assert [d.id for d in claim.deliveries] == ids
        assert {(d.attempts, d.crashes, d.lease_owner) for d in claim.deliveries} == {(1, 0, "relay-1")}
        assert [(await see(harness, id_)).state for id_ in ids] == ["leased"] * 3

    async def test_a_claim_hands_out_what_was_emitted(self, harness: Harness) -> None:
        id_ = await harness.emit("shop")
        [delivery] = (await harness.store.claim(want())).deliveries
        assert (delivery.id, delivery.destination, delivery.ordering_key) == (id_, "shop", None)
        assert delivery.created_at.utcoffset() is not None
        assert delivery.position > 0

    async def test_a_leased_row_is_not_claimed_again(self, harness: Harness) -> None:
        await emit(harness, 3)
        await harness.store.claim(want())
        assert await harness.store.claim(want(owner="relay-2")) == Claim()

    async def test_rows_of_one_claim_share_a_token_and_the_next_claim_has_another(
        self, harness: Harness
    ) -> None:
        await emit(harness, 4)
        first = await harness.store.claim(want(2))
        second = await harness.store.claim(want(2))
        tokens = [{d.lease_token for d in claim.deliveries} for claim in (first, second)]
        assert [len(token) for token in tokens] == [1, 1]
        assert tokens[0] != tokens[1]

    async def test_a_claim_takes_the_oldest_and_no_more_than_asked_for(self, harness: Harness) -> None:
        ids = await emit(harness, 5)
        assert [d.id for d in (await harness.store.claim(want(2))).deliveries] == ids[:2]
        assert [d.id for d in (await harness.store.claim(want(9))).deliveries] == ids[2:]

    async def test_a_claim_takes_rows_of_its_destination_only(self, harness: Harness) -> None:
        await harness.emit("other")
        mine = await harness.emit("shop")
        assert [d.id for d in (await harness.store.claim(want())).deliveries] == [mine]

    async def test_a_row_is_not_claimed_before_its_time(self, harness: Harness) -> None:
        id_ = await harness.emit("shop", delay=30)
        assert (await see(harness, id_)).state == "scheduled"
        assert await harness.store.claim(want()) == Claim()
        await harness.pass_time(31)
        assert [d.id for d in (await harness.store.claim(want())).deliveries] == [id_]

    async def test_a_held_destination_hands_out_nothing(self, harness: Harness) -> None:
        for ordered in (False, True):
            await emit(harness, 2, key=f"ordered={ordered}")
            await harness.hold("shop", True)
            assert await harness.store.claim(want(ordered=ordered)) == Claim()
            await harness.hold("shop", False)
            assert len((await harness.store.claim(want(ordered=ordered))).deliveries) == 2

    async def test_delivered_is_final(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        assert await settle_all(harness, Delivered()) == frozenset()
        assert await see(harness, id_) == Seen("delivered", 1, 0, None)
        assert await harness.store.claim(want()) == Claim()

    async def test_delivered_rows_that_are_not_kept_are_deleted(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        assert await settle_all(harness, Delivered(keep=False)) == frozenset()
        assert await harness.see(id_) is None

    async def test_retried_is_due_later_and_keeps_the_error(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        await settle_all(harness, Retried(30, "503"))
        assert await see(harness, id_) == Seen("scheduled", 1, 0, "503")
        await harness.pass_time(31)
        [again] = (await harness.store.claim(want())).deliveries
        assert (again.id, again.attempts) == (id_, 2)

    async def test_a_retry_that_does_not_count_gives_the_attempt_back(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        await settle_all(harness, Retried(30, "refused", counts=False))
        assert await see(harness, id_) == Seen("scheduled", 0, 0, "refused")

    async def test_failed_is_final_and_keeps_the_error(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        await settle_all(harness, Failed("422: no such field"))
        assert await see(harness, id_) == Seen("failed", 1, 0, "422: no such field")
        assert await harness.store.claim(want()) == Claim()

    async def test_an_error_may_hold_any_text(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        await settle_all(harness, Failed("nul \0, surrogate \ud800, quote ' \" %s :id {x} ü " + "x" * 20_000))
        seen = await see(harness, id_)
        assert seen.state == "failed"
        assert seen.error is not None
        assert "quote ' \" %s :id {x} ü" in seen.error

    async def test_released_rows_are_due_at_their_old_place_with_the_attempt_back(
        self, harness: Harness
    ) -> None:
        ids = await emit(harness, 4)
        claim = await harness.store.claim(want(2))
        assert await harness.store.release(claim.deliveries) == frozenset()
        assert await see(harness, ids[0]) == Seen("due", 0, 0, None)
        again = await harness.store.claim(want(3))
        assert [(d.id, d.attempts) for d in again.deliveries] == [(id_, 1) for id_ in ids[:3]]

    async def test_one_settle_takes_outcomes_of_every_kind(self, harness: Harness) -> None:
        ids = await emit(harness, 5)
        claim = await harness.store.claim(want())
        outcomes: list[Outcome] = [
            Delivered(),
            Retried(30, "later"),
            Failed("never"),
            Released(),
            Delivered(keep=False),
        ]
        settlements = [Settlement(d, o) for d, o in zip(claim.deliveries, outcomes, strict=True)]
        assert await harness.store.settle(settlements) == frozenset()
        seen = [await harness.see(id_) for id_ in ids]
        assert [row and row.state for row in seen] == ["delivered", "scheduled", "failed", "due", None]

    async def test_a_settle_of_nothing_is_nothing(self, harness: Harness) -> None:
        assert await harness.store.settle([]) == frozenset()
        assert await harness.store.extend([], LEASE) == frozenset()
        assert await harness.store.release([]) == frozenset()

    async def test_a_second_settle_is_told_that_the_lease_is_gone(self, harness: Harness) -> None:
        ids = await emit(harness, 2)
        claim = await harness.store.claim(want())
        settlements = [Settlement(d, Delivered()) for d in claim.deliveries]
        await harness.store.settle(settlements)
        failures = [Settlement(d, Failed("zombie")) for d in claim.deliveries]
        assert await harness.store.settle(failures) == frozenset(ids)
        assert (await see(harness, ids[0])).state == "delivered"

    async def test_a_settlement_may_be_given_twice(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        [delivery] = (await harness.store.claim(want())).deliveries
        assert await harness.store.settle([Settlement(delivery, Retried(30, "503"))] * 2) == frozenset()
        assert await see(harness, id_) == Seen("scheduled", 1, 0, "503")

    async def test_a_wait_without_end_is_a_long_one(self, harness: Harness) -> None:
        ids = await emit(harness, 3)
        claim = await harness.store.claim(want())
        waits = (float("inf"), float("nan"), 1e15)
        outcomes = [Retried(wait, "later") for wait in waits]
        settlements = [Settlement(d, o) for d, o in zip(claim.deliveries, outcomes, strict=True)]
        assert await harness.store.settle(settlements) == frozenset()
        assert [(await see(harness, id_)).state for id_ in ids] == ["scheduled"] * 3

    async def test_a_large_batch_with_long_errors_is_settled(self, harness: Harness) -> None:
        count = 1100
        ids = await harness.emit_many("shop", count)
        claim = await harness.store.claim(want(count))
        failed = [Settlement(d, Failed("\x01" * 20_000)) for d in claim.deliveries]
        assert await harness.store.settle(failed) == frozenset()
        assert (await see(harness, ids[-1])).state == "failed"

    async def test_a_zombie_settles_nothing_and_is_told_so(self, harness: Harness) -> None:
        ids = await emit(harness, 1)
        zombie = await harness.store.claim(want())
        await harness.pass_time(LEASE + 1)
        owner = await harness.store.claim(want(owner="relay-2"))
        for outcome in (Delivered(), Delivered(keep=False), Failed("no"), Retried(1, "no"), Released()):
            lost = await harness.store.settle([Settlement(d, outcome) for d in zombie.deliveries])
            assert lost == frozenset(ids)
        assert await harness.store.extend(zombie.deliveries, LEASE) == frozenset(ids)
        assert await harness.store.release(zombie.deliveries) == frozenset(ids)
        assert (await see(harness, ids[0])).state == "leased"
        assert (
            await harness.store.settle([Settlement(d, Delivered()) for d in owner.deliveries]) == frozenset()
        )

    async def test_what_is_still_ours_is_settled_beside_what_is_lost(self, harness: Harness) -> None:
        ids = await emit(harness, 2)
        claim = await harness.store.claim(want())
        await harness.pass_time(LEASE + 1)
        taken_over = await harness.store.claim(want(owner="relay-2"))
        lost = await harness.store.settle([Settlement(d, Delivered()) for d in claim.deliveries])
        assert lost == frozenset(d.id for d in taken_over.deliveries) == {ids[0]}
        assert (await see(harness, ids[1])).state == "delivered"

    async def test_a_lease_that_ran_out_can_be_settled_until_it_is_taken_over(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        claim = await harness.store.claim(want())
        await harness.pass_time(LEASE + 1)
        assert (
            await harness.store.settle([Settlement(d, Delivered()) for d in claim.deliveries]) == frozenset()
        )
        assert (await see(harness, id_)).state == "delivered"

    async def test_an_extended_lease_is_held(self, harness: Harness) -> None:
        await emit(harness, 2)
        claim = await harness.store.claim(want())
        await harness.pass_time(LEASE - 5)
        assert await harness.store.extend(claim.deliveries, LEASE) == frozenset()
        await harness.pass_time(LEASE - 5)
        assert await harness.store.claim(want(owner="relay-2")) == Claim()

    async def test_a_settled_row_cannot_be_extended(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        claim = await harness.store.claim(want())
        await harness.store.settle([Settlement(d, Delivered()) for d in claim.deliveries])
        assert await harness.store.extend(claim.deliveries, LEASE) == {id_}

    async def test_rows_of_a_dead_relay_are_claimed_one_by_one_with_the_attempt_back(
        self, harness: Harness
    ) -> None:
        ids = await emit(harness, 3)
        await harness.store.claim(want())
        fresh = await emit(harness, 2)
        await harness.pass_time(LEASE + 1)
        claims = [(await harness.store.claim(want())).deliveries for _ in range(4)]
        assert [[d.id for d in claim] for claim in claims] == [[ids[0]], [ids[1]], [ids[2]], fresh]
        assert {(d.attempts, d.crashes) for claim in claims[:3] for d in claim} == {(1, 1)}

    async def test_only_the_death_of_a_lone_claim_counts(self, harness: Harness) -> None:
        await harness.emit("shop", max_attempts=3)
        seen = []
        for _ in range(4):
            [delivery] = (await harness.store.claim(want())).deliveries
            seen.append((delivery.attempts, delivery.crashes))
            await harness.pass_time(LEASE + 1)
        assert seen == [(1, 0), (1, 1), (2, 2), (3, 3)]

    async def test_a_row_that_kills_every_relay_is_failed_with_the_reason(self, harness: Harness) -> None:
        id_ = await harness.emit("shop", max_attempts=2)
        for _ in range(3):
            assert (await harness.store.claim(want())).deliveries
            await harness.pass_time(LEASE + 1)
        claim = await harness.store.claim(want())
        assert (claim.deliveries, [d.id for d in claim.failed]) == ((), [id_])
        error = "the relay died 3 times while it held this event"
        assert await see(harness, id_) == Seen("failed", 2, 3, error)

    async def test_one_killer_takes_none_of_its_batch_with_it(self, harness: Harness) -> None:
        ids = await emit(harness, 100)
        killer = ids[40]
        deaths = 0
        while claim := await harness.store.claim(want()):
            if any(d.id == killer for d in claim.deliveries):
                deaths += 1
                await harness.pass_time(LEASE + 1)
            elif claim.deliveries:
                await harness.store.settle([Settlement(d, Delivered()) for d in claim.deliveries])
            elif not claim.failed:
                break
        assert deaths == 6
        error = "the relay died 6 times while it held this event"
        assert await see(harness, killer) == Seen("failed", 5, 6, error)
        others = [await see(harness, id_) for id_ in ids if id_ != killer]
        assert {(row.state, row.attempts) for row in others} == {("delivered", 1)}

    async def test_a_suspect_that_was_not_tried_stays_a_suspect(self, harness: Harness) -> None:
        ids = await emit(harness, 2)
        await harness.store.claim(want())
        await harness.pass_time(LEASE + 1)
        await harness.store.release((await harness.store.claim(want())).deliveries)
        assert [d.id for d in (await harness.store.claim(want())).deliveries] == ids[:1]

    async def test_a_suspect_that_was_settled_is_cleared(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        await harness.store.claim(want())
        await harness.pass_time(LEASE + 1)
        await settle_all(harness, Retried(30, "500"))
        assert await see(harness, id_) == Seen("scheduled", 1, 0, "500")

    async def test_the_run_of_a_key_is_claimed_whole_and_in_order(self, harness: Harness) -> None:
        ids = [await harness.emit("shop", key=key) for key in "aabab"]
        claim = await harness.store.claim(want(ordered=True))
        assert [d.id for d in claim.deliveries] == ids

    async def test_no_later_row_of_a_key_while_its_head_is_leased(self, harness: Harness) -> None:
        await emit(harness, 1, key="a")
        await harness.store.claim(want(ordered=True))
        later = await emit(harness, 2, key="a")
        other = await emit(harness, 1, key="b")
        claim = await harness.store.claim(want(ordered=True, owner="relay-2"))
        assert ([d.id for d in claim.deliveries], claim.parked) == (other, 2)
        assert [(await see(harness, id_)).state for id_ in later] == ["parked"] * 2
        assert await harness.store.claim(want(ordered=True)) == Claim()

    async def test_settling_the_head_makes_the_next_of_its_key_due(self, harness: Harness) -> None:
        await emit(harness, 1, key="a")
        head = await harness.store.claim(want(ordered=True))
        later = await emit(harness, 3, key="a")
        await harness.store.claim(want(ordered=True))
        await harness.store.settle([Settlement(d, Delivered()) for d in head.deliveries])
        assert [(await see(harness, id_)).state for id_ in later] == ["due", "parked", "parked"]
        assert [d.id for d in (await harness.store.claim(want(ordered=True))).deliveries] == later

    async def test_no_later_row_of_a_key_while_its_head_backs_off(self, harness: Harness) -> None:
        ids = await emit(harness, 3, key="a")
        head, *rest = (await harness.store.claim(want(ordered=True))).deliveries
        settlements = [Settlement(head, Retried(30, "503")), *(Settlement(d, Released()) for d in rest)]
        assert await harness.store.settle(settlements) == frozenset()
        assert await harness.store.claim(want(ordered=True)) == Claim(parked=2)
        assert await harness.store.claim(want(ordered=True)) == Claim()
        await harness.pass_time(31)
        claim = await harness.store.claim(want(ordered=True))
        assert [(d.id, d.attempts) for d in claim.deliveries] == list(zip(ids, [2, 1, 1], strict=True))

    async def test_a_failed_head_blocks_its_key_and_no_other(self, harness: Harness) -> None:
        later = (await emit(harness, 2, key="a"))[1:]
        other = await emit(harness, 1, key="b")
        head, rest, free = (await harness.store.claim(want(ordered=True))).deliveries
        await harness.store.settle(
            [Settlement(head, Failed("no")), Settlement(rest, Released()), Settlement(free, Released())]
        )
        claim = await harness.store.claim(want(ordered=True))
        assert ([d.id for d in claim.deliveries], claim.parked) == (other, 1)
        assert (await see(harness, later[0])).state == "parked"

    async def test_a_failed_head_is_skipped_where_that_is_the_policy(self, harness: Harness) -> None:
        ids = await emit(harness, 1, key="a")
        [head] = (await harness.store.claim(want(ordered=True, skip=True))).deliveries
        ids += await emit(harness, 2, key="a")
        assert (await harness.store.claim(want(ordered=True, skip=True))).parked == 2
        await harness.store.settle([Settlement(head, Failed("no"))], on_failed="skip")
        claim = await harness.store.claim(want(ordered=True, skip=True))
        assert [d.id for d in claim.deliveries] == ids[1:]

    async def test_a_suspect_head_is_claimed_alone_and_its_key_waits(self, harness: Harness) -> None:
        ids = await emit(harness, 3, key="a")
        await harness.store.claim(want(ordered=True))
        await harness.pass_time(LEASE + 1)
        for id_ in ids:
            claim = await harness.store.claim(want(ordered=True))
            assert [(d.id, d.attempts, d.crashes) for d in claim.deliveries] == [(id_, 1, 1)]
            assert not (await harness.store.claim(want(ordered=True, owner="relay-2"))).deliveries
            await harness.store.settle([Settlement(d, Delivered()) for d in claim.deliveries])

    async def test_a_killer_at_the_head_of_a_key_blocks_it_when_it_is_failed(self, harness: Harness) -> None:
        killer = await harness.emit("shop", key="a", max_attempts=1)
        [later] = await emit(harness, 1, key="a")
        for _ in range(2):
            assert (await harness.store.claim(want(ordered=True))).deliveries
            await harness.pass_time(LEASE + 1)
        assert [d.id for d in (await harness.store.claim(want(ordered=True))).failed] == [killer]
        assert not (await harness.store.claim(want(ordered=True))).deliveries
        assert (await see(harness, later)).state == "parked"

    async def test_a_killer_is_skipped_where_that_is_the_policy(self, harness: Harness) -> None:
        killer = await harness.emit("shop", key="a", max_attempts=1)
        [later] = await emit(harness, 1, key="a")
        for _ in range(2):
            assert (await harness.store.claim(want(ordered=True, skip=True))).deliveries
            await harness.pass_time(LEASE + 1)
        claim = await harness.store.claim(want(ordered=True, skip=True))
        assert [d.id for d in claim.failed] == [killer]
        assert [d.id for d in (await harness.store.claim(want(ordered=True, skip=True))).deliveries] == [
            later
        ]

    async def test_rows_without_a_key_need_no_order(self, harness: Harness) -> None:
        ids = await emit(harness, 3)
        first = await harness.store.claim(want(1, ordered=True))
        second = await harness.store.claim(want(ordered=True))
        assert [d.id for d in (*first.deliveries, *second.deliveries)] == ids

    async def test_a_long_key_drains_in_order_in_claims_of_any_size(self, harness: Harness) -> None:
        ids = await emit(harness, 120, key="hot")
        others = [await harness.emit("shop", key=f"k{i}") for i in range(10)]
        delivered = await drain(harness, limit=25)
        assert [id_ for id_ in delivered if id_ in set(ids)] == ids
        assert sorted(delivered) == sorted(ids + others)

    async def test_a_second_relay_cannot_overtake_within_a_key(self, harness: Harness) -> None:
        ids = await emit(harness, 30, key="hot")
        first = await harness.store.claim(want(10, ordered=True))
        for _ in range(4):
            assert not (await harness.store.claim(want(10, ordered=True, owner="relay-2"))).deliveries
        await harness.store.settle([Settlement(d, Delivered()) for d in first.deliveries])
        second = await harness.store.claim(want(10, ordered=True, owner="relay-2"))
        assert [d.id for d in second.deliveries] == ids[10:20]

    async def test_concurrent_claims_never_share_a_row(self, harness: Harness) -> None:
        ids = await emit(harness, 60)
        claims = await asyncio.gather(*(harness.store.claim(want(10, owner=f"relay-{i}")) for i in range(8)))
        taken = [d.id for claim in claims for d in claim.deliveries]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(ids)

    async def test_concurrent_ordered_claims_never_share_a_key(self, harness: Harness) -> None:
        for i in range(60):
            await harness.emit("shop", key=f"k{i % 7}")
        claims = await asyncio.gather(
            *(harness.store.claim(want(10, ordered=True, owner=f"relay-{i}")) for i in range(8))
        )
        holders: dict[str | None, set[str]] = defaultdict(set)
        for claim in claims:
            for delivery in claim.deliveries:
                holders[delivery.ordering_key].add(delivery.lease_owner)
        assert holders
        assert all(len(owners) == 1 for owners in holders.values())

    async def test_everything_is_delivered_in_order_through_retries_releases_and_deaths(
        self, harness: Harness
    ) -> None:
        chance = random.Random(7)
        ids = defaultdict(list)
        for _ in range(80):
            key = f"k{chance.randrange(5)}"
            ids[key].append(await harness.emit("shop", key=key, max_attempts=1000))
        delivered = await drain(harness, limit=12, chance=chance)
        for in_order in ids.values():
            assert [id_ for id_ in delivered if id_ in set(in_order)] == in_order


async def emit(harness: Harness, count: int, *, key: str | None = None) -> list[UUID]:
    """Commit events one after the other."""
    return [await harness.emit("shop", key=key) for _ in range(count)]


async def see(harness: Harness, id_: UUID) -> Seen:
    """The row, which must exist."""
    seen = await harness.see(id_)
    assert seen is not None
    return seen


async def settle_all(harness: Harness, outcome: Delivered | Retried | Failed) -> frozenset[UUID]:
    """Claim what is due and settle all of it alike."""
    claim = await harness.store.claim(want())
    assert claim.deliveries
    return await harness.store.settle([Settlement(d, outcome) for d in claim.deliveries])


async def drain(harness: Harness, *, limit: int, chance: random.Random | None = None) -> list[UUID]:
    """Claim and settle until nothing is left; the ids in the order of their delivery."""
    delivered: list[UUID] = []
    idle = 0
    while idle < 3:
        claim = await harness.store.claim(want(limit, ordered=True))
        if not claim.deliveries:
            idle += claim.parked == 0
            await harness.pass_time(LEASE + 1)
            continue
        idle = 0
        if chance is not None and chance.random() < 0.1:
            continue
        settlements = _send(claim.deliveries, chance)
        await harness.store.settle(settlements)
        delivered += [s.delivery.id for s in settlements if isinstance(s.outcome, Delivered)]
    return delivered


def _send(deliveries: tuple[Delivery, ...], chance: random.Random | None) -> list[Settlement]:
    """Deliver, but now and then a row of a key is retried and the rest of its run is released."""
    stopped: set[str | None] = set()
    settlements = []
    for delivery in deliveries:
        if delivery.ordering_key in stopped:
            settlements.append(Settlement(delivery, Released()))
        elif chance is not None and chance.random() < 0.2:
            stopped.add(delivery.ordering_key)
            settlements.append(Settlement(delivery, Retried(5, "try again")))
        else:
            settlements.append(Settlement(delivery, Delivered()))
    return settlements
