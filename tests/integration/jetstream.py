"""A stream of NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext

from tests.waiting import PATIENCE


class Place:
    """A stream of its own."""

    def __init__(self, url: str, client: Client, name: str) -> None:
        self.client = client
        self.name = name
        self.url = f"{url}/{name}.{{event_type}}"

    async def messages(self) -> list[Any]:
        return await read(self.client, self.name, f"{self.name}.>")


async def read(client: Client, name: str, subject: str) -> list[Any]:
    """Return what is in a stream, in order."""
    js = jetstream(client)
    found = (await js.stream_info(name)).state.messages
    reader = await js.subscribe(subject, ordered_consumer=True)
    got = [await reader.next_msg(timeout=PATIENCE) for _ in range(found)]
    await reader.unsubscribe()
    return got


def connect(url: str, **options: Any) -> Any:
    """Connect a plain client, which waits for a busy server."""
    return nats.connect(url, connect_timeout=PATIENCE, **options)


def jetstream(client: Client) -> JetStreamContext:
    return client.jetstream(timeout=PATIENCE)


@asynccontextmanager
async def stream(url: str, **settings: Any) -> AsyncIterator[Place]:
    async with await connect(url) as client:
        name = f"s{uuid4().hex}"
        await jetstream(client).add_stream(name=name, subjects=[f"{name}.>"], **settings)
        yield Place(url, client, name)
        await jetstream(client).delete_stream(name)
