"""Make messages for RabbitMQ, and publish them over aiormq connections, the layer below aio-pika.

aio-pika reconnects by itself, forever and unseen. Here a broken connection stays broken, all callers that
wait on it fail, and the next delivery opens a new one.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import aiormq
from aiormq import Channel
from pamqp.commands import Basic
from yarl import URL

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject
from relaybox.core.settings import Destination
from relaybox.core.values import wrong
from relaybox.sinks.broker import Address, Messages, Template

_PERSISTENT = 2
_SHORT = 255
"""Bytes of a short string: a routing key, a type."""

_NAME = 128


class Publication(NamedTuple):
    """A message and its routing; ``header_size`` is 0 if the headers cannot be too large."""

    exchange: str
    routing_key: str
    body: bytes
    properties: Basic.Properties
    header_size: int

    @property
    def id(self) -> str:
        """Return the id by which a returned message is recognized."""
        return str(self.properties.message_id)


class Publications:
    """Makes the publications of a destination. Raises ``ConfigError`` for an impossible exchange."""

    def __init__(self, destination: Destination, options: Mapping[str, Any]) -> None:
        self.exchange = Template(options.get("exchange", ""), destination, "exchange")
        self._routing_key = Template(options.get("routing_key", "{event_type}"), destination, "routing_key")
        self._messages = Messages(destination)
        if self.exchange.fixed is not None:
            _check_exchange(self.exchange.fixed, destination)

    def __call__(self, delivery: Delivery) -> Publication:
        """Return the publication of one event; raise ``Reject`` if AMQP cannot carry it."""
        exchange, routing_key = self.exchange(delivery), self._routing_key(delivery)
        _check_length("routing key", routing_key, _SHORT)
        _check_length("event type", delivery.event_type, _SHORT)
        body, content_type, headers = self._messages(delivery)
        for name in headers:
            _check_length("name of the header", name, _NAME)
            if name in ("CC", "BCC"):
                raise Reject(
                    f"the header {name!r} is RabbitMQ's own: a list of routing keys; call it another name"
                )
        properties = Basic.Properties(
            content_type=content_type,
            headers={**headers},
            delivery_mode=_PERSISTENT,
            message_id=str(delivery.event_id),
            timestamp=delivery.created_at,
            message_type=delivery.event_type,
        )
        header_size = len(properties.marshal()) + 12 if len(delivery.headers) > 1000 else 0
        return Publication(exchange, routing_key, body, properties, header_size)


def _check_length(what: str, written: str, most: int) -> None:
    # A character takes at most four bytes.
    if len(written) > most // 4 and (size := len(written.encode())) > most:
        raise Reject(f"the {what} {written[:40]!r}… is {size} bytes long; AMQP takes {most}")


def _check_exchange(exchange: str, destination: Destination) -> None:
    try:
        Basic.Publish(exchange=exchange)
    except ValueError as error:
        setting = f"destination {destination.name!r}: exchange"
        raise wrong(setting, exchange, f"AMQP takes no such name: {error}") from None


_GOODBYE = 1.0
"""Seconds to wait for the broker's answer when a connection is closed."""

_FRAME = 8
"""Bytes that a frame adds to its content."""


class Connection(aiormq.Connection):
    """Never waits to queue a frame, and knows why the broker blocks it."""

    # If its queue is full, aiormq skips the reply when the broker closes a channel, and that channel's number
    # cannot be used again. Publishers are limited already.
    FRAME_BUFFER_SIZE = 0

    blocked = ""
    given_up = False

    # These override private methods of aiormq 7.2.4, whose class has this name too; it only logs the reason.
    async def __handle_connection_blocked(self, frame: Any) -> None:
        self.blocked = frame.reason or "without a reason"
        await super().__handle_connection_blocked(frame)

    async def __handle_connection_unblocked(self, frame: Any) -> None:
        self.blocked = ""
        await super().__handle_connection_unblocked(frame)


class Socket(aiormq.TransportFactory):
    """Opens the socket of a connection, and can abort it."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        # A silent broker does not answer the TLS shutdown either.
        self._tls: dict[str, Any] = {"ssl": context, "ssl_shutdown_timeout": _GOODBYE} if context else {}
        self._transport: asyncio.WriteTransport | None = None

    async def create(self, url: URL, **_: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open the socket; called by aiormq."""
        reader, writer = await asyncio.open_connection(url.host, url.port, **self._tls)
        self._transport = writer.transport
        return reader, writer

    def cut(self) -> None:
        """Close the socket at once, so that all callers that wait on the connection fail."""
        if self._transport is not None:
            self._transport.abort()


class Link:
    """A connection and the channel that deliveries share."""

    def __init__(self, connection: Connection, socket: Socket, channel: Channel) -> None:
        self.connection = connection
        self._socket = socket
        self._channel = channel
        self.under_way: set[str] = set()
        """The ids of the messages on the shared channel that wait for an answer."""

    @classmethod
    async def open(
        cls, address: Address, place: tuple[str, int], context: ssl.SSLContext | None, name: str
    ) -> Link:
        """Open a connection to one of the address's hosts."""
        url = URL.build(
            scheme="amqp",
            user=address.user or "guest",
            password=address.password or "guest",
            host=place[0],
            port=place[1],
            path="/",
            query={"heartbeat": str(address.options.get("heartbeat", 60))},
        )
        socket = Socket(context)
        connection = Connection(url, transport_factory=socket, client_properties={"connection_name": name})
        connection.vhost = address.path or "/"
        try:
            with quiet():
                await connection.connect()
            return cls(connection, socket, await _open_channel(connection))
        except BaseException:
            socket.cut()
            raise

    async def again(self) -> Link:
        """Return the same connection with a new channel, after the broker closed the old one."""
        try:
            return Link(self.connection, self._socket, await _open_channel(self.connection))
        except BaseException:
            self._socket.cut()
            raise

    @property
    def connected(self) -> bool:
        """True if the connection is open and a new channel is worth trying."""
        return self.connection.is_opened

    @property
    def usable(self) -> bool:
        """True if messages can be published on the shared channel."""
        return self.connection.is_opened and _is_open(self._channel)

    async def publish(self, message: Publication) -> None:
        """Publish on the shared channel, and return when the broker has confirmed."""
        await self._publish(self._channel, message)

    async def publish_alone(self, message: Publication) -> None:
        """Publish on a separate channel, so that an error affects no other message."""
        channel = await _open_channel(self.connection)
        try:
            await self._publish(channel, message)
        finally:
            self._end(channel)

    async def look_up(self, exchange: str) -> None:
        """Raise the broker's error if the exchange does not exist."""
        channel = await _open_channel(self.connection)
        try:
            await channel.exchange_declare(exchange, passive=True)
        finally:
            self._end(channel)

    def cut(self) -> None:
        """Close the connection at once."""
        self._socket.cut()

    async def close(self) -> None:
        """Close the connection, and give the broker a moment to answer."""
        self.connection.given_up = True
        closing = asyncio.ensure_future(self.connection.close(aiormq.ConnectionClosed(0, "closed")))
        await asyncio.wait([closing], timeout=_GOODBYE)
        self._socket.cut()
        await asyncio.wait([closing], timeout=_GOODBYE)

    async def _publish(self, channel: Channel, message: Publication) -> None:
        size, most = message.header_size, self.connection.connection_tune.frame_max
        if size and most and size > most - _FRAME:
            raise Reject(f"its headers take {size} bytes; the broker takes {most - _FRAME} (frame_max)")
        # The broker does not read while it blocks the connection.
        await self.connection.ready()
        if not _is_open(channel):
            raise aiormq.ChannelInvalidStateError("the broker closed the channel")
        try:
            await channel.basic_publish(
                message.body,
                exchange=message.exchange,
                routing_key=message.routing_key,
                properties=message.properties,
                mandatory=True,
                wait=False,
            )
        except ValueError as error:
            raise Reject(f"AMQP cannot carry it: {error}") from None

    def _end(self, channel: Channel) -> None:
        # Nobody waits for this: the broker may be silent.
        if not channel.is_closed:
            with quiet():
                self.connection.create_task(channel.close())


class Opener:
    """Opens the links of a sink: to its hosts in turn, or again on a connection that is still open."""

    def __init__(self, address: Address, context: ssl.SSLContext | None, name: str, seconds: float) -> None:
        self._address = address
        self._context = context
        self._name = name
        self._seconds = seconds
        self._hosts = deque(address.hosts)

    async def open(self, link: Link | None) -> Link:
        """Return a new link after this one, which cannot be used any more."""
        async with asyncio.timeout(self._seconds):
            if link is not None and link.connected:
                return await link.again()
            for left in range(len(self._hosts), 0, -1):
                try:
                    return await Link.open(self._address, self._hosts[0], self._context, self._name)
                except BaseException as error:
                    # The next attempt starts with another host.
                    self._hosts.rotate(-1)
                    if left == 1 or not isinstance(error, Exception):
                        raise
        raise AssertionError("an address has a host")


def _is_open(channel: Channel) -> bool:
    """True if the broker has not closed the channel; a message sent after that would end the connection.

    A private attribute of aiormq, tested with 7.2.4; see tests/unit/test_private_attributes.py.
    """
    return not channel.is_closed and channel._close_exception is None


async def _open_channel(connection: Connection) -> Channel:
    if connection.is_closed:
        raise aiormq.AMQPConnectionError("the connection is closed")
    with quiet():
        channel = await connection.channel(on_return_raises=True, frame_buffer_size=0)
    assert isinstance(channel, Channel)
    return channel


_quiet: ContextVar[bool] = ContextVar("relaybox_rabbitmq_quiet", default=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide aiormq's log messages here and in tasks started here: the answers say the same."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


for _name in ("aiormq.connection", "aiormq.channel"):
    logging.getLogger(_name).addFilter(lambda _: not _quiet.get())
