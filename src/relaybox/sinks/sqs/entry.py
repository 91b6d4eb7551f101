"""What SQS and SNS are given of a delivery: a text, no more than ten attributes, and for FIFO a group.

Everything is checked here, because one message that is refused may have the other nine refused with it.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject
from relaybox.core.settings import Destination
from relaybox.sinks.broker import Message, Messages, key_of
from relaybox.sinks.sqs.place import Place
from relaybox.wire.envelope import BYTES
from relaybox.wire.tracing import NAMES

MOST_ATTRIBUTES = 10
LARGEST = 1_048_576
"""Bytes of a message; a queue or topic may have a lower limit."""

_LARGEST_REQUEST = {"sqs": LARGEST, "sns": 262_144}
"""Bytes of all messages of a request. A topic may be set to take more."""

_FIRST = ("event-id", "event-type", "aggregate-type", "aggregate-id", "content-type", *NAMES)
_BASE64 = "content-transfer-encoding"
_REFUSED = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ATTRIBUTE = re.compile(r"(?!(?:aws|amazon)\.)[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*", re.ASCII | re.IGNORECASE)
_LONGEST_NAME = 256
_GROUP = re.compile(r"[!-~]{1,128}", re.ASCII)


class Entry(NamedTuple):
    """One message of a request to the queue or topic ``name``; ``size`` is what counts against the limits."""

    name: str
    size: int
    fields: dict[str, Any]


class Entries:
    """Makes the messages of a destination."""

    def __init__(self, destination: Destination, place: Place) -> None:
        self._place = place
        self._message = Messages(destination)
        self._key = key_of(destination)
        self._body = "MessageBody" if place.service == "sqs" else "Message"

    def __call__(self, delivery: Delivery) -> Entry:
        """The message of one delivery; raises ``Reject`` where SQS would refuse it."""
        name = self._place.name_of(delivery)
        message = self._message(delivery)
        body = _text(message)
        attributes = dict(_attributes(message))
        size = len(body.encode()) + sum(
            len(name) + len("String") + len(value.encode()) for name, value in attributes.items()
        )
        if size > LARGEST:
            raise Reject(f"the message has {size} bytes, and {self._place.what} takes no more than {LARGEST}")
        typed = {name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()}
        fields: dict[str, Any] = {self._body: body, "MessageAttributes": typed}
        if name.endswith(".fifo"):
            group = delivery.ordering_key or self._key(delivery) or str(delivery.event_id)
            fields["MessageGroupId"] = _group(group)
            fields["MessageDeduplicationId"] = message.deduplicated_by(delivery)
        return Entry(name, size, fields)


def requests(entries: Mapping[int, Entry], service: str) -> Iterator[dict[int, Entry]]:
    """The entries by queue, in parts that are no larger than a request may be."""
    open_: dict[str, dict[int, Entry]] = {}
    sizes: dict[str, int] = {}
    for at, entry in entries.items():
        size = sizes.get(entry.name, 0) + entry.size
        if size > _LARGEST_REQUEST[service] and entry.name in open_:
            yield open_.pop(entry.name)
            size = entry.size
        open_.setdefault(entry.name, {})[at] = entry
        sizes[entry.name] = size
    yield from open_.values()


def _text(message: Message) -> str:
    if message.content_type == BYTES:
        text = b64encode(message.body).decode()
    else:
        # All else is JSON, where a character may stand for itself only within a text.
        text = _REFUSED.sub(lambda found: f"\\u{ord(found[0]):04x}", message.body.decode())
    if not text:
        raise Reject("the message is empty, which SQS refuses; set format = 'json'")
    return text


def _attributes(message: Message) -> Iterator[tuple[str, str]]:
    """Ours, then as many of the emitter's as there is room for, by name; an empty one says nothing."""
    headers = {**message.headers, "content-type": message.content_type}
    if message.content_type == BYTES:
        headers[_BASE64] = "base64"
    else:
        headers.pop(_BASE64, None)
    ours = [*_FIRST, _BASE64, *(name for name in headers if name.startswith("relaybox-"))]
    others = sorted(headers.keys() - set(ours))
    filled = [(name, headers[name]) for name in (*ours, *others) if headers.get(name)]
    for name, value in filled[:MOST_ATTRIBUTES]:
        if len(name) > _LONGEST_NAME or not _ATTRIBUTE.fullmatch(name):
            rule = "letters, digits, '-', '_' and single dots within, no 'AWS.' or 'Amazon.' at its beginning"
            raise Reject(f"the header {name[:_LONGEST_NAME]!r} is no name of an attribute of SQS: {rule}")
        if found := _REFUSED.search(value):
            raise Reject(f"the header {name!r} holds {found[0]!r}, which SQS refuses")
        yield name, value


def _group(key: str) -> str:
    """The key itself, or a digest of one that SQS would not take: two keys never become one."""
    return key if _GROUP.fullmatch(key) else f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
