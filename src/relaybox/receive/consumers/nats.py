"""Consume events from a NATS JetStream stream; acknowledge after the transaction of their handlers.

A message to be retried is returned with a delay (``nak``). A refused one is terminated (``term``), and the
server publishes an advisory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC
from typing import Any

from relaybox.core.settings import Backoff
from relaybox.core.values import Duration, Secret, parse_count, parse_name
from relaybox.errors import MissingExtra
from relaybox.receive.consumer import Done, Once, Rejected, log
from relaybox.receive.consumers.loop import BACKOFF, TIMEOUT, Loop, Work, parse_url, text_headers
from relaybox.sinks.sink import describe
from relaybox.wire.envelope import JSON, Received

try:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.errors import Error as NatsError
    from nats.errors import NoServersError
except ImportError:
    raise MissingExtra("nats-py", "nats") from None

CONNECT_SECONDS = 10
PING_SECONDS = 20
FETCH_SECONDS = 1.0
GATHER_SECONDS = 0.02
ACK_WAIT_SECONDS = 30.0
"""The server's default, if an existing consumer does not set one."""


class NatsConsumer(Loop):
    """Consumes a stream through a durable consumer, which is created if it does not exist.

    ``url`` is one or several servers separated by commas, ``env:NAME`` or ``file:PATH``. ``options`` are
    those of ``nats.connect``. ``stream`` defaults to the one that has the subject, ``consumer`` to the
    inbox's, then ``durable``.
    """

    def __init__(
        self,
        url: str | Secret,
        subject: str,
        *,
        durable: str,
        inbox: Once,
        transaction: Any,
        stream: str | None = None,
        consumer: str | None = None,
        prefetch: int = 10,
        timeout: Duration = TIMEOUT,
        backoff: Backoff | Mapping[str, Any] = BACKOFF,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        name = consumer or inbox.consumer or parse_name(durable, "durable")
        super().__init__(inbox, transaction, name, timeout, backoff)
        self._url = parse_url(url)
        self._subject = parse_name(subject, "subject")
        self._durable = durable
        self._stream = stream
        self._prefetch = parse_count(prefetch, "prefetch")
        self._options = dict(options or {})

    async def _consume(self) -> None:
        # The work ends before the connection, so that finished messages can be acknowledged.
        async with self._client() as client, Work() as work:
            await self._pull(client, work)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        """Open a connection that does not reconnect: the loop sets up everything again on a new one."""
        client, reasons = Client(), [""]

        async def note(error: Exception) -> None:
            reasons.append(describe(error))

        fixed: Any = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
        given = {"connect_timeout": CONNECT_SECONDS, "ping_interval": PING_SECONDS, **self._options}
        try:
            await client.connect(self._url.reveal().split(","), error_cb=note, **fixed, **given)
        except NoServersError:
            raise ConnectionError(reasons[-1] or "no server answers") from None
        try:
            yield client
        finally:
            with suppress(NatsError, OSError, TimeoutError):
                await client.flush(1)
            await client.close()

    async def _pull(self, client: Client, work: Work) -> None:
        stream = client.jetstream()
        subscription = await stream.pull_subscribe(self._subject, durable=self._durable, stream=self._stream)
        ack_wait = (await subscription.consumer_info()).config.ack_wait or ACK_WAIT_SECONDS
        self._failures = 0

        async def fetch(count: int, seconds: float) -> bool:
            try:
                messages = await subscription.fetch(count, timeout=seconds)
            except TimeoutError:
                return False
            for message in messages:
                work.start(self._attend(message, ack_wait))
            return True

        while not self._stopping.is_set():
            if client.is_closed:
                raise ConnectionError("the connection was lost")
            if len(work) >= self._prefetch:
                await work.any()
            # Fetching several at once would wait until all of them arrive.
            elif await fetch(1, FETCH_SECONDS) and len(work) < self._prefetch:
                await fetch(self._prefetch - len(work), GATHER_SECONDS)

    async def _attend(self, message: Msg, ack_wait: float) -> None:
        try:
            received = _received(message)
            keeping = asyncio.create_task(_keep(message, ack_wait / 3))
            try:
                verdict = await self._guard(self._judge(received))
            finally:
                keeping.cancel()
            if isinstance(verdict, Done):
                await message.ack()
            elif isinstance(verdict, Rejected):
                self._report(received.message_id, verdict, "terminated: it will not be delivered again")
                await message.term()
            else:
                seconds = self._delay(verdict, received.attempt)
                self._report(received.message_id, verdict, f"delivered again in {seconds:.1f}s")
                await message.nak(seconds)
        except (NatsError, OSError) as error:
            # The server delivers it again, and the inbox knows whether it was done.
            log.warning("%s: a message was not acknowledged: %s", self._consumer, describe(error))


async def _keep(message: Msg, every: float) -> None:
    with suppress(NatsError, OSError):
        while True:
            await asyncio.sleep(every)
            await message.in_progress()


def _received(message: Msg) -> Received:
    headers = text_headers(message.headers)
    message_id = headers.get("event-id") or headers.pop("Nats-Msg-Id", "")
    content_type, about = headers.pop("content-type", JSON), message.metadata
    sent_at = about.timestamp if about.timestamp.tzinfo else about.timestamp.replace(tzinfo=UTC)
    return Received(message_id, message.data, content_type, headers, sent_at, about.num_delivered or 1)
