"""Copies of failed rows: part of the contract of a store."""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Any

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Released, Retried
from relaybox.stores.store import Claim, DeadLetter, Want
from relaybox.testing.harness import LEASE, Harness, die, emit, see, settle, take, want

GRAVE = DeadLetter("grave", max_attempts=3)
ORDERED_GRAVE = DeadLetter("grave", ordered=True)


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
