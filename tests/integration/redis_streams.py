"""A Redis Stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

from redis.asyncio import Redis


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
