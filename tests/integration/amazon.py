"""Queues and topics, as a plain client of Amazon's sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import quote
from uuid import uuid4

import botocore.session
import pytest

REGION = "eu-west-1"


def sink_at(endpoint: str, path: str) -> str:
    """Return the URL of a sink."""
    return f"sqs://tests:geheim@/{path}?region={REGION}&endpoint={quote(endpoint)}"


class Queue(NamedTuple):
    """A queue of one test."""

    name: str
    url: str


class Received(NamedTuple):
    """A message as a consumer gets it."""

    body: str
    attributes: dict[str, str]
    group: str | None
    deduplication: str | None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@pytest.fixture(scope="module")
def amazon(moto_url: str) -> Iterator[Amazon]:
    with closing(Amazon(moto_url)) as made:
        yield made


class Amazon:
    """Makes queues and topics, and reads what is in them."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        session = botocore.session.get_session()
        session.set_credentials("tests", "geheim")
        self.sqs, self.sns = (
            session.create_client(name, region_name=REGION, endpoint_url=endpoint) for name in ("sqs", "sns")
        )

    def close(self) -> None:
        self.sqs.close()
        self.sns.close()

    def sink(self, path: str) -> str:
        """Return the URL of a sink that sends here."""
        return sink_at(self.endpoint, path)

    def queue(self, suffix: str = "", *, name: str | None = None, **attributes: str) -> Queue:
        """Create a queue; the ``suffix`` ``.fifo`` makes one that keeps the order."""
        name = f"{name or f'shop-{uuid4().hex}'}{suffix}"
        attributes |= {"FifoQueue": "true"} if suffix else {}
        made = self.sqs.create_queue(QueueName=name, Attributes=attributes)
        return Queue(name, made["QueueUrl"])

    def topic(self, suffix: str = "") -> tuple[str, Queue]:
        """Create a topic and a queue that gets what is published there; return the ARN and the queue."""
        queue = self.queue(suffix)
        about = self.sqs.get_queue_attributes(QueueUrl=queue.url, AttributeNames=["QueueArn"])
        settings = {"FifoTopic": "true"} if suffix else {}
        arn = self.sns.create_topic(Name=f"shop-{uuid4().hex}{suffix}", Attributes=settings)["TopicArn"]
        self.sns.subscribe(
            TopicArn=arn,
            Protocol="sqs",
            Endpoint=about["Attributes"]["QueueArn"],
            Attributes={"RawMessageDelivery": "true"},
        )
        return arn, queue

    def take(self, queue: Queue) -> list[Received]:
        """Take everything out of a queue, in the order in which the queue returns it."""
        taken: list[Received] = []
        while found := self.sqs.receive_message(
            QueueUrl=queue.url,
            MaxNumberOfMessages=10,
            WaitTimeSeconds=0,
            VisibilityTimeout=3600,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
        ).get("Messages"):
            taken += map(_received, found)
            if queue.name.endswith(".fifo"):
                # A group hands out no more before these are gone.
                handles = [
                    {"Id": str(at), "ReceiptHandle": one["ReceiptHandle"]} for at, one in enumerate(found)
                ]
                self.sqs.delete_message_batch(QueueUrl=queue.url, Entries=handles)
        self.sqs.purge_queue(QueueUrl=queue.url)
        return taken


def _received(message: dict[str, Any]) -> Received:
    attributes, system = (message.get(name, {}) for name in ("MessageAttributes", "Attributes"))
    return Received(
        message["Body"],
        {name: value["StringValue"] for name, value in attributes.items()},
        system.get("MessageGroupId"),
        system.get("MessageDeduplicationId"),
    )
