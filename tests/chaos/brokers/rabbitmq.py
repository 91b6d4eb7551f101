"""RabbitMQ: a place is an exchange and the queue that is bound to it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar
from uuid import UUID, uuid4

import aio_pika

from tests.chaos.brokers.base import DOWN, PATIENCE, SILENT, Harm, Message
from tests.servers import rabbitmq as server

T = TypeVar("T")
KEY = "orders"
MEMORY = "512MB"


class RabbitMq:
    name = "rabbitmq"
    timeout = 1.0
    copies = 2
    """What was under way when a channel or a connection broke is sent once more in the same attempt."""

    def __init__(self, running: server.Broker) -> None:
        self._running = running
        self._silence = ExitStack()
        self._place = ""
        self._read: list[Message] = []
        unbound = "no queue is bound"
        self.harms = {
            "killed": Harm(self._kill, running.start, DOWN, shut=True),
            "ended": Harm(running.stop, running.start, DOWN, shut=True),
            "stopped": Harm(self._stop, self._silence.close, SILENT),
            "full": Harm(
                partial(self._limit, "1"), partial(self._limit, MEMORY), "low on memory|did not confirm"
            ),
            "deleted": Harm(self._delete, self._declare, unbound, shut=True),
            "unroutable": Harm(self._unbind, self._declare, unbound, shut=True),
            "exchange deleted": Harm(
                self._delete_exchange, self._declare, "no exchange|NOT_FOUND", shut=True
            ),
        }

    @property
    def url(self) -> str:
        return f"{self._running.url}?exchange={self._place}&routing_key={KEY}"

    def make(self) -> None:
        self._place, self._read = f"chaos-{uuid4()}", []
        self._declare()

    def read(self) -> list[Message]:
        self._ask(self._drain)
        return list(self._read)

    def _ask(self, question: Callable[[Any], Awaitable[T]]) -> T:
        async def asking() -> T:
            async with await aio_pika.connect(self._running.url) as connection:
                return await question(await connection.channel())

        return asyncio.run(asking())

    async def _drain(self, channel: Any) -> None:
        queue = await channel.declare_queue(self._place, durable=True, passive=True)
        left = queue.declaration_result.message_count
        if not left:
            return
        done = asyncio.Event()

        async def take(message: Any) -> None:
            nonlocal left
            self._read.append(Message(UUID(message.message_id), message.body))
            left -= 1
            if left <= 0:
                done.set()

        tag = await queue.consume(take, no_ack=True)
        await asyncio.wait_for(done.wait(), PATIENCE)
        await queue.cancel(tag)

    def _kill(self) -> None:
        # What was declared is written some time later, and a crash before that is not what this is about.
        self._running.control("eval", "mnesia:sync_log().")
        self._running.send(signal.SIGKILL)
        self._running.stop()

    def _stop(self) -> None:
        self._silence.enter_context(self._running.paused())

    def _limit(self, memory: str) -> None:
        self._running.control("set_vm_memory_high_watermark", "absolute", memory)

    def _declare(self) -> None:
        async def declare(channel: Any) -> None:
            exchange = await channel.declare_exchange(self._place, durable=True)
            queue = await channel.declare_queue(self._place, durable=True)
            await queue.bind(exchange, KEY)

        self._ask(declare)

    def _unbind(self) -> None:
        async def unbind(channel: Any) -> None:
            queue = await channel.get_queue(self._place)
            await queue.unbind(self._place, KEY)

        self._ask(unbind)

    def _delete(self) -> None:
        """Stop routing to the queue, and delete it when it is empty."""
        self._unbind()
        for _ in range(10):
            self._ask(self._drain)
            try:
                self._ask(lambda channel: channel.queue_delete(self._place, if_empty=True))
            except aio_pika.exceptions.ChannelPreconditionFailed:
                continue
            return
        raise TimeoutError("the queue does not become empty")

    def _delete_exchange(self) -> None:
        self._ask(lambda channel: channel.exchange_delete(self._place))


KIND, OPTIONS = RabbitMq, {}
