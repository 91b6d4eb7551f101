"""Settles of every outcome: part of the contract of a store."""

from __future__ import annotations

from relaybox.core.outcome import Delivered, Failed, Released, Retried
from relaybox.stores.store import Claim
from relaybox.testing.harness import LEASE, Harness, Seen, emit, see, settle, settle_all, states, take, want


class OutcomeContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

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
