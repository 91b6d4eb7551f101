"""A Redis Stream, and sinks to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from redis.asyncio import Redis

from relaybox import Destination
from relaybox.event import Delivery
from relaybox.sink import Answer
from relaybox.sinks.redis import RedisSink


@asynccontextmanager
async def sink_to(url: str, **settings: Any) -> AsyncIterator[RedisSink]:
    sink = RedisSink(Destination("shop", url, **{"timeout": "10s", **settings}))
    try:
        yield sink
    finally:
        await asyncio.wait_for(sink.close(), 5)


async def send(url: str, *deliveries: Delivery, **settings: Any) -> list[Answer]:
    async with sink_to(url, **settings) as sink:
        return list(await sink.send(deliveries))


class Place:
    """A stream of its own, and the URL of a sink to it."""

    def __init__(self, url: str, client: Redis) -> None:
        self.stream = f"s{uuid4().hex}"
        self.url = f"{url}?stream={self.stream}"
        self._client = client

    async def entries(self) -> list[dict[str, str]]:
        """What is in the stream, in order."""
        return [fields for _, fields in await self._client.xrange(self.stream)]


@asynccontextmanager
async def place_on(url: str) -> AsyncIterator[Place]:
    async with Redis.from_url(url, decode_responses=True) as client:
        place = Place(url, client)
        yield place
        await client.delete(place.stream)
