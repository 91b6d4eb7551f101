"""The contract of a store as tests, for our stores and for your own.

Subclass ``StoreContract`` in a test module and give it a ``harness`` fixture. pytest (with pytest-asyncio in
auto mode) then runs the whole contract::

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def harness(self): ...

This module covers what relays share (pauses, circuits, rate limits) and dead letters.
"""

from __future__ import annotations

import asyncio
import json
from operator import attrgetter
from typing import Any

import pytest

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Released, Retried
from relaybox.stores.store import Claim, DeadLetter, Held, Want
from relaybox.testing.harness import LEASE, Harness, claimed, die, emit, see, settle, take, want
from relaybox.testing.lease_contract import LeaseContract
from relaybox.testing.order_contract import OrderContract

SLACK = 5.0
"""Seconds that a test may take between two of its steps."""

GRAVE = DeadLetter("grave", max_attempts=3)
ORDERED_GRAVE = DeadLetter("grave", ordered=True)


def about(expected: float) -> Any:
    """Return a value that equals what was ``expected`` seconds a moment ago."""
    return pytest.approx(expected - SLACK / 2, rel=0, abs=SLACK / 2 + 0.001)


async def half_open(harness: Harness, seconds: float = 60) -> None:
    """Open the circuit and let its probe become due."""
    assert await harness.store.open_circuit("shop", 30, "503")
    await harness.pass_time(31)
    assert await harness.store.probe("shop", seconds)


class CircuitContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

    async def test_a_circuit_is_opened_by_one_of_several_relays(self, harness: Harness) -> None:
        opened = await asyncio.gather(*(harness.store.open_circuit("shop", 30, "503") for _ in range(8)))
        assert sorted(opened) == [False] * 7 + [True]
        assert not await harness.store.open_circuit("shop", 30, "503")

    async def test_an_open_circuit_holds_claims_and_says_why_and_for_how_long(self, harness: Harness) -> None:
        await emit(harness, 2, key="a")
        await harness.store.open_circuit("shop", 30, "503 from the shop")
        for ordered in (False, True):
            claim = await harness.store.claim(want(ordered=ordered))
            assert claim == Claim(held=Held("open", about(30), "503 from the shop"))

    async def test_a_circuit_holds_its_own_destination_only(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        await harness.store.open_circuit("other", 30, "503")
        assert await claimed(harness, want()) == [id_]
        assert await harness.store.claim(want()) == Claim()

    async def test_a_circuit_whose_time_is_over_still_holds_claims(self, harness: Harness) -> None:
        await emit(harness, 1)
        await harness.store.open_circuit("shop", 30, "503")
        await harness.pass_time(31)
        assert await harness.store.claim(want()) == Claim(held=Held("open", 0.0, "503"))

    async def test_what_is_leased_can_be_settled_behind_a_circuit(self, harness: Harness) -> None:
        await emit(harness, 1)
        claim = await take(harness, want())
        await harness.store.open_circuit("shop", 30, "503")
        assert not await settle(harness, claim, Delivered())

    async def test_nobody_probes_before_its_time(self, harness: Harness) -> None:
        assert not await harness.store.probe("shop", 60), "there is nothing to probe"
        await harness.store.open_circuit("shop", 30, "503")
        assert not await harness.store.probe("shop", 60)
        await harness.pass_time(31)
        assert await harness.store.probe("shop", 60)

    async def test_one_of_several_probes(self, harness: Harness) -> None:
        await harness.store.open_circuit("shop", 30, "503")
        await harness.pass_time(31)
        probing = await asyncio.gather(*(harness.store.probe("shop", 60) for _ in range(8)))
        assert sorted(probing) == [False] * 7 + [True]

    async def test_only_the_claim_of_the_probe_passes(self, harness: Harness) -> None:
        for ordered in (False, True):
            ids = await emit(harness, 2, key=f"ordered={ordered}")
            await half_open(harness, 60)
            claim = await harness.store.claim(want(ordered=ordered))
            assert claim == Claim(held=Held("half_open", about(60), "503"))
            assert await claimed(harness, want(1, ordered=ordered, probe=True)) == ids[:1]
            await harness.store.close_circuit("shop")
            assert len(await take(harness, want(ordered=ordered))) == (not ordered)

    async def test_a_probe_that_finds_nothing_due_is_not_held(self, harness: Harness) -> None:
        await half_open(harness)
        assert await harness.store.claim(want(probe=True)) == Claim()

    async def test_a_probe_whose_relay_died_is_made_again_after_its_time(self, harness: Harness) -> None:
        await half_open(harness, 60)
        assert not await harness.store.probe("shop", 60)
        await harness.pass_time(61)
        assert await harness.store.probe("shop", 60)
        assert not await harness.store.probe("shop", 60)

    async def test_a_probe_that_fails_opens_the_circuit_again(self, harness: Harness) -> None:
        await half_open(harness)
        assert not await harness.store.open_circuit("shop", 90, "not the probe")
        assert await harness.store.open_circuit("shop", 90, "504", probed=True)
        assert not await harness.store.open_circuit("shop", 90, "a late one", probed=True)
        assert (await harness.store.claim(want())).held == Held("open", about(90), "504")

    async def test_only_a_half_open_circuit_is_opened_by_a_probe(self, harness: Harness) -> None:
        assert not await harness.store.open_circuit("shop", 30, "503", probed=True)
        assert await harness.store.claim(want()) == Claim()

    async def test_closing_lets_claims_through(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        await half_open(harness)
        assert await harness.store.close_circuit("shop")
        assert not await harness.store.close_circuit("shop")
        assert await claimed(harness, want()) == [id_]
        assert await harness.store.open_circuit("shop", 30, "503")

    async def test_only_a_half_open_circuit_is_closed(self, harness: Harness) -> None:
        assert not await harness.store.close_circuit("shop")
        await harness.store.open_circuit("shop", 30, "503")
        assert not await harness.store.close_circuit("shop")

    async def test_a_circuit_without_end_is_open_for_a_long_time(self, harness: Harness) -> None:
        assert await harness.store.open_circuit("shop", float("inf"), "nul \0, surrogate \ud800")
        held = (await harness.store.claim(want())).held
        assert held is not None
        assert (held.seconds or 0) > 86_400

    async def test_a_pause_holds_claims_until_somebody_resumes(self, harness: Harness) -> None:
        await emit(harness, 1)
        assert await harness.store.pause("shop", "relay-1", "410 Gone")
        assert not await harness.store.pause("shop", "relay-2", "410 Gone")
        await harness.pass_time(10 * LEASE)
        assert await harness.store.claim(want()) == Claim(held=Held("paused", None, "410 Gone"))
        await harness.hold("shop", False)
        assert len(await take(harness, want())) == 1

    async def test_one_of_several_relays_pauses(self, harness: Harness) -> None:
        paused = await asyncio.gather(*(harness.store.pause("shop", f"{i}", "410") for i in range(8)))
        assert sorted(paused) == [False] * 7 + [True]

    async def test_a_pause_ends_by_itself_where_it_has_an_end(self, harness: Harness) -> None:
        await emit(harness, 1)
        await harness.hold("shop", True, seconds=30)
        assert await harness.store.claim(want()) == Claim(held=Held("paused", about(30)))
        await harness.pass_time(31)
        assert len(await take(harness, want())) == 1
        assert await harness.store.pause("shop", "relay-1", "410"), "it is not paused any more"
        assert (await harness.store.claim(want())).held == Held("paused", None, "410")

    async def test_a_pause_holds_a_probe_too_and_wins_over_the_circuit(self, harness: Harness) -> None:
        await emit(harness, 1)
        await half_open(harness)
        await harness.store.pause("shop", "relay-1", "410")
        for probe in (False, True):
            assert await harness.store.claim(want(probe=probe)) == Claim(held=Held("paused", None, "410"))

    async def test_places_in_the_line_are_handed_out_once(self, harness: Harness) -> None:
        assert await harness.store.reserve("shop", 2, 0.1) == 0
        assert await harness.store.reserve("shop", 1, 0.1) == about(20)
        assert await harness.store.reserve("shop", 5, 0.1) == about(30)
        assert await harness.store.reserve("shop", 1, 0.1) == about(80)
        assert await harness.store.reserve("other", 1, 0.1) == 0

    async def test_places_that_nobody_took_do_not_gather(self, harness: Harness) -> None:
        await harness.store.reserve("shop", 1, 0.1)
        await harness.pass_time(1000)
        assert await harness.store.reserve("shop", 3, 0.1) == 0
        assert await harness.store.reserve("shop", 3, 0.1) == about(30)

    async def test_the_line_moves_with_time(self, harness: Harness) -> None:
        await harness.store.reserve("shop", 10, 0.1)
        await harness.pass_time(60)
        assert await harness.store.reserve("shop", 1, 0.1) == about(40)

    async def test_concurrent_calls_never_share_a_place(self, harness: Harness) -> None:
        waits = await asyncio.gather(*(harness.store.reserve("shop", 1, 0.1) for _ in range(20)))
        assert sorted(waits) == [about(10 * place) for place in range(20)]


async def fail(harness: Harness, error: str = "422", dead_letter: DeadLetter = GRAVE) -> tuple[Delivery, ...]:
    """Claim what is due and fail all of it."""
    failed = await take(harness, want())
    assert await settle(harness, failed, Failed(error), dead_letter=dead_letter) == frozenset()
    return failed


async def copies(harness: Harness) -> tuple[Delivery, ...]:
    """Claim what came for the dead-letter destination."""
    return await take(harness, Want("grave", "undertaker", limit=2_000))


content = attrgetter(
    *("event_id", "aggregate_type", "aggregate_id", "event_type"),
    *("payload", "payload_data", "payload_encoding", "idempotency_key"),
)
"""What a copy has in common with its original."""


class DeadLetterContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

    async def test_what_failed_is_copied_for_the_dead_letters_destination(self, harness: Harness) -> None:
        id_ = await harness.emit("shop", key="a", max_attempts=7)
        [original] = await fail(harness)
        [copy] = await copies(harness)
        assert content(copy) == content(original)
        assert copy.id not in (id_, copy.event_id)
        assert copy.id.version == 7
        assert (copy.attempts, copy.max_attempts, copy.crashes) == (1, 3, 0)
        assert copy.ordering_key is None
        assert (await see(harness, id_)).state == "failed"

    async def test_a_copy_says_in_its_headers_where_it_came_from_and_why(self, harness: Harness) -> None:
        headers = {"note": "ü '\" %s :id {x}", "nested": {"a": [1, 2.5, None, True]}, "count": 2**53 + 1}
        await harness.emit("shop", headers=headers)
        await harness.emit("shop")
        await fail(harness, "nul \0, surrogate \ud800, tab \t, quote ' \" \\ %s :id {x} ü " + "x" * 20_000)
        for copy, own in zip(await copies(harness), (headers, {}), strict=True):
            found = json.loads(copy.headers)
            reason = found.pop("relaybox-dead-letter-reason")
            assert "tab \t, quote ' \" \\ %s :id {x} ü" in reason
            assert found == {**own, "relaybox-dead-letter-from": "shop"}

    async def test_a_copy_has_the_payload_whatever_it_is(self, harness: Harness) -> None:
        payloads: list[Any] = [{"a": [1, "ü", None]}, b"\x00\xff bytes", "text", [], 0]
        for payload in payloads:
            await harness.emit("shop", payload=payload)
        originals = await fail(harness)
        assert list(map(content, await copies(harness))) == list(map(content, originals))

    async def test_copies_for_an_ordered_destination_keep_their_key_and_their_order(
        self, harness: Harness
    ) -> None:
        for key in "abab":
            await harness.emit("shop", key=key)
        originals = await take(harness, want(ordered=True))
        assert await settle(harness, originals[::-1], Failed("no"), dead_letter=ORDERED_GRAVE) == frozenset()
        claim = await take(harness, Want("grave", "undertaker", ordered=True))
        found = [(d.event_id, d.ordering_key) for d in claim]
        assert found == [(d.event_id, d.ordering_key) for d in originals]

    async def test_only_what_failed_is_copied(self, harness: Harness) -> None:
        await emit(harness, 5, key="a")
        head, *rest = await take(harness, want(ordered=True))
        outcomes = (Released(), Retried(30, "503"), Delivered(), Delivered(keep=False), Failed("no"))
        assert await settle(harness, [*rest, head], *outcomes, dead_letter=GRAVE) == frozenset()
        assert [copy.event_id for copy in await copies(harness)] == [head.event_id]

    async def test_without_a_dead_letter_nothing_is_copied(self, harness: Harness) -> None:
        await emit(harness, 1)
        await settle(harness, await take(harness, want()), Failed("no"))
        assert await copies(harness) == ()

    async def test_a_lost_lease_copies_nothing(self, harness: Harness) -> None:
        ids = await emit(harness, 2)
        zombie = await take(harness, want())
        await harness.pass_time(LEASE + 1)
        await harness.store.claim(want(1, owner="relay-2"))
        assert await settle(harness, zombie, Failed("no"), dead_letter=GRAVE) == {ids[0]}
        assert [copy.event_id for copy in await copies(harness)] == [zombie[1].event_id]

    async def test_a_settle_that_is_repeated_copies_once(self, harness: Harness) -> None:
        [id_] = await emit(harness, 1)
        [delivery] = await fail(harness)
        assert await settle(harness, [delivery] * 2, Failed("422"), dead_letter=GRAVE) == {id_}
        assert len(await copies(harness)) == 1

    async def test_a_row_that_kills_every_relay_is_copied_with_the_reason(self, harness: Harness) -> None:
        for ordered in (False, True):
            id_ = await harness.emit("shop", key="a", max_attempts=1)
            await die(harness, want(ordered=ordered, skip=True), times=3)
            claim = await harness.store.claim(want(ordered=ordered, skip=True, dead_letter=GRAVE))
            assert claim == Claim(failed=claim.failed)
            assert [d.id for d in claim.failed] == [id_]
            *_, copy = await copies(harness)
            assert copy.event_id == id_
            reason = json.loads(copy.headers)["relaybox-dead-letter-reason"]
            assert reason == "the relay died 3 times while it held this event"

    async def test_a_dead_letter_may_fail_like_any_other_row(self, harness: Harness) -> None:
        await emit(harness, 1)
        [original] = await fail(harness)
        [copy] = await copies(harness)
        await settle(harness, [copy], Failed("503"), dead_letter=DeadLetter("crypt"))
        [last] = await take(harness, Want("crypt", "undertaker"))
        assert content(last) == content(original)
        headers = json.loads(last.headers)
        assert headers["relaybox-dead-letter-from"] == "grave"
        assert headers["relaybox-dead-letter-reason"] == "503"

    async def test_a_large_batch_with_long_errors_is_copied(self, harness: Harness) -> None:
        await harness.emit_many("shop", 1100)
        claim = await take(harness, want(1100))
        assert await settle(harness, claim, Failed("\x01" * 20_000), dead_letter=GRAVE) == frozenset()
        assert [d.event_id for d in await copies(harness)] == [d.event_id for d in claim]


class StoreContract(LeaseContract, OrderContract, CircuitContract, DeadLetterContract):
    """The whole contract in ``relaybox.stores.store``; ``testing.harness`` says what a harness does."""
