"""Consume events from a RabbitMQ queue; acknowledge after the transaction of their handlers.

A message to be retried is held here, unacknowledged: RabbitMQ has no delay, and a quorum queue drops a
message that is returned too often. After ``HOLD_SECONDS`` another consumer can have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from relaybox.core.settings import Backoff
from relaybox.core.values import Duration, Secret, parse_count, parse_name
from relaybox.errors import MissingExtra
from relaybox.receive.consumer import Done, Once, Verdict, cancelled, log
from relaybox.receive.consumers.loop import BACKOFF, TIMEOUT, Loop, Work, parse_url, text_headers
from relaybox.sinks.sink import describe
from relaybox.wire.envelope import JSON, Received

try:
    import aio_pika
    from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
except ImportError:
    raise MissingExtra("aio-pika", "rabbitmq") from None

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0
HOLD_SECONDS = 900.0
"""Half of RabbitMQ's default ``consumer_timeout``, after which it closes the channel."""
_LOST = (aio_pika.exceptions.AMQPError, aio_pika.exceptions.ChannelInvalidStateError, OSError)
"""What an acknowledgement raises if the channel or its connection is gone."""


class RabbitmqConsumer(Loop):
    """Consumes one queue, which must exist; refused messages go to its dead-letter exchange, or are lost.

    ``url`` may be ``env:NAME`` or ``file:PATH``. ``prefetch=1`` keeps the queue's order. ``consumer``
    defaults to the inbox's, then ``queue``.
    """

    def __init__(
        self,
        url: str | Secret,
        queue: str,
        *,
        inbox: Once,
        transaction: Any,
        consumer: str | None = None,
        prefetch: int = 10,
        timeout: Duration = TIMEOUT,
        backoff: Backoff | Mapping[str, Any] = BACKOFF,
    ) -> None:
        name = consumer or inbox.consumer or parse_name(queue, "queue")
        super().__init__(inbox, transaction, name, timeout, backoff)
        self._url = parse_url(url)
        self._queue = queue
        self._prefetch = parse_count(prefetch, "prefetch")

    async def _consume(self) -> None:
        connection = await aio_pika.connect(self._url.reveal(), timeout=CONNECT_SECONDS)
        try:
            # The work ends before the connection, so that finished messages can be acknowledged.
            async with Work() as work:
                await self._consume_from(connection, work)
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await connection.close()

    async def _consume_from(self, connection: AbstractConnection, work: Work) -> None:
        async def take(message: AbstractIncomingMessage) -> None:
            work.start(self._attend(message, work.ending))

        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                channel = await connection.channel(publisher_confirms=False)
                await channel.set_qos(prefetch_count=self._prefetch)
                queue = await channel.get_queue(self._queue, ensure=True)
                lost = await _lost(channel)
                tag = await queue.consume(take)
        except TimeoutError:
            raise ConnectionError(f"RabbitMQ did not answer in {CONNECT_SECONDS:g}s") from None
        self._failures = 0
        stopping = asyncio.create_task(self._stopping.wait())
        waited: list[asyncio.Future[Any]] = [stopping, lost]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if lost.done():
            raise ConnectionError(lost.result())
        with suppress(TimeoutError):
            await queue.cancel(tag, timeout=CLOSE_SECONDS)

    async def _attend(self, message: AbstractIncomingMessage, ending: asyncio.Event) -> None:
        try:
            await self._decide(message, ending)
        except _LOST as error:
            # The queue delivers it again, and the inbox knows whether it was done.
            log.warning("%s: a message was not acknowledged: %s", self._consumer, describe(error))
        except (Exception, asyncio.CancelledError) as error:
            if cancelled(error):
                raise
            log.error("%s: a message is given back: %s", self._consumer, describe(error), exc_info=error)
            with suppress(*_LOST):
                await message.nack(requeue=True)

    async def _decide(self, message: AbstractIncomingMessage, ending: asyncio.Event) -> None:
        received = _received(message)

        def judge(attempt: int) -> Awaitable[Verdict]:
            return self._judge(received._replace(attempt=attempt))

        verdict = await self._try(judge, received.message_id, ending, "tried again in", HOLD_SECONDS)
        if verdict is None:
            await message.nack(requeue=True)
        elif isinstance(verdict, Done):
            await message.ack()
        else:
            self._report(received.message_id, verdict, "rejected: dead-lettered where the queue says so")
            await message.reject(requeue=False)


async def _lost(channel: AbstractChannel) -> asyncio.Future[str]:
    """Return a future of the reason why no more messages will come: channel closed, or queue deleted."""
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def tell(reason: str) -> None:
        if not lost.done():
            lost.set_result(reason)

    def closed(_: Any, error: BaseException | None = None) -> None:
        tell("the channel was closed" if error is None else describe(error))

    channel.close_callbacks.add(closed)
    underlay: Any = await channel.get_underlay_channel()
    underlay.on_consumer_cancel_callbacks.add(lambda *_: tell("the queue was deleted, or moved"))
    return lost


def _received(message: AbstractIncomingMessage) -> Received:
    headers = text_headers(message.headers)
    message_id = headers.get("event-id") or message.message_id or ""
    timestamp = message.timestamp
    sent_at = timestamp if isinstance(timestamp, datetime) and timestamp.tzinfo else datetime.now(UTC)
    return Received(message_id, message.body, message.content_type or JSON, headers, sent_at)
