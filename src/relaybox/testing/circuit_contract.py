"""Circuits, pauses and rate limits, which relays share: part of the contract of a store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relaybox.core.outcome import Delivered
from relaybox.stores.store import Claim, Held
from relaybox.testing.harness import LEASE, Harness, claimed, emit, settle, take, want

SLACK = 5.0
"""Seconds that a test may take between two of its steps."""


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


class PauseContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

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


class RateContract:
    """Each test is a sentence of the contract in ``relaybox.stores.store``."""

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
