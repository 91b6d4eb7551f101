"""Expired and extended leases, and rows whose relays died: part of the contract of a store."""

from __future__ import annotations

from relaybox.core.outcome import Delivered, Failed, Released, Retried
from relaybox.stores.store import Claim
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
    take,
    want,
)


class LeaseContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

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


class SuspectContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

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
