"""Claims without order, of any rows and of chosen ones: part of the contract of a store."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from relaybox.core.outcome import Delivered, Failed
from relaybox.stores.store import Claim, Held
from relaybox.testing.harness import Harness, claimed, die, emit, see, settle_all, states, take, want


class ClaimContract:
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

    async def test_concurrent_claims_never_share_a_row(self, harness: Harness) -> None:
        ids = await emit(harness, 60)
        claims = await asyncio.gather(*(harness.store.claim(want(10, owner=f"relay-{i}")) for i in range(8)))
        taken = [d.id for claim in claims for d in claim.deliveries]
        assert len(taken) == len(set(taken))
        assert set(taken) <= set(ids)


class ChosenContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

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
