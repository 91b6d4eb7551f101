"""When a settler has its lane look again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from relaybox.config import Destination
from relaybox.errors import StoreError
from relaybox.outcome import Delivered, Outcome, Retried
from relaybox.relay.settle import Settler
from relaybox.store import Settlement
from relaybox.stores.memory import MemoryStore
from relaybox.testing.sink_contract import make_delivery
from tests.unit.lanes import shared
from tests.waiting import PATIENCE


class Refusing(MemoryStore):
    """A database that takes outcomes after some refusals, and makes nothing due."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    async def settle(self, settlements: Sequence[Settlement], **policy: Any) -> frozenset[UUID]:
        if self.refusals:
            self.refusals -= 1
            raise StoreError("the database is away")
        return frozenset()


@pytest.mark.parametrize(
    ("outcome", "refusals", "ordered", "woken"),
    [
        (Delivered(), 0, True, False),
        (Delivered(), 1, False, True),
        (Retried(0.01, "503"), 0, True, True),
        (Retried(60.0, "503"), 0, True, False),
    ],
    ids=["delivered", "after trouble", "again soon", "again late"],
)
async def test_a_lane_is_woken_where_it_would_look_too_late(
    outcome: Outcome, refusals: int, ordered: bool, woken: bool
) -> None:
    destination = Destination("runner", "handler:", ordered=ordered, poll_interval="20ms")
    settled, told = asyncio.Event(), []
    store = Refusing(refusals)
    settler = Settler(destination, shared(store), None, lambda _: settled.set(), lambda: told.append(1))
    running = asyncio.create_task(settler.run())
    settler.add(Settlement(make_delivery(key="a"), outcome))
    async with asyncio.timeout(PATIENCE):
        await settled.wait()
    running.cancel()
    assert bool(told) == woken
