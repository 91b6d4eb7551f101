"""A sink as a relay opens it, closed in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from relaybox import Destination
from relaybox.event import Delivery
from relaybox.parts import open_sink
from relaybox.sink import Answer


@asynccontextmanager
async def sink_to(url: str, **settings: Any) -> AsyncIterator[Any]:
    """The sink of a URL; its close must not take long."""
    sink = open_sink(Destination("shop", url, **{"timeout": "10s", **settings}), {})
    try:
        yield sink
    finally:
        await asyncio.wait_for(sink.close(), 5)


async def send(url: str, *deliveries: Delivery, **settings: Any) -> list[Answer]:
    """What becomes of deliveries there."""
    async with sink_to(url, **settings) as sink:
        return list(await sink.send(deliveries))
