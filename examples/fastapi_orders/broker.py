"""Kafka: a new broker or somebody's own, with a topic for the orders."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from relaybox.demo.processes import Broken

ROOT = Path(__file__).parents[2]
TOPIC = "order-events"
PARTITIONS = [TopicPartition(TOPIC, number) for number in range(3)]
SECONDS = 10.0


class Broker:
    """A broker, and what is in its topic. ``server`` can be stopped and started, where it is a new one."""

    def __init__(self, address: str, server: Any = None) -> None:
        self.address = address
        self.is_new = server is not None
        self.runs = True
        self._server = server
        # What goes wrong is raised; the client's own log would only stand between the lines.
        self._settings = {"bootstrap.servers": address, "log_level": 0}

    def kill(self) -> None:
        """Its data stays."""
        self._server.stop()
        self.runs = False

    def start(self) -> None:
        """Start it again, with what it had."""
        self._server.start()
        self.runs = True

    def messages(self) -> int:
        """How many the topic has got."""
        with self._asking("nobody") as client:
            return sum(client.get_watermark_offsets(place, SECONDS)[1] for place in PARTITIONS)

    def read_by(self, group: str) -> int:
        """How many of them the group is done with."""
        with self._asking(group) as client:
            return sum(max(0, place.offset) for place in client.committed(PARTITIONS, SECONDS))

    @contextmanager
    def topic(self) -> Iterator[None]:
        """The topic, until the end of the block. It must be new: in an old one are orders of others."""
        self._create()
        try:
            yield
        finally:
            # That of a new broker goes with it.
            if not self.is_new:
                self._delete()

    def _create(self) -> None:
        admin = AdminClient(self._settings)
        try:
            admin.create_topics([NewTopic(TOPIC, len(PARTITIONS))], request_timeout=SECONDS)[TOPIC].result()
        except KafkaException as error:
            reason = error.args[0].str().rstrip(".")
            raise Broken(f"Kafka at {self.address}: {reason}; the topic {TOPIC} is to be made here") from None

    def _delete(self) -> None:
        admin = AdminClient(self._settings)
        admin.delete_topics([TOPIC], request_timeout=SECONDS)[TOPIC].result()

    @contextmanager
    def _asking(self, group: str) -> Iterator[Consumer]:
        client = Consumer({**self._settings, "group.id": group})
        try:
            yield client
        finally:
            client.close()


@contextmanager
def broker(address: str | None) -> Iterator[Broker]:
    """The one at the address; without one, a new one, as the tests of this repository start it."""
    if address is not None:
        found = Broker(address)
        with found.topic():
            yield found
        return
    print("Kafka starts; the first time, its jars are fetched.", flush=True)
    sys.path.insert(0, str(ROOT))
    from tests.servers import base, kafka

    try:
        with kafka.broker(auto_create=False) as server:
            started = Broker(server.bootstrap, server)
            with started.topic():
                yield started
    except base.Unavailable as reason:
        raise Broken(f"no Kafka: {reason}; give one of yours with --kafka HOST:PORT") from None
