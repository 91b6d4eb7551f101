"""Amazon SQS and SNS as a destination: ten messages in a request, each with an answer of its own.

What the service refuses of one message is that message's answer. Where it refuses a whole request because of
what is in it, the request is halved until the message that it is about stands alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

from botocore.exceptions import ClientError

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.sinks.deadline import Deadline
from relaybox.sinks.sink import DELIVERED, Answer, InBatches, answer_of
from relaybox.sinks.sqs.answer import Said, answer_to, explained
from relaybox.sinks.sqs.client import Client
from relaybox.sinks.sqs.entry import Entries, Entry, requests
from relaybox.sinks.sqs.place import parse_place

MOST_IN_REQUEST = 10
_NOBODY = "relaybox-check"
"""A queue that is asked for only to see whether there is an answer."""

Answers: TypeAlias = dict[int, Answer]


class SqsSink(InBatches):
    """Sends to a queue or a topic, or to many of them by the fields of the events."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination.concurrency, MOST_IN_REQUEST)
        self._place = parse_place(destination)
        self._entries = Entries(destination, self._place)
        self._deadline = Deadline(destination.timeout)
        self._client = Client(self._place, connections=destination.concurrency, timeout=destination.timeout)
        self._urls: dict[str, str] = {}

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[Answer]:
        """Send them, those of one queue in one request."""
        answers: Answers = {}
        entries: dict[int, Entry] = {}
        for at, delivery in enumerate(deliveries):
            try:
                entries[at] = self._entries(delivery)
            except Exception as error:
                answers[at] = answer_of(error)

        async def ask(part: Mapping[int, Entry]) -> None:
            answers.update(await self._ask(part))

        async with asyncio.TaskGroup() as asking:
            for part in requests(entries, self._place.service):
                asking.create_task(ask(part))
        return [answers.get(at) or Retry("the request was given up") for at in range(len(deliveries))]

    async def check(self) -> None:
        """Reach the service; raises ``Unavailable`` where it or the queue is not there."""
        name = self._place.fixed or _NOBODY
        try:
            with self._deadline():
                await self._client.ask(lambda client: self._look(client, name))
        except Exception as error:
            if name is _NOBODY and isinstance(error, ClientError) and Said.of_error(error).missing:
                return
            answer = self._explained(error, name)
            raise (answer if isinstance(answer, Unavailable) else Unavailable(answer.reason)) from None

    async def close(self) -> None:
        """Give up the connections."""
        await self._client.close()

    async def _ask(self, entries: Mapping[int, Entry]) -> Answers:
        """The answers to the messages of one request, all for one queue."""
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
                return await self._ask_halves(entries)
            return dict.fromkeys(entries, self._explained(error, name))

    async def _ask_halves(self, entries: Mapping[int, Entry]) -> Answers:
        parts, middle = iter(entries.items()), len(entries) // 2
        return await self._ask(dict(islice(parts, middle))) | await self._ask(dict(parts))

    async def _send(self, client: Any, name: str, entries: Mapping[int, Entry]) -> dict[str, Any]:
        batch = [{"Id": str(at), **entry.fields} for at, entry in entries.items()]
        response: dict[str, Any]
        if self._place.service == "sns":
            topic = f"{self._place.owner}{name}"
            response = await client.publish_batch(TopicArn=topic, PublishBatchRequestEntries=batch)
        else:
            url = self._urls.get(name) or await self._look(client, name)
            response = await client.send_message_batch(QueueUrl=url, Entries=batch)
        return response

    async def _look(self, client: Any, name: str) -> str:
        """The URL of a queue, or the ARN of a topic that is there."""
        if self._place.service == "sns":
            topic = f"{self._place.owner}{name}"
            await client.get_topic_attributes(TopicArn=topic)
            return topic
        owner = {"QueueOwnerAWSAccountId": self._place.owner} if self._place.owner else {}
        found: str = (await client.get_queue_url(QueueName=name, **owner))["QueueUrl"]
        self._urls[name] = found
        return found

    def _read(self, response: Mapping[str, Any], name: str, entries: Mapping[int, Entry]) -> Answers:
        answers: Answers = dict.fromkeys(entries, Retry("the service said nothing of this message"))
        for sent in response.get("Successful", ()):
            answers[int(sent["Id"])] = DELIVERED
        for failed in response.get("Failed", ()):
            answers[int(failed["Id"])] = answer_to(Said.of_entry(failed), name, self._place)
        return answers

    def _explained(self, error: Exception, name: str) -> Retry | Reject | Unavailable:
        if isinstance(error, ClientError) and Said.of_error(error).missing:
            self._urls.pop(name, None)
        return explained(error, name, self._place, self._deadline.seconds)
