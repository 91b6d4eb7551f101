"""Send to Amazon SQS and SNS: ten messages in a request, each with its own answer.

One bad message may get the other nine refused, so each is checked here first. If a whole request is refused
for its content, it is halved until the bad message is alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from botocore.exceptions import ClientError

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.sinks.broker import Messages, deduplicated_by, key_of
from relaybox.sinks.deadline import Deadline
from relaybox.sinks.sink import DELIVERED, Answer, InBatches, try_each
from relaybox.sinks.sqs.client import Client, Queue, Said, answer_to, explained, parse_queue
from relaybox.wire.envelope import BYTES, Envelope
from relaybox.wire.tracing import NAMES

MOST_IN_REQUEST = 10
_NOBODY = "relaybox-check"
"""The name of a queue that need not exist, to check that the service answers."""

MOST_ATTRIBUTES = 10
LARGEST = 1_048_576
"""Bytes of a message; a queue or topic may have a lower limit."""

_LARGEST_REQUEST = {"sqs": LARGEST, "sns": 262_144}
"""Bytes of all messages in a request; a topic can be set to accept more."""

_FIRST = ("event-id", "event-type", "aggregate-type", "aggregate-id", "content-type", *NAMES)
_BASE64 = "content-transfer-encoding"
_REFUSED = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ATTRIBUTE = re.compile(r"(?!(?:aws|amazon)\.)[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*", re.ASCII | re.IGNORECASE)
_LONGEST_NAME = 256
_GROUP = re.compile(r"[!-~]{1,128}", re.ASCII)

Answers: TypeAlias = dict[int, Answer]


class SqsSink(InBatches):
    """Sends to one queue or topic, or to several by the fields of the events."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination.concurrency, MOST_IN_REQUEST)
        self._queue = parse_queue(destination)
        self._entries = Entries(destination, self._queue)
        self._deadline = Deadline(destination.timeout)
        self._client = Client(self._queue, connections=destination.concurrency, timeout=destination.timeout)
        self._urls: dict[str, str] = {}

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[Answer]:
        """Send the deliveries: one request for each queue, or more if they are large."""
        answers: Answers = {}
        entries = try_each(deliveries, self._entries, answers)

        async def ask(part: Mapping[int, Entry]) -> None:
            answers.update(await self._ask(part))

        async with asyncio.TaskGroup() as asking:
            for part in requests(entries, self._queue.service):
                asking.create_task(ask(part))
        return [answers.get(at) or Retry("the request was given up") for at in range(len(deliveries))]

    async def check(self) -> None:
        """Reach the service; raise ``Unavailable`` if the service or the queue is missing."""
        name = self._queue.name.fixed or _NOBODY
        try:
            with self._deadline():
                await self._client.ask(lambda client: self._look(client, name))
        except Exception as error:
            if name is _NOBODY and isinstance(error, ClientError) and Said.of_error(error).missing:
                return
            answer = self._explained(error, name)
            raise (answer if isinstance(answer, Unavailable) else Unavailable(answer.reason)) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _ask(self, entries: Mapping[int, Entry]) -> Answers:
        name = next(iter(entries.values())).name
        try:
            with self._deadline():
                sent = await self._client.ask(lambda client: self._send(client, name, entries))
                return self._read(sent, name, entries)
        except Retry as closed:
            return dict.fromkeys(entries, closed)
        except Exception as error:
            refused = isinstance(error, ClientError) and Said.of_error(error).about_contents
            if refused and len(entries) > 1:
                parts, middle = iter(entries.items()), len(entries) // 2
                return await self._ask(dict(islice(parts, middle))) | await self._ask(dict(parts))
            return dict.fromkeys(entries, self._explained(error, name))

    async def _send(self, client: Any, name: str, entries: Mapping[int, Entry]) -> dict[str, Any]:
        batch = [{"Id": str(at), **entry.fields} for at, entry in entries.items()]
        response: dict[str, Any]
        if self._queue.service == "sns":
            topic = f"{self._queue.owner}{name}"
            response = await client.publish_batch(TopicArn=topic, PublishBatchRequestEntries=batch)
        else:
            url = self._urls.get(name) or await self._look(client, name)
            response = await client.send_message_batch(QueueUrl=url, Entries=batch)
        return response

    async def _look(self, client: Any, name: str) -> str:
        if self._queue.service == "sns":
            topic = f"{self._queue.owner}{name}"
            await client.get_topic_attributes(TopicArn=topic)
            return topic
        owner = {"QueueOwnerAWSAccountId": self._queue.owner} if self._queue.owner else {}
        found: str = (await client.get_queue_url(QueueName=name, **owner))["QueueUrl"]
        self._urls[name] = found
        return found

    def _read(self, response: Mapping[str, Any], name: str, entries: Mapping[int, Entry]) -> Answers:
        answers: Answers = dict.fromkeys(entries, Retry("the service said nothing of this message"))
        for sent in response.get("Successful", ()):
            answers[int(sent["Id"])] = DELIVERED
        for failed in response.get("Failed", ()):
            fault = failed.get("SenderFault") is True
            said = Said(str(failed.get("Code")), str(failed.get("Message", "")), fault_of_sender=fault)
            answers[int(failed["Id"])] = answer_to(said, name, self._queue)
        return answers

    def _explained(self, error: Exception, name: str) -> Retry | Reject | Unavailable:
        if isinstance(error, ClientError) and Said.of_error(error).missing:
            self._urls.pop(name, None)
        return explained(error, name, self._queue, self._deadline.seconds)


class Entry(NamedTuple):
    """One message of a request to the queue or topic ``name``; ``size`` counts against the limits."""

    name: str
    size: int
    fields: dict[str, Any]


class Entries:
    """Makes the messages of a destination."""

    def __init__(self, destination: Destination, queue: Queue) -> None:
        self._queue = queue
        self._message = Messages(destination)
        self._key = key_of(destination)
        self._body = "MessageBody" if queue.service == "sqs" else "Message"

    def __call__(self, delivery: Delivery) -> Entry:
        """Return the message of one delivery; raise ``Reject`` if SQS would refuse it."""
        name = self._queue.name_of(delivery)
        message = self._message(delivery)
        body = _text(message)
        attributes = dict(_attributes(message))
        size = len(body.encode()) + sum(
            len(name) + len("String") + len(value.encode()) for name, value in attributes.items()
        )
        if size > LARGEST:
            raise Reject(f"the message has {size} bytes, and {self._queue.what} takes no more than {LARGEST}")
        typed = {name: {"DataType": "String", "StringValue": value} for name, value in attributes.items()}
        fields: dict[str, Any] = {self._body: body, "MessageAttributes": typed}
        if name.endswith(".fifo"):
            group = delivery.ordering_key or self._key(delivery) or str(delivery.event_id)
            # A key that SQS does not accept is hashed, so that two keys never share a group.
            if not _GROUP.fullmatch(group):
                group = f"sha256:{hashlib.sha256(group.encode()).hexdigest()}"
            fields["MessageGroupId"] = group
            fields["MessageDeduplicationId"] = deduplicated_by(message, delivery)
        return Entry(name, size, fields)


def requests(entries: Mapping[int, Entry], service: str) -> Iterator[dict[int, Entry]]:
    """Yield the entries of each queue, in parts that fit into a request."""
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


def _text(message: Envelope) -> str:
    if message.content_type == BYTES:
        text = b64encode(message.body).decode()
    else:
        # Everything else is JSON, where these characters occur only within strings and can be escaped.
        text = _REFUSED.sub(lambda found: f"\\u{ord(found[0]):04x}", message.body.decode())
    if not text:
        raise Reject("the message is empty, which SQS refuses; set format = 'json'")
    return text


def _attributes(message: Envelope) -> Iterator[tuple[str, str]]:
    """Yield our attributes, then the emitter's by name while there is room; skip empty ones."""
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
            raise Reject(f"the header {name[:_LONGEST_NAME]!r} is not a name of an SQS attribute: {rule}")
        if found := _REFUSED.search(value):
            raise Reject(f"the header {name!r} holds {found[0]!r}, which SQS refuses")
        yield name, value
