"""What stands in the topics of a Kafka broker, read by a plain consumer."""

from __future__ import annotations

import logging
from uuid import uuid4

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition
from confluent_kafka import admin as kafka

from tests.waiting import PATIENCE, wait_for

_log = logging.getLogger("tests.kafka")


def make_topic(bootstrap: str, name: str | None = None, partitions: int = 1, **config: str) -> str:
    """Make a topic, of settings such as ``cleanup_policy="compact"``, and say its name."""
    name = name or f"topic-{uuid4()}"
    settings = {key.replace("_", "."): value for key, value in config.items()}
    admin = kafka.AdminClient({"bootstrap.servers": bootstrap}, logger=_log)
    [made] = admin.create_topics([kafka.NewTopic(name, partitions, 1, config=settings)]).values()
    made.result(PATIENCE)
    return name


def make_user(bootstrap: str, name: str, password: str) -> None:
    """Make a user of SCRAM-SHA-256."""
    info = kafka.ScramCredentialInfo(kafka.ScramMechanism.SCRAM_SHA_256, 4096)
    made = kafka.UserScramCredentialUpsertion(name, info, password.encode())
    admin = kafka.AdminClient({"bootstrap.servers": bootstrap}, logger=_log)
    [done] = admin.alter_user_scram_credentials([made]).values()
    done.result(PATIENCE)


def read(bootstrap: str, topic: str) -> list[Message]:
    """Return all messages of a topic, those of each partition in order."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"reader-{uuid4()}",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 20,
        },
        logger=_log,
    )
    found: list[Message] = []
    ended: set[int] = set()

    def all_ended() -> bool:
        for message in consumer.consume(1000, 0.05):
            error = message.error()
            if error is None:
                found.append(message)
                ended.discard(message.partition())
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            else:
                _log.warning("%s", error)
        return ended == set(partitions)

    try:
        partitions = consumer.list_topics(topic, PATIENCE).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
        wait_for(all_ended, lambda: f"{len(found)} messages")
        return found
    finally:
        consumer.close()


def headers(message: Message) -> dict[str, str]:
    """Return the headers as texts."""
    return {name: value.decode() for name, value in message.headers() or ()}
