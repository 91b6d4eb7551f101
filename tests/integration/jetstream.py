"""A stream of NATS, and sinks to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import nats
from nats.aio.client import Client

from relaybox import Destination
from relaybox.event import Delivery
from relaybox.sink import Answer
from relaybox.sinks.nats import NatsSink


@asynccontextmanager
async def sink_to(url: str, **settings: Any) -> AsyncIterator[NatsSink]:
    sink = NatsSink(Destination("shop", url, **{"timeout": "10s", **settings}))
    try:
        yield sink
    finally:
        await asyncio.wait_for(sink.close(), 5)


async def send(url: str, *deliveries: Delivery, **settings: Any) -> list[Answer]:
    async with sink_to(url, **settings) as sink:
        return list(await sink.send(deliveries))


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
