"""One connection of nats-py's client, used until it breaks.

The client is kept from reconnecting by itself. While it does, it buffers what is published and sends it
later, when the relay has long been told that it was not delivered; and whoever waits for an answer that was
lost with the old connection waits until its time is over. Here a connection that broke says so to everybody
who waits on it, drops what it had not sent, and is replaced by a new one.
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
"""After three of these without an answer, a connection is given up."""

_REFUSED_SUBJECT = re.compile(r'permissions violation for publish to "([^"]*)', re.IGNORECASE)


class Broken(Exception):
    """The connection broke; whether the server has what was sent on it is not known."""


class Refused(Exception):
    """The server does not permit it."""


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
    def broken(self) -> bool:
        """Whether it is of no more use."""
        # A client that gives a connection up may wait for ever until what it has written is gone.
        return self._ended or not self.client.is_connected

    async def open(self, settings: Mapping[str, Any], *, encrypted: bool) -> None:
        """Connect, and listen for acknowledgements; raises what kept it from connecting."""
        try:
            await self.client.connect(
                **settings,
                error_cb=self._failed,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=PING_SECONDS,
                # Without a buffer a publish never waits: the client swallows a cancellation while it does.
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
        """What came back for a message; raises ``Broken`` or ``Refused`` where nothing will."""
        if self.broken:
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
        """Give it up at once, whatever was not sent yet."""
        self._break()
        # One that is not connected has no tasks to end, and might wait for a handshake that failed.
        if self.client.is_connected:
            # What the client has to say about a connection that is gone is of no interest.
            with suppress(Exception):
                await self.client.close()
        if self._watcher is not None:
            await self._watcher

    async def _answered(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject[len(self._inbox) :])
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(message)

    async def _failed(self, error: Exception) -> None:
        """The client's word about an error that no call of ours raises."""
        if isinstance(error, nats.errors.SlowConsumerError):
            return
        if refused := _REFUSED_SUBJECT.search(str(error)):
            # The client tells of errors in lower case.
            self._fail(Refused(str(error)), refused[1].lower())
            return
        self._reason = error
        if self._inbox:
            self._break()

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        """Notice the end of the connection, which the client tells only some of the time."""
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


# Private attributes of nats-py, tried with 2.16.0. tests/unit/test_private_attributes.py says what to do when
# they change.


def _drop_unsent(client: Client) -> None:
    """Empty the client's buffer: it would send what is in it before it closes, and wait for that."""
    client._pending, client._pending_data_size = [], 0


def _writer(client: Client) -> asyncio.StreamWriter:
    """Return the stream: nothing else ends a silent connection, or tells whether it is encrypted."""
    writer: asyncio.StreamWriter = client._transport._io_writer  # type: ignore[union-attr]
    return writer
