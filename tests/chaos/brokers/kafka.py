"""Kafka: a place is a topic."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from functools import partial
from typing import TypeVar
from uuid import UUID, uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)

from tests.chaos.brokers.base import DOWN, PATIENCE, SILENT, Harm, Message
from tests.integration.kafka_log import headers, make_topic, read
from tests.servers import kafka as server
from tests.waiting import wait_for

PARTITIONS = 4
SMALL = 800  # Bytes: some of the events are larger, and some are not
STILL = 0.4  # Seconds without a new message in a topic that takes none
_log = logging.getLogger("tests.kafka")
T = TypeVar("T")


class Kafka:
    """A server that makes no topic by itself. It is not asked to end: with its options that is a crash."""

    name = "kafka"
    timeout = 3.0
    copies = 1

    def __init__(self, running: server.Broker) -> None:
        self._running = running
        self._topic = ""
        self._gone: list[Message] = []
        self.harms = {
            "killed": Harm(self._kill, running.start, DOWN, shut=True),
            "stopped": Harm(running.pause, running.resume, SILENT),
            "forbidden": Harm(self._forbid, self._allow, "[Aa]uthoriz", shut=True),
            "deleted": Harm(
                self._delete, self._create, "create the topic|[Uu]nknown topic|no answer", shut=True
            ),
            "too small": Harm(
                partial(self._set, "max.message.bytes", str(SMALL)),
                partial(self._set, "max.message.bytes", "1048588"),
                r"max\.message\.bytes",
                refuses=True,
            ),
        }

    @property
    def url(self) -> str:
        return f"{self._running.url}/{self._topic}"

    def make(self) -> None:
        self._topic, self._gone = f"chaos-{uuid4()}", []
        self._create()

    def read(self) -> list[Message]:
        return [*self._gone, *self._messages()]

    def _messages(self) -> list[Message]:
        found = read(self._running.bootstrap, self._topic)
        # Without an id are those by which ``_forbid`` tries whether any is taken.
        events = [one for one in found if "event-id" in headers(one)]
        return [Message(UUID(headers(one)["event-id"]), one.value() or b"") for one in events]

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self._running.bootstrap}, logger=_log)

    def _kill(self) -> None:
        os.kill(self._running._pid(), signal.SIGKILL)
        self._running.stop()

    def _set(self, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, self._topic, incremental_configs=[entry])
        # A client without a reference gives up what it was asked.
        admin = self._admin()
        [done] = admin.incremental_alter_configs([resource]).values()
        done.result(PATIENCE)

    def _forbid(self) -> None:
        """Return when it refuses: a rule that was recorded is not yet in force."""
        admin = self._admin()
        for done in admin.create_acls(self._rules(AclBinding)).values():
            done.result(PATIENCE)
        wait_for(lambda: all(self._refuses(number) for number in range(PARTITIONS)), "it refuses")

    def _allow(self) -> None:
        admin = self._admin()
        for done in admin.delete_acls(self._rules(AclBindingFilter)).values():
            done.result(PATIENCE)

    def _rules(self, kind: type[T]) -> list[T]:
        """Return the rules that refuse writes: once a topic has one, what no rule allows is refused too."""
        anybody = ResourceType.TOPIC, self._topic, ResourcePatternType.LITERAL, "User:*", "*"
        return [
            kind(*anybody, AclOperation.ALL, AclPermissionType.ALLOW),
            kind(*anybody, AclOperation.WRITE, AclPermissionType.DENY),
        ]

    def _refuses(self, partition: int) -> bool:
        answers: list[KafkaError | None] = []
        producer = Producer(
            {"bootstrap.servers": self._running.bootstrap, "acks": "all", "retries": 0}, logger=_log
        )
        producer.produce(
            self._topic, b"", partition=partition, on_delivery=lambda error, _: answers.append(error)
        )
        producer.flush(PATIENCE)
        return any(error and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED for error in answers)

    def _create(self) -> None:
        def made() -> bool:
            # The one of this name that was deleted may still be on its way out.
            with suppress(KafkaException):
                make_topic(self._running.bootstrap, self._topic, PARTITIONS)
            return self._is_there()

        wait_for(made, "the topic is there")

    def _delete(self) -> None:
        """Stop writes to the topic, read it and delete it."""
        self._forbid()
        self._wait_until_still()
        self._gone += self._messages()
        admin = self._admin()
        [done] = admin.delete_topics([self._topic]).values()
        done.result(PATIENCE)
        wait_for(lambda: not self._is_there(), "the topic is gone")
        self._allow()

    def _is_there(self) -> bool:
        return self._topic in self._admin().list_topics(timeout=PATIENCE).topics

    def _wait_until_still(self) -> None:
        consumer = Consumer(
            {"bootstrap.servers": self._running.bootstrap, "group.id": str(uuid4())}, logger=_log
        )
        places = [TopicPartition(self._topic, number) for number in range(PARTITIONS)]
        last, since = -1, time.monotonic()

        def still() -> bool:
            nonlocal last, since
            size = sum(consumer.get_watermark_offsets(place, PATIENCE)[1] for place in places)
            if size != last:
                last, since = size, time.monotonic()
            return time.monotonic() - since > STILL

        try:
            wait_for(still, "no message comes any more")
        finally:
            consumer.close()


KIND, OPTIONS = Kafka, {"auto_create": False}
