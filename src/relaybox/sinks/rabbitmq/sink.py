"""Publish to RabbitMQ: each delivery is a persistent message that the broker confirms.

It has arrived when every queue it was routed to has it; the broker returns one that no queue is bound for.
All messages share one channel. The broker refuses one by closing the channel, without saying which. Then each
message in progress is sent again on a separate channel, where an error is about that message alone.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Mapping
from typing import Any

import aiormq

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.core.values import Parse, wrong
from relaybox.sinks.broker import TLS_OPTIONS, Shared, count, parse_address, text, tls_context, unreachable
from relaybox.sinks.deadline import Deadline, no_answer
from relaybox.sinks.rabbitmq.connection import Link, Opener, Publication, Publications
from relaybox.sinks.sink import OneByOne, Places, being_cancelled, clean

_MOST_DOUBTS = 1000

_BROKEN = (aiormq.AMQPChannelError, aiormq.AMQPConnectionError, aiormq.ChannelInvalidStateError)
_ERRORS = (aiormq.AMQPError, aiormq.ChannelInvalidStateError, OSError, ValueError)


def _heartbeat(value: str | int, setting: str) -> int:
    seconds = count(value, setting)
    if seconds > 65_534:
        raise wrong(setting, value, "write no more than 65534 seconds")
    return seconds


_OPTIONS: dict[str, Parse[Any]] = {
    "exchange": text,
    "routing_key": text,
    "heartbeat": _heartbeat,
    **TLS_OPTIONS,
}


class RabbitMqSink(OneByOne):
    """Publishes over one connection, opened when needed and again after it broke."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination.concurrency)
        secure = destination.scheme == "amqps"
        self._address = parse_address(destination, 5671 if secure else 5672, _OPTIONS)
        self._where = self._address.where
        options = self._address.options
        self._publications = Publications(destination, options)
        self._deadline = Deadline(destination.timeout)
        context = _tls(options, destination, secure=secure)
        opener = Opener(self._address, context, f"relaybox: {destination.name}", destination.timeout)
        self._shared = Shared(opener.open)
        self._alone = Places(1)
        self._heard = 0.0
        self._refused: set[str] = set()
        self._largest: int | None = None

    async def deliver(self, delivery: Delivery) -> None:
        """Publish the delivery, and return when the broker has confirmed it."""
        message = self._publications(delivery)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            with self._deadline():
                await self._send(message)
        except TimeoutError:
            raise self._late(began) from None
        except asyncio.CancelledError:
            # aiormq cancels all callers that wait on a connection it gave up.
            if being_cancelled():
                raise
            raise Unavailable(f"the connection to {self._where} broke before it was confirmed") from None
        except _ERRORS as error:
            self._heard = loop.time()
            raise self._explained(error, message) from None
        self._heard = loop.time()

    async def check(self) -> None:
        """Raise ``Unavailable`` if the broker cannot be reached, or the exchange is missing."""
        began = asyncio.get_running_loop().time()
        try:
            with self._deadline():
                link = await self._shared.get()
                if self._publications.exchange.fixed:
                    await link.look_up(self._publications.exchange.fixed)
        except TimeoutError:
            raise self._late(began) from None
        except _ERRORS as error:
            raise self._explained(error, None) from None

    async def close(self) -> None:
        """Close the connection, even if the broker does not answer."""
        await self._shared.close()

    async def _send(self, message: Publication) -> None:
        link = await self._shared.get()
        if self._doubts(message, link):
            await self._send_alone(message, link)
            return
        link.under_way.add(message.id)
        try:
            await link.publish(message)
            return
        except _BROKEN:
            pass
        finally:
            link.under_way.discard(message.id)
        await self._send_alone(message, link)

    async def _send_alone(self, message: Publication, link: Link) -> None:
        """Send a message on a separate channel: the shared one failed, or the message might close it."""
        async with self._alone:
            if link.connection.given_up:
                raise Retry("the sink was closed before the broker confirmed it")
            link = await self._shared.get()
            try:
                await link.publish_alone(message)
            except aiormq.AMQPChannelError as error:
                self._doubt(message, error)
                raise
            self._refused.discard(message.exchange)
            if self._largest is not None and len(message.body) > self._largest:
                self._largest = None

    def _doubts(self, message: Publication, link: Link) -> bool:
        """True if the broker may close the shared channel for this message, or if its id is in use there."""
        return (
            message.exchange in self._refused
            or (self._largest is not None and len(message.body) > self._largest)
            # A returned message is recognized by its id alone.
            or message.id in link.under_way
        )

    def _doubt(self, message: Publication, error: aiormq.AMQPChannelError) -> None:
        if limit := re.search(r"larger than .*size (\d+)", str(error)):
            self._largest = int(limit[1])
        elif len(self._refused) < _MOST_DOUBTS:
            self._refused.add(message.exchange)

    def _late(self, began: float) -> Unavailable:
        link, seconds = self._shared.current, self._deadline.seconds
        if link is None:
            return no_answer(self._where, seconds)
        if link.connection.blocked:
            return Unavailable(f"{self._where} takes no messages: {clean(link.connection.blocked)}")
        if self._heard < began:
            # The broker was silent all that time: a new connection may work.
            self._shared.current = None
            link.cut()
        return Unavailable(f"{self._where} did not confirm it within {seconds:g}s")

    def _explained(self, error: Exception, message: Publication | None) -> Exception:
        said = clean(str(error.args[-1] if error.args else error))
        match error:
            case aiormq.PublishError() if message is not None:
                exchange = f"exchange {message.exchange!r}" if message.exchange else "the default exchange"
                return Unavailable(
                    f"{self._where} sent it back ({clean(error.args[0])}): no queue is bound to "
                    f"{exchange} for the routing key {message.routing_key!r}"
                )
            case aiormq.DeliveryError():
                return Unavailable(f"{self._where} did not take it (nack): a queue is full, or in trouble")
            case aiormq.ChannelPreconditionFailed():
                return Reject(said)
            case aiormq.AMQPChannelError():
                return Unavailable(said)
            case aiormq.ProbableAuthenticationError():
                return Unavailable(f"{self._where} refuses user {self._address.user or 'guest'!r}: {said}")
            case aiormq.ProtocolSyntaxError() if "Connection.Close" in said:
                # aiormq loses the broker's own text here.
                vhost = self._address.path or "/"
                return Unavailable(
                    f"{self._where} refuses the virtual host {vhost!r}: it does not exist, "
                    f"or user {self._address.user or 'guest'!r} may not use it"
                )
            case aiormq.AMQPConnectionError() | aiormq.AMQPError() | aiormq.ChannelInvalidStateError():
                return Unavailable(f"the connection to {self._where} broke: {said}")
        what = (error.strerror if isinstance(error, socket.gaierror) else None) or str(error)
        # asyncio's text only repeats the address; the errno says what happened.
        what = re.sub(r"\[Errno (\d+)\] Connect call failed", lambda m: os.strerror(int(m[1])), what)
        return unreachable(error, self._where, clean(what))


def _tls(options: Mapping[str, Any], destination: Destination, *, secure: bool) -> ssl.SSLContext | None:
    if secure:
        return tls_context(options, destination)
    for name in TLS_OPTIONS:
        if name in options:
            setting = f"destination {destination.name!r}: {name}"
            raise wrong(setting, options[name], "it is for TLS; begin the sink with amqps://")
    return None
