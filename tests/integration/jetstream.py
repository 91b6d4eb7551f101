"""A stream of NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import nats
from nats.aio.client import Client


class Place:
    """A stream of its own with everything under ``subject``."""

    def __init__(self, url: str, client: Client, name: str) -> None:
        self.client = client
        self.name = name
        self.subject = f"{name}.>"
        self.url = f"{url}/{name}.{{event_type}}"

    async def messages(self) -> list[Any]:
        """What is in the stream, in order."""
        js = self.client.jetstream()
        found = (await js.stream_info(self.name)).state.messages
        reader = await js.subscribe(self.subject, ordered_consumer=True)
        got = [await reader.next_msg(timeout=10) for _ in range(found)]
        await reader.unsubscribe()
        return got


@asynccontextmanager
async def stream(url: str, **settings: Any) -> AsyncIterator[Place]:
    async with await nats.connect(url) as client:
        name = f"s{uuid4().hex}"
        await client.jetstream().add_stream(name=name, subjects=[f"{name}.>"], **settings)
        yield Place(url, client, name)
        await client.jetstream().delete_stream(name)
