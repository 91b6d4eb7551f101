"""NATS JetStream: a place is a stream, and the subjects that lead there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar
from uuid import UUID, uuid4

import nats
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy

from tests.chaos.brokers.base import DOWN, SILENT, Harm, Local, Message
from tests.servers import nats as server
from tests.servers.restart import Restartable

T = TypeVar("T")
NO_STREAM = "no stream"
SMALL = 800  # Bytes: some of the events are larger with their headers, and some are not


class Nats(Local):
    name = "nats"

    def __init__(self, running: Restartable) -> None:
        super().__init__(running)
        self._stream = ""
        self._gone: list[Message] = []
        no_size, no_bytes = {"max_msg_size": -1}, {"max_bytes": -1}
        self.harms = {
            "killed": Harm(running.kill, running.start, DOWN, shut=True),
            "ended": Harm(self._end, running.start, DOWN, shut=True),
            "stopped": Harm(self._stop, self._silence.close, SILENT),
            "full": Harm(self._fill, partial(self._change, **no_bytes), "maximum bytes exceeded", shut=True),
            "deleted": Harm(self._delete, self._add, NO_STREAM, shut=True),
            "unroutable": Harm(self._lead_away, self._lead_back, NO_STREAM, shut=True),
            "too small": Harm(
                partial(self._change, max_msg_size=SMALL),
                partial(self._change, **no_size),
                "max_msg_size of the stream",
                refuses=True,
            ),
        }

    @property
    def url(self) -> str:
        return f"{server.url_of(self._running)}/{self._stream}.{{event_type}}"

    def make(self) -> None:
        self._stream, self._gone = f"chaos-{uuid4()}", []
        self._add()

    def read(self) -> list[Message]:
        return [*self._gone, *self._ask(self._messages)]

    def _ask(self, question: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        async def asking() -> T:
            async with await nats.connect(server.url_of(self._running)) as client:
                return await question(client.jetstream())

        return asyncio.run(asking())

    async def _messages(self, js: JetStreamContext) -> list[Message]:
        found: list[Message] = []
        while len(found) < (state := (await js.stream_info(self._stream)).state).messages:
            for number in range(state.first_seq + len(found), state.last_seq + 1):
                message: Any = await js.get_msg(self._stream, number)
                found.append(Message(UUID(message.headers["event-id"]), message.data))
        return found

    def _add(self) -> None:
        settings = {"subjects": [f"{self._stream}.>"], "discard": DiscardPolicy.NEW}
        self._ask(lambda js: js.add_stream(name=self._stream, **settings))

    def _change(self, **settings: Any) -> None:
        async def change(js: JetStreamContext) -> None:
            config = (await js.stream_info(self._stream)).config
            await js.update_stream(config, **settings)

        self._ask(change)

    def _fill(self) -> None:
        # No less than there is: what is in the stream shall stay.
        self._change(max_bytes=max(1, self._ask(lambda js: js.stream_info(self._stream)).state.bytes))

    def _lead_away(self) -> None:
        self._change(subjects=[f"{self._stream}-gone.>"])

    def _lead_back(self) -> None:
        self._change(subjects=[f"{self._stream}.>"])

    def _delete(self) -> None:
        self._lead_away()
        self._gone += self._ask(self._messages)
        self._ask(lambda js: js.delete_stream(self._stream))


KIND, OPTIONS = Nats, {}
