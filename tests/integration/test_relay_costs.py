"""What an event costs the relay in what can be counted: Python calls and objects. No clock is involved."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from relaybox import Event
from relaybox.parts import open_store
from relaybox.store import Want
from tests.integration.shop import Databases, Shop

EVENTS = 1_000
TRIES = 8
"""How long batches become, and how often the loop turns, is a matter of time: one good try is enough."""


class Drained:
    """A shop whose events go to a handler that does nothing but count them."""

    def __init__(self, url: str, **options: Any) -> None:
        self._shop = Shop(url)
        self._emitted = self._handled = 0

        @self._shop.outbox.handler("*", name="on_order", **options)
        async def on_order(event: Event) -> None:
            self._handled += 1

    async def drain(self, events: int) -> tuple[int, int]:
        """Calls, of functions in Python and in C; and blocks of memory that are there afterwards and were not
        before.
        """
        self._shop.emit(events, keys=100, first=self._emitted)
        self._emitted += events
        relay, calls = self._shop.outbox.relay(), 0

        def count(frame: FrameType, what: str, _: Any) -> None:
            nonlocal calls
            calls += what in ("call", "c_call")

        gc.collect()
        before = sys.getallocatedblocks()
        sys.setprofile(count)
        try:
            assert await relay.drain(60) is True
        finally:
            sys.setprofile(None)
        del relay
        gc.collect()
        assert self._handled == self._emitted
        return calls, sys.getallocatedblocks() - before


@pytest.mark.parametrize(
    ("options", "measured"),
    [({"ordered": False}, 39), ({"ordered": False, "retention": 0}, 39), ({"ordered": True}, 41)],
    ids=["kept", "deleted", "ordered"],
)
async def test_an_event_takes_few_calls_and_leaves_nothing_behind(
    options: dict[str, Any],
    measured: int,
    migrated_database: Databases,
    record_property: Callable[[str, object], None],
) -> None:
    shop = Drained(migrated_database("postgresql-18"), **options)
    await shop.drain(EVENTS // 4)
    calls, kept = [], []
    while len(calls) < TRIES:
        less, more = await shop.drain(EVENTS), await shop.drain(2 * EVENTS)
        calls.append((more[0] - less[0]) / EVENTS)
        kept.append((more[1] - less[1]) / EVENTS)
        if calls[-1] <= 1.2 * measured and kept[-1] < 0.1:
            break
    record_property("calls per event", calls)
    record_property("objects kept per event", kept)
    assert min(calls) <= 1.2 * measured, f"{calls} calls an event; they were {measured}"
    assert min(kept) < 0.1, f"{kept} objects of each event are still there"


async def test_a_claimed_event_is_few_objects(
    migrated_database: Databases, record_property: Callable[[str, object], None]
) -> None:
    url = migrated_database("postgresql-18")
    shop = Shop(url)

    @shop.outbox.handler("*", name="on_order")
    async def on_order(event: Event) -> None:
        raise AssertionError("only claimed")

    shop.emit(4 * EVENTS)
    store = open_store(url, shop.outbox.tables)
    blocks = []
    await store.claim(Want("on_order", "me", limit=1))
    for limit in (EVENTS // 2, EVENTS):
        gc.collect()
        before = sys.getallocatedblocks()
        claim = await store.claim(Want("on_order", "me", limit=limit))
        gc.collect()
        blocks.append(sys.getallocatedblocks() - before)
        assert len(claim.deliveries) == limit
        del claim
    await store.close()
    objects = (blocks[1] - blocks[0]) / (EVENTS // 2)
    record_property("objects per claimed event", objects)
    assert objects <= 14, f"{objects} objects; they were 12.4"
