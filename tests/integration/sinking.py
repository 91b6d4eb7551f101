"""A sink as a relay opens it, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from relaybox import Destination
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered
from relaybox.sinks.open import open_sink
from relaybox.sinks.sink import Answer, Sink
from relaybox.testing.sink_contract import make_delivery
from tests.waiting import PATIENCE, await_for

PATIENT: dict[str, Any] = {"timeout": "1h", "lease": "2h"}
"""What ends in a test with these settings did not end because of its timeout."""


@asynccontextmanager
async def sink_to(url: str, **settings: Any) -> AsyncIterator[Any]:
    """Open the sink of a URL; afterwards see that its close ends."""
    sink = open_sink(Destination("shop", url, **{"timeout": "30s", **settings}), {})
    try:
        yield sink
    finally:
        await asyncio.wait_for(sink.close(), PATIENCE)


async def send(url: str, *deliveries: Delivery, **settings: Any) -> list[Answer]:
    """Return what becomes of deliveries there."""
    async with sink_to(url, **settings) as sink:
        return list(await asyncio.wait_for(sink.send(deliveries), PATIENCE))


def altered(**fields: Any) -> Delivery:
    """Make a delivery with other fields."""
    return msgspec.structs.replace(make_delivery(), **fields)


async def deliver(sink: Sink, *deliveries: Delivery) -> None:
    """Send until everything is delivered: a busy server may take longer than a sink's short timeout."""
    batch = deliveries or (make_delivery(),)

    async def delivered() -> bool:
        return list(await sink.send(batch)) == [Delivered()] * len(batch)

    await await_for(delivered, "delivered")


def check_refused(answer: Answer, kind: Any, *words: str) -> None:
    """Check how a delivery was refused, and that the reason has these words."""
    assert isinstance(answer, kind), answer
    for word in words:
        assert word in answer.reason, answer
