"""Make the messages for RabbitMQ, with the exchange and the routing key that the options say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pamqp.commands import Basic

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject
from relaybox.core.settings import Destination
from relaybox.core.values import wrong
from relaybox.sinks.broker import Messages, Template

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
