"""Keep one connection of nats-py until it breaks, without the client's own reconnecting.

While it reconnects, the client buffers messages, and sends them after the relay recorded them as failed. A
caller whose answer was lost would wait until its timeout. Here a broken connection fails all callers that
wait on it and drops what it had not sent; the sink then opens a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

PING_SECONDS = 10
"""Seconds between pings; a connection is given up after three without an answer."""

_REFUSED_SUBJECT = re.compile(r'permissions violation for publish to "([^"]*)', re.IGNORECASE)


class Broken(Exception):
    """The connection broke; the server may or may not have the messages sent on it."""


class Refused(Exception):
    """The server does not permit the request."""


class Connection:
    """A connection on which many messages wait for their acknowledgement at once."""

    def __init__(self) -> None:
        self.client = Client()
        self._ended = False
        self._reason: BaseException | None = None
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}
        self._tokens = itertools.count(1)
        self._inbox = ""
        self._watcher: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """True if messages can be sent on the connection."""
        # The client may wait forever for its writes while it closes a connection, so its state is not enough.
        return not self._ended and self.client.is_connected

    async def open(self, settings: Mapping[str, Any], *, encrypted: bool) -> None:
        """Connect and listen for acknowledgements; raise the reason if that fails."""
        try:
            await self.client.connect(
                **settings,
                error_cb=self._failed,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=PING_SECONDS,
                # Without a buffer a publish never waits. While it waits, the client swallows a cancellation.
                pending_size=0,
            )
            writer = _writer(self.client)
            if encrypted and writer.get_extra_info("ssl_object") is None:
                raise Refused("the server does not offer TLS, which the destination asks for")
            self._inbox = f"{self.client.new_inbox()}."
            await self.client.subscribe(f"{self._inbox}*", cb=self._answered)
        except nats.errors.NoServersError as error:
            await self.close()
            raise self._reason or error from None
        except BaseException:
            await self.close()
            raise
        self._reason = None
        self._watcher = asyncio.create_task(self._watch(writer))

    async def publish(self, subject: str, body: bytes, headers: dict[str, str]) -> Msg:
        """Publish a message and return the reply; raise ``Broken`` or ``Refused`` if there will be none."""
        if not self.usable:
            raise self._loss()
        token = str(next(self._tokens))
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[token] = subject, answer
        try:
            await self.client.publish(subject, body, reply=f"{self._inbox}{token}", headers=headers)
            return await answer
        except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError):
            raise self._loss() from None
        finally:
            self._waiting.pop(token, None)

    async def close(self) -> None:
        """Close the connection at once and drop unsent messages."""
        self._break()
        # If it is not connected, there are no tasks to end, and close() may wait for a failed handshake.
        if self.client.is_connected:
            with suppress(Exception):
                await self.client.close()
        if self._watcher is not None:
            # Awaited like this, it is neither cancelled with this call nor does it raise here.
            await asyncio.wait([self._watcher])

    async def _answered(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject[len(self._inbox) :])
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(message)

    async def _failed(self, error: Exception) -> None:
        """Handle an error that the client reports by callback only."""
        if isinstance(error, nats.errors.SlowConsumerError):
            return
        if refused := _REFUSED_SUBJECT.search(str(error)):
            # The client reports errors in lower case.
            self._fail(Refused(str(error)), refused[1].lower())
            return
        self._reason = error
        if self._inbox:
            self._break()

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        """Notice the end of the connection, which the client does not always report."""
        with suppress(Exception):
            await writer.wait_closed()
        self._break()

    def _break(self) -> None:
        self._ended = True
        _drop_unsent(self.client)
        with suppress(AttributeError):
            _writer(self.client).transport.abort()
        self._fail(self._loss())

    def _loss(self) -> Broken:
        reason = self._reason or self.client.last_error
        return Broken(f"the connection broke: {reason}" if reason else "the connection broke")

    def _fail(self, error: Exception, subject: str | None = None) -> None:
        for of, answer in self._waiting.values():
            if not answer.done() and (subject is None or of.lower() == subject):
                answer.set_exception(error)


# Private attributes of nats-py, tested with 2.16.0; see tests/unit/test_private_attributes.py.


def _drop_unsent(client: Client) -> None:
    """Empty the client's buffer: on closing it would send the buffer and wait for that."""
    client._pending, client._pending_data_size = [], 0


def _writer(client: Client) -> asyncio.StreamWriter:
    """Return the stream: only it can abort a silent connection, or show whether it is encrypted."""
    writer: asyncio.StreamWriter = client._transport._io_writer  # type: ignore[union-attr]
    return writer
