"""Leases, outcomes, expired relays and suspects: the contract of a store without order."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from relaybox.core.outcome import Delivered, Failed, Released, Retried
from relaybox.stores.store import Claim, Held
from relaybox.testing.harness import (
    LEASE,
    Harness,
    Seen,
    claimed,
    die,
    emit,
    hold_alone,
    see,
    settle,
    settle_all,
    states,
    take,
    want,
)


class LeaseContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

    async def test_a_claim_leases_due_rows_and_counts_the_attempt(self, harness: Harness) -> None:
        ids = await emit(harness, 3)
        claim = await take(harness, want())
        assert [d.id for d in claim] == ids
        assert {(d.attempts, d.crashes, d.lease_owner) for d in claim} == {(1, 0, "relay-1")}
        assert await states(harness, ids) == ["leased"] * 3

    async def test_a_claim_hands_out_what_was_emitted(self, harness: Harness) -> None:
        id_ = await harness.emit("shop")
        [delivery] = await take(harness, want())
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
        [first], [second] = [{d.lease_token for d in await take(harness, want(2))} for _ in range(2)]
        assert first != second

    async def test_a_claim_takes_the_oldest_and_no_more_than_asked_for(self, harness: Harness) -> None:
        ids = await emit(harness, 5)
        assert await claimed(harness, want(2)) == ids[:2]
        assert await claimed(harness, want(9)) == ids[2:]

    async def test_a_claim_takes_no_more_bytes_than_asked_for_but_one_row_in_any_case(
        self, harness: Harness
    ) -> None:
        ids = await emit(harness, 3, key="one")
        for ordered, suspects in ((False, True), (False, False), (True, True)):
            claim = await take(harness, want(ordered=ordered, bytes=1, suspects=suspects))
            assert [d.id for d in claim] == ids[:1]
            await harness.store.release(claim)
        assert await states(harness, ids) == ["due"] * 3
        assert await claimed(harness, want(ordered=True, bytes=1_000_000)) == ids

    async def test_a_claim_takes_rows_of_its_destination_only(self, harness: Harness) -> None:
        await harness.emit("other")
        mine = await harness.emit("shop")
        assert await claimed(harness, want()) == [mine]

    async def test_a_row_is_not_claimed_before_its_time(self, harness: Harness) -> None:
        id_ = await harness.emit("shop", delay=30)
        assert (await see(harness, id_)).state == "scheduled"
        assert await harness.store.claim(want()) == Claim()
        await harness.pass_time(31)
        assert await claimed(harness, want()) == [id_]

    async def test_a_held_destination_hands_out_nothing(self, harness: Harness) -> None:
        for ordered in (False, True):
            await emit(harness, 2, key=f"ordered={ordered}")
            await harness.hold("shop", True)
            assert await harness.store.claim(want(ordered=ordered)) == Claim(held=Held("paused", None))
            await harness.hold("shop", False)
            assert len(await take(harness, want(ordered=ordered))) == 2

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
        [again] = await take(harness, want())
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
        assert "quote ' \" %s :id {x} ü" in (seen.error or "")

    async def test_released_rows_are_due_at_their_old_place_with_the_attempt_back(
        self, harness: Harness
    ) -> None:
        ids = await emit(harness, 4)
        assert await harness.store.release(await take(harness, want(2))) == frozenset()
        assert await see(harness, ids[0]) == Seen("due", 0, 0, None)
        assert [(d.id, d.attempts) for d in await take(harness, want(3))] == [(id_, 1) for id_ in ids[:3]]

    async def test_one_settle_takes_outcomes_of_every_kind(self, harness: Harness) -> None:
        ids = await emit(harness, 5)
        claim = await take(harness, want())
        kinds = (Delivered(), Retried(30, "later"), Failed("never"), Released(), Delivered(keep=False))
        assert await settle(harness, claim, *kinds) == frozenset()
        seen = [await harness.see(id_) for id_ in ids]
        assert [row and row.state for row in seen] == ["delivered", "scheduled", "failed", "due", None]

    async def test_a_settle_of_nothing_is_nothing(self, harness: Harness) -> None:
        assert await harness.store.settle([]) == frozenset()
        assert await harness.store.extend([], LEASE) == frozenset()
        assert await harness.store.release([]) == frozenset()

    async def test_a_second_settle_reports_that_the_lease_is_gone(self, harness: Harness) -> None:
        ids = await emit(harness, 2)
        claim = await take(harness, want())
        await settle(harness, claim, Delivered())
        assert await settle(harness, claim, Failed("zombie")) == frozenset(ids)
        assert (await see(harness, ids[0])).state == "delivered"

    async def test_a_settlement_may_be_given_twice(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        assert await settle(harness, await take(harness, want()) * 2, Retried(30, "503")) == frozenset()
        assert await see(harness, id_) == Seen("scheduled", 1, 0, "503")

    async def test_a_wait_without_end_is_a_long_one(self, harness: Harness) -> None:
        ids = await emit(harness, 3)
        claim = await take(harness, want())
        waits = (float("inf"), float("nan"), 1e15)
        assert await settle(harness, claim, *(Retried(wait, "later") for wait in waits)) == frozenset()
        assert await states(harness, ids) == ["scheduled"] * 3

    async def test_a_large_batch_with_long_errors_is_settled(self, harness: Harness) -> None:
        count = 1100
        ids = await harness.emit_many("shop", count)
        assert await settle(harness, await take(harness, want(count)), Failed("\x01" * 20_000)) == frozenset()
        assert (await see(harness, ids[-1])).state == "failed"

    async def test_a_zombie_settles_nothing_and_learns_it(self, harness: Harness) -> None:
        ids = await emit(harness, 1)
        zombie = await take(harness, want())
        await harness.pass_time(LEASE + 1)
        owner = await take(harness, want(owner="relay-2"))
        for outcome in (Delivered(), Delivered(keep=False), Failed("no"), Retried(1, "no"), Released()):
            assert await settle(harness, zombie, outcome) == frozenset(ids)
        assert await harness.store.extend(zombie, LEASE) == frozenset(ids)
        assert await harness.store.release(zombie) == frozenset(ids)
        assert (await see(harness, ids[0])).state == "leased"
        assert await settle(harness, owner, Delivered()) == frozenset()

    async def test_what_is_still_ours_is_settled_beside_what_is_lost(self, harness: Harness) -> None:
        ids = await emit(harness, 2)
        claim = await take(harness, want())
        await harness.pass_time(LEASE + 1)
        taken_over = await take(harness, want(1, owner="relay-2"))
        assert await settle(harness, claim, Delivered()) == frozenset(d.id for d in taken_over) == {ids[0]}
        assert (await see(harness, ids[1])).state == "delivered"

    async def test_a_lease_that_ran_out_can_be_settled_until_it_is_taken_over(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        claim = await take(harness, want())
        await harness.pass_time(LEASE + 1)
        assert await settle(harness, claim, Delivered()) == frozenset()
        assert (await see(harness, id_)).state == "delivered"

    async def test_an_extended_lease_is_held(self, harness: Harness) -> None:
        await emit(harness, 2)
        claim = await take(harness, want())
        await harness.pass_time(LEASE - 5)
        assert await harness.store.extend(claim, LEASE) == frozenset()
        await harness.pass_time(LEASE - 5)
        assert await harness.store.claim(want(owner="relay-2")) == Claim()

    async def test_a_settled_row_cannot_be_extended(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        claim = await take(harness, want())
        await settle(harness, claim, Delivered())
        assert await harness.store.extend(claim, LEASE) == {id_}

    async def test_rows_of_a_dead_relay_are_claimed_with_others_and_the_attempt_back(
        self, harness: Harness
    ) -> None:
        ids = await emit(harness, 3)
        await die(harness, want())
        fresh = await emit(harness, 2)
        claim = await take(harness, want(suspects=False))
        assert [d.id for d in claim] == ids + fresh
        assert [(d.attempts, d.crashes, d.suspect) for d in claim] == [
            *3 * [(1, 1, False)],
            *2 * [(1, 0, False)],
        ]

    async def test_rows_of_two_dead_relays_are_claimed_apart_with_the_attempt_back(
        self, harness: Harness
    ) -> None:
        ids = await emit(harness, 20)
        await die(harness, want(), times=2)
        fresh = await emit(harness, 2)
        claims = [await take(harness, want()) for _ in range(3)]
        assert [[d.id for d in claim] for claim in claims] == [ids[:16], ids[16:], fresh]
        assert {(d.attempts, d.crashes) for claim in claims[:2] for d in claim} == {(1, 2)}

    async def test_with_each_death_half_as_many_suspects_are_claimed_together(self, harness: Harness) -> None:
        ids = await emit(harness, 100)
        sizes = []
        for _ in range(8):
            claim = await take(harness, want())
            assert [d.id for d in claim] == ids[: len(claim)]
            assert {d.attempts for d in claim} == {1}
            sizes.append(len(claim))
            await harness.pass_time(LEASE + 1)
        assert sizes == [100, 100, 16, 8, 4, 2, 1, 1]

    async def test_suspects_are_not_claimed_with_those_that_died_more_often(self, harness: Harness) -> None:
        ids = await emit(harness, 4)
        await die(harness, want(2), times=3)
        await die(harness, want(suspects=False), times=2)
        claims = [await take(harness, want()) for _ in range(2)]
        assert [[(d.id, d.crashes) for d in claim] for claim in claims] == [
            [(ids[0], 3), (ids[1], 3)],
            [(ids[2], 2), (ids[3], 2)],
        ]

    async def test_only_a_death_that_was_said_to_be_alone_counts(self, harness: Harness) -> None:
        id_ = await harness.emit("shop", max_attempts=3)
        seen = []
        for alone in ((), (), (), (True,), (True, False), (False,), (True,)):
            [delivery] = await take(harness, want())
            seen.append((delivery.attempts, delivery.crashes))
            for word in alone:
                await harness.store.hold_alone(delivery, word)
            await harness.pass_time(LEASE + 1)
        assert seen == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]
        await settle_all(harness, Delivered())
        assert await see(harness, id_) == Seen("delivered", 3, 7, None)

    async def test_what_was_held_alone_and_released_does_not_count_when_it_is_claimed_again(
        self, harness: Harness
    ) -> None:
        [id_] = await emit(harness, 1)
        await die(harness, want(), times=2)
        claim = await take(harness, want())
        await hold_alone(harness, claim)
        await harness.store.release(claim)
        assert await see(harness, id_) == Seen("due", 0, 2, None)
        [again] = await take(harness, want())
        # A relay with an expired lease changes nothing.
        await harness.store.hold_alone(claim[0], True)
        await harness.pass_time(LEASE + 1)
        assert [(d.attempts, d.crashes) for d in await take(harness, want())] == [(1, 3)]
        assert again.attempts == 1

    async def test_a_row_that_kills_every_relay_is_failed_with_the_reason(self, harness: Harness) -> None:
        id_ = await harness.emit("shop", max_attempts=2)
        await die(harness, want(), times=4)
        claim = await harness.store.claim(want())
        assert (claim.deliveries, [d.id for d in claim.failed]) == ((), [id_])
        error = "the relay died 4 times while it held this event"
        assert await see(harness, id_) == Seen("failed", 2, 4, error)

    async def test_one_killer_takes_none_of_its_batch_with_it(self, harness: Harness) -> None:
        ids = await emit(harness, 100)
        killer = ids[40]
        deaths = 0
        while claim := await harness.store.claim(want()):
            await hold_alone(harness, claim.deliveries)
            if any(d.id == killer for d in claim.deliveries):
                deaths += 1
                await harness.pass_time(LEASE + 1)
            elif claim.deliveries:
                await settle(harness, claim.deliveries, Delivered())
            elif not claim.failed:
                break
        assert deaths == 11
        error = "the relay died 11 times while it held this event"
        assert await see(harness, killer) == Seen("failed", 5, 11, error)
        others = [await see(harness, id_) for id_ in ids if id_ != killer]
        assert {(row.state, row.attempts) for row in others} == {("delivered", 1)}

    async def test_a_suspect_that_was_not_tried_stays_a_suspect(self, harness: Harness) -> None:
        ids = await emit(harness, 2)
        await die(harness, want(), times=2)
        await harness.store.release(await take(harness, want()))
        assert await claimed(harness, want()) == ids

    async def test_a_claim_without_suspects_takes_the_others(self, harness: Harness) -> None:
        suspects = await emit(harness, 3)
        await die(harness, want(), times=2)
        others = await emit(harness, 2)
        claim = await take(harness, want(suspects=False))
        assert [(d.id, d.attempts) for d in claim] == [(id_, 1) for id_ in others]
        assert await claimed(harness, want()) == suspects

    async def test_a_suspect_that_was_settled_is_cleared(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        await die(harness, want(), times=2)
        await settle_all(harness, Retried(30, "500"))
        assert await see(harness, id_) == Seen("scheduled", 1, 0, "500")

    async def test_a_delivery_that_was_cut_off_counts_as_one_more_death(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        await die(harness, want(), times=2)
        await settle_all(harness, Retried(30, "stopped", counts=False, cut_off=True))
        assert await see(harness, id_) == Seen("scheduled", 0, 3, "stopped")

    async def test_concurrent_claims_never_share_a_row(self, harness: Harness) -> None:
        ids = await emit(harness, 60)
        claims = await asyncio.gather(*(harness.store.claim(want(10, owner=f"relay-{i}")) for i in range(8)))
        taken = [d.id for claim in claims for d in claim.deliveries]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(ids)

    async def test_a_claim_of_chosen_rows_takes_no_others(self, harness: Harness) -> None:
        ids = await emit(harness, 5)
        elsewhere = await harness.emit("other")
        chosen = [ids[3], elsewhere, uuid4(), ids[1], ids[3]]
        claim = await take(harness, want(only=chosen))
        assert [(d.id, d.attempts) for d in claim] == [(ids[1], 1), (ids[3], 1)]
        assert await harness.store.claim(want(only=chosen)) == Claim()
        assert await states(harness, ids) == ["due", "leased", "due", "leased", "due"]
        assert await harness.store.claim(want(only=[])) == Claim()

    async def test_a_claim_of_chosen_rows_takes_the_oldest_and_no_more_than_asked_for(
        self, harness: Harness
    ) -> None:
        ids = await emit(harness, 6)
        chosen = ids[:0:-1]
        claims = [await take(harness, want(2, only=chosen)) for _ in range(4)]
        assert [[d.id for d in claim] for claim in claims] == [ids[1:3], ids[3:5], ids[5:], []]

    async def test_no_more_suspects_of_chosen_rows_are_claimed_than_asked_for(self, harness: Harness) -> None:
        ids = await emit(harness, 4)
        await die(harness, want(4), times=2)
        for ordered in (False, True):
            assert len(await take(harness, want(1, ordered=ordered, only=ids))) == 1

    async def test_of_chosen_rows_only_those_that_are_due_are_claimed(self, harness: Harness) -> None:
        later = await harness.emit("shop", delay=30)
        [settled] = await emit(harness, 1)
        await settle_all(harness, Delivered())
        [failed] = await emit(harness, 1)
        await settle_all(harness, Failed("no"))
        chosen = [later, settled, failed, *await emit(harness, 1)]
        assert await claimed(harness, want(only=chosen)) == chosen[3:]
        await harness.pass_time(31)
        assert await claimed(harness, want(only=chosen)) == [later]

    async def test_suspects_are_apart_among_chosen_rows_too(self, harness: Harness) -> None:
        ids = await emit(harness, 3)
        await die(harness, want(3), times=2)
        chosen = [*ids[1:], *await emit(harness, 2)]
        assert await claimed(harness, want(only=chosen, suspects=False)) == chosen[2:]
        claim = await take(harness, want(only=chosen))
        assert [(d.id, d.crashes) for d in claim] == [(id_, 2) for id_ in ids[1:]]

    async def test_a_claim_of_chosen_rows_is_held_up_as_any_other(self, harness: Harness) -> None:
        chosen = await emit(harness, 1)
        await harness.hold("shop", True)
        assert await harness.store.claim(want(only=chosen)) == Claim(held=Held("paused", None))
        await harness.hold("shop", False)
        await harness.store.open_circuit("shop", 60, "503")
        assert await take(harness, want(only=chosen)) == ()
        assert await claimed(harness, want(only=chosen, probe=True)) == chosen

    async def test_concurrent_claims_of_the_same_chosen_rows_never_share_one(self, harness: Harness) -> None:
        ids = await emit(harness, 40)
        claims = await asyncio.gather(
            *(harness.store.claim(want(10, owner=f"relay-{i}", only=ids[:30])) for i in range(8))
        )
        taken = [d.id for claim in claims for d in claim.deliveries]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(ids[:30])
