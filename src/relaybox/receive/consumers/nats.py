"""Events from a NATS JetStream stream: acknowledged after the transaction of their handlers.

    consumer = NatsConsumer("nats://nats", "events.>", durable="billing", inbox=inbox, transaction=Session)

    @consumer.on("order.*")
    async def on_order(event: Event, session: AsyncSession) -> None: ...

    consumer.serve()

It pulls, up to ``prefetch`` messages at once, and tells the server that it is still working while a handler
takes its time. One that is to be tried again is given back with a delay (``nak``), one that is refused is
terminated (``term``): the server publishes an advisory of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC
from typing import Any

from relaybox.core.settings import Backoff
from relaybox.core.values import Duration, Secret, parse_count, parse_name
from relaybox.errors import MissingExtra
from relaybox.receive.consumer import Done, Once, Refused
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

log = logging.getLogger("relaybox.consumer")

CONNECT_SECONDS = 10
PING_SECONDS = 20
FETCH_SECONDS = 1.0
GATHER_SECONDS = 0.02
ACK_WAIT_SECONDS = 30.0
"""The server's own default, where a consumer that exists already does not say."""


class NatsConsumer(Loop):
    """Consumes a stream by way of a durable consumer, which is made where it does not exist.

    ``url`` may name several servers with commas between them, and be ``env:NAME`` or ``file:PATH``. The
    ``stream`` is found by the subject unless it is given. ``options`` are those of ``nats.connect``, such as
    ``tls``. A handler has ``timeout`` to return. The rest is ``Consumer``'s; its name is the durable's.
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
        work = Work()
        async with self._client() as client:
            try:
                await self._pull(client, work)
            finally:
                # While the connection is there, so that what is finished now can be acknowledged.
                await work.end()

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        """Open a connection that does not reconnect: what depends on it is made again with the next one."""
        client, reasons = Client(), [""]

        async def note(error: Exception) -> None:
            reasons.append(describe(error))

        given = {"connect_timeout": CONNECT_SECONDS, "ping_interval": PING_SECONDS, **self._options}
        try:
            await client.connect(
                self._url.reveal().split(","),
                error_cb=note,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                **given,
            )
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
            # More than one at a time would be waited for until all are there.
            elif await fetch(1, FETCH_SECONDS) and len(work) < self._prefetch:
                await fetch(self._prefetch - len(work), GATHER_SECONDS)

    async def _attend(self, message: Msg, ack_wait: float) -> None:
        try:
            async with _kept(message, ack_wait / 3):
                received = _received(message)
                verdict = await self._guard(self._judge(received))
            if isinstance(verdict, Done):
                await message.ack()
            elif isinstance(verdict, Refused):
                self._report(received.message_id, verdict, "terminated: it will not be delivered again")
                await message.term()
            else:
                seconds = self._delay(verdict, received.attempt)
                self._report(received.message_id, verdict, f"delivered again in {seconds:.1f}s")
                await message.nak(seconds)
        except (NatsError, OSError) as error:
            # The server delivers it again, and the inbox knows whether it was done.
            log.warning("%s: a message was not acknowledged: %s", self._consumer, describe(error))


@asynccontextmanager
async def _kept(message: Msg, every: float) -> AsyncIterator[None]:
    """Tell the server again and again that the message is being worked on."""

    async def keep() -> None:
        with suppress(NatsError, OSError):
            while True:
                await asyncio.sleep(every)
                await message.in_progress()

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()


def _received(message: Msg) -> Received:
    headers = text_headers(message.headers)
    message_id = headers.get("event-id") or headers.pop("Nats-Msg-Id", "")
    about = message.metadata
    return Received(
        message_id,
        message.data,
        headers.pop("content-type", JSON),
        headers,
        about.timestamp if about.timestamp.tzinfo else about.timestamp.replace(tzinfo=UTC),
        about.num_delivered or 1,
    )
