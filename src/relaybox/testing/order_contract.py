"""Order within a key: the contract of a store for ordered destinations."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

from relaybox.core.outcome import Delivered, Failed, Released, Retried
from relaybox.stores.store import Claim
from relaybox.testing.harness import Harness, claimed, die, drain, emit, see, settle, states, take, want


class OrderContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

    async def test_the_run_of_a_key_is_claimed_whole_and_in_order(self, harness: Harness) -> None:
        ids = [await harness.emit("shop", key=key) for key in "aabab"]
        assert await claimed(harness, want(ordered=True)) == ids

    async def test_no_later_row_of_a_key_while_its_head_is_leased(self, harness: Harness) -> None:
        await emit(harness, 1, key="a")
        await harness.store.claim(want(ordered=True))
        later = await emit(harness, 2, key="a")
        other = await emit(harness, 1, key="b")
        claim = await harness.store.claim(want(ordered=True, owner="relay-2"))
        assert ([d.id for d in claim.deliveries], claim.parked) == (other, 2)
        assert await states(harness, later) == ["parked"] * 2
        assert await harness.store.claim(want(ordered=True)) == Claim()

    async def test_settling_the_head_makes_the_next_of_its_key_due(self, harness: Harness) -> None:
        await emit(harness, 1, key="a")
        head = await take(harness, want(ordered=True))
        later = await emit(harness, 3, key="a")
        await harness.store.claim(want(ordered=True))
        await settle(harness, head, Delivered())
        assert await states(harness, later) == ["due", "parked", "parked"]
        assert await claimed(harness, want(ordered=True)) == later

    async def test_no_later_row_of_a_key_while_its_head_backs_off(self, harness: Harness) -> None:
        ids = await emit(harness, 3, key="a")
        claim = await take(harness, want(ordered=True))
        assert await settle(harness, claim, Retried(30, "503"), Released(), Released()) == frozenset()
        assert await harness.store.claim(want(ordered=True)) == Claim(parked=2)
        assert await harness.store.claim(want(ordered=True)) == Claim()
        await harness.pass_time(31)
        claim = await take(harness, want(ordered=True))
        assert [(d.id, d.attempts) for d in claim] == list(zip(ids, [2, 1, 1], strict=True))

    async def test_a_failed_head_blocks_its_key_and_no_other(self, harness: Harness) -> None:
        later = (await emit(harness, 2, key="a"))[1:]
        other = await emit(harness, 1, key="b")
        await settle(harness, await take(harness, want(ordered=True)), Failed("no"), Released(), Released())
        claim = await harness.store.claim(want(ordered=True))
        assert ([d.id for d in claim.deliveries], claim.parked) == (other, 1)
        assert (await see(harness, later[0])).state == "parked"

    async def test_a_failed_head_is_skipped_where_that_is_the_policy(self, harness: Harness) -> None:
        ids = await emit(harness, 1, key="a")
        head = await take(harness, want(ordered=True, skip=True))
        ids += await emit(harness, 2, key="a")
        assert (await harness.store.claim(want(ordered=True, skip=True))).parked == 2
        await settle(harness, head, Failed("no"), on_failed="skip")
        assert await claimed(harness, want(ordered=True, skip=True)) == ids[1:]

    async def test_of_one_key_no_more_rows_are_claimed_than_asked_for(self, harness: Harness) -> None:
        hot = await emit(harness, 20, key="a")
        others = [await harness.emit("shop", key=key) for key in "bcd"]
        short = want(10, ordered=True, run=2)
        claims = [await harness.store.claim(short) for _ in range(4)]
        assert [d.id for d in claims[0].deliveries] == hot[:2]
        # The rest of the key is parked, and does not fill the window.
        assert {d.id for claim in claims[1:] for d in claim.deliveries} == set(others)
        await settle(harness, claims[0].deliveries, Delivered())
        assert await claimed(harness, short) == hot[2:4]

    async def test_no_due_row_of_a_key_in_hand_is_left_in_the_window(self, harness: Harness) -> None:
        ids = [await harness.emit("shop", key=key) for key in "abcaaa"]
        assert {d.id for d in await take(harness, want(6, ordered=True))} == set(ids)

    async def test_rows_without_a_key_need_no_order(self, harness: Harness) -> None:
        ids = await emit(harness, 3)
        first = await claimed(harness, want(1, ordered=True))
        assert first + await claimed(harness, want(ordered=True)) == ids

    async def test_a_long_key_drains_in_order_in_claims_of_any_size(self, harness: Harness) -> None:
        ids = await emit(harness, 120, key="hot")
        others = [await harness.emit("shop", key=f"k{i}") for i in range(10)]
        delivered = await drain(harness, limit=25)
        assert [id_ for id_ in delivered if id_ in set(ids)] == ids
        assert sorted(delivered) == sorted(ids + others)

    async def test_a_second_relay_cannot_overtake_within_a_key(self, harness: Harness) -> None:
        ids = await emit(harness, 30, key="hot")
        first = await take(harness, want(10, ordered=True))
        for _ in range(4):
            assert not await take(harness, want(10, ordered=True, owner="relay-2"))
        await settle(harness, first, Delivered())
        assert await claimed(harness, want(10, ordered=True, owner="relay-2")) == ids[10:20]

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


class OrderedSuspectContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

    async def test_the_run_of_a_dead_relay_is_claimed_again_as_a_run(self, harness: Harness) -> None:
        ids = await emit(harness, 3, key="a")
        await die(harness, want(ordered=True))
        claim = await take(harness, want(ordered=True, suspects=False))
        assert [(d.id, d.attempts, d.crashes) for d in claim] == [(id_, 1, 1) for id_ in ids]

    async def test_a_suspect_head_is_claimed_alone_and_its_key_waits(self, harness: Harness) -> None:
        ids = await emit(harness, 3, key="a")
        await die(harness, want(ordered=True), times=2)
        for id_ in ids:
            claim = await take(harness, want(ordered=True))
            assert [(d.id, d.attempts, d.crashes) for d in claim] == [(id_, 1, 2)]
            assert not await take(harness, want(ordered=True, owner="relay-2"))
            await settle(harness, claim, Delivered())

    async def test_suspects_of_several_keys_are_claimed_together_each_alone_with_its_key(
        self, harness: Harness
    ) -> None:
        ids = [await emit(harness, 3, key=key) for key in "abc"]
        await die(harness, want(ordered=True), times=2)
        claim = await take(harness, want(ordered=True))
        assert [(d.id, d.crashes) for d in claim] == [(of_key[0], 2) for of_key in ids]

    async def test_suspects_of_a_key_do_not_keep_those_of_others_out_of_the_window(
        self, harness: Harness
    ) -> None:
        [first, *_] = await emit(harness, 20, key="a")
        [other] = await emit(harness, 1, key="b")
        await die(harness, want(ordered=True), times=2)
        claims = [await harness.store.claim(want(16, ordered=True)) for _ in range(2)]
        assert [[d.id for d in claim.deliveries] for claim in claims] == [[first], [other]]

    async def test_without_suspects_a_key_waits_behind_its_suspect_head(self, harness: Harness) -> None:
        [suspect] = await emit(harness, 1, key="a")
        await die(harness, want(ordered=True), times=2)
        [later] = await emit(harness, 1, key="a")
        [other] = await emit(harness, 1, key="b")
        without = want(ordered=True, suspects=False)
        claim = await harness.store.claim(without)
        assert ([d.id for d in claim.deliveries], claim.parked) == ([other], 1)
        alone = await take(harness, want(ordered=True))
        assert [d.id for d in alone] == [suspect]
        await settle(harness, alone, Delivered())
        assert await claimed(harness, without) == [later]

    async def test_a_killer_at_the_head_of_a_key_blocks_it_when_it_is_failed(self, harness: Harness) -> None:
        killer = await harness.emit("shop", key="a", max_attempts=1)
        [later] = await emit(harness, 1, key="a")
        await die(harness, want(ordered=True), times=3)
        assert [d.id for d in (await harness.store.claim(want(ordered=True))).failed] == [killer]
        assert not await take(harness, want(ordered=True))
        assert (await see(harness, later)).state == "parked"

    async def test_a_killer_is_skipped_where_that_is_the_policy(self, harness: Harness) -> None:
        killer = await harness.emit("shop", key="a", max_attempts=1)
        [later] = await emit(harness, 1, key="a")
        await die(harness, want(ordered=True, skip=True), times=3)
        claim = await harness.store.claim(want(ordered=True, skip=True))
        assert [d.id for d in claim.failed] == [killer]
        assert await claimed(harness, want(ordered=True, skip=True)) == [later]


class OrderedChosenContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

    async def test_chosen_rows_are_claimed_from_the_head_of_their_key_to_the_first_that_was_not_chosen(
        self, harness: Harness
    ) -> None:
        ids = await emit(harness, 5, key="a")
        [other] = await emit(harness, 1, key="b")
        [free] = await emit(harness, 1)
        chosen = [free, *ids[:2], ids[3], other]
        assert await claimed(harness, want(ordered=True, only=chosen)) == [ids[0], ids[1], other, free]
        assert await states(harness, (ids[2], ids[4])) == ["due"] * 2

    async def test_a_key_whose_head_was_not_chosen_is_left_alone(self, harness: Harness) -> None:
        ids = await emit(harness, 5, key="a")
        other = await emit(harness, 2, key="b")
        chosen = [*ids[1:], *other]
        claim = await harness.store.claim(want(4, ordered=True, only=chosen))
        assert ([d.id for d in claim.deliveries], claim.parked) == (other, 0)
        assert await harness.store.claim(want(ordered=True, only=chosen)) == Claim()
        assert await states(harness, ids) == ["due"] * 5
        assert await claimed(harness, want(ordered=True)) == ids

    async def test_more_keys_than_asked_for_whose_heads_were_not_chosen_are_no_hindrance(
        self, harness: Harness
    ) -> None:
        waiting = [(await emit(harness, 2, key=f"k{n}"))[1] for n in range(4)]
        [other] = await emit(harness, 1, key="other")
        for limit in (4, 1):
            claim = await take(harness, want(limit, ordered=True, only=[*waiting, other]))
            assert [d.id for d in claim] == [other]
            await harness.store.release(claim)

    async def test_chosen_rows_are_parked_behind_any_head_that_is_not_free(self, harness: Harness) -> None:
        [head] = await emit(harness, 1, key="a")
        held = await take(harness, want(ordered=True))
        later = await emit(harness, 3, key="a")
        assert await harness.store.claim(want(ordered=True, only=later[:2])) == Claim(parked=2)
        assert await states(harness, later) == ["parked", "parked", "due"]
        await settle(harness, held, Delivered())
        assert await claimed(harness, want(ordered=True, only=[head, *later[:2]])) == later[:2]

    async def test_chosen_rows_of_many_keys_drain_in_order(self, harness: Harness) -> None:
        ids = [await harness.emit("shop", key=f"k{i % 7}") for i in range(60)]
        chosen, delivered = ids[:40], []
        while claim := await take(harness, want(9, ordered=True, only=chosen)):
            await settle(harness, claim, Delivered())
            delivered += [d.id for d in claim]
        assert sorted(delivered) == sorted(chosen)
        for key in range(7):
            of_key = chosen[key::7]
            assert [id_ for id_ in delivered if id_ in set(of_key)] == of_key
