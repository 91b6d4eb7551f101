"""Produce to Kafka: each delivery is a message, and the broker's delivery report is its answer.

The producer is idempotent and waits for all in-sync replicas. A send hands over its messages at once to fill
batches, but only one of each ordering key. After a failed message librdkafka sends the next, and a retry
would arrive too late. ``concurrency`` counts sends, not messages.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.core.values import Duration, Parse, parse_duration, parse_size, wrong
from relaybox.errors import ConfigError
from relaybox.sinks.broker import Messages, Template, key_of, one_of, parse_address, text
from relaybox.sinks.kafka.producer import OF_A_BATCH, TOO_LARGE, Headers, KafkaProducer, classify
from relaybox.sinks.sink import (
    AT_A_STRETCH,
    DELIVERED,
    REGARDLESS,
    RELEASED,
    Answer,
    Limited,
    Progress,
    answer_of,
    describe,
    runs,
)
from relaybox.wire.envelope import Envelope

PORT = 9092
LARGEST_MESSAGE = 1_048_588
"""Bytes; a broker's default limit."""
BATCH_BYTES = 262_144
SMALLEST, LARGEST = 1000, 1_000_000_000
LINGER = 0.001
LONGEST_LINGER = 60.0
LONGEST_TIMEOUT = 2**31 - 1
"""Milliseconds; the most that librdkafka accepts."""
QUEUE = 100_000
"""The number of messages in the producer after which a send waits."""
REFRESH = 5.0
"""Seconds after which the producer looks again for a missing topic."""
DEFAULT_TOPIC = "{aggregate_type}-events"
FULL = 0.005
"""Seconds after which a message is handed over again if the producer was full."""

REMEMBERED = 10_000

ALLOWED = "a topic of Kafka has 1 to 249 letters, digits, '.', '_' or '-'"
_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}", re.ASCII)


def _file(value: str, setting: str) -> str:
    if not Path(text(value, setting)).is_file():
        raise wrong(setting, value, "there is no such file")
    return value


def _size(value: str | int, setting: str) -> int:
    size = parse_size(int(value) if isinstance(value, str) and value.isdecimal() else value, setting)
    if not SMALLEST <= size <= LARGEST:
        raise wrong(setting, value, f"write from {SMALLEST} to {LARGEST} bytes")
    return size


def _linger(value: Duration, setting: str) -> float:
    seconds = parse_duration(0 if value == "0" else value, setting)
    if seconds > LONGEST_LINGER:
        raise wrong(setting, value, f"write no more than {LONGEST_LINGER:g}s")
    return seconds


OPTIONS: dict[str, Parse[Any]] = {
    "security": one_of("plaintext", "ssl", "sasl_plaintext", "sasl_ssl"),
    "mechanism": one_of("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"),
    "ca": _file,
    "certificate": _file,
    "key": _file,
    "compression": one_of("none", "gzip", "snappy", "lz4", "zstd"),
    "linger": _linger,
    "partitioner": one_of(
        "murmur2_random", "murmur2", "consistent_random", "consistent", "fnv1a_random", "fnv1a", "random"
    ),
    "client_id": text,
    "max_message": _size,
    "batch_bytes": _size,
}


class KafkaSettings:
    """The address and the producer's configuration; raises ``ConfigError`` if settings conflict."""

    def __init__(self, destination: Destination) -> None:
        self.address = parse_address(destination, PORT, OPTIONS)
        self._where = f"destination {destination.name!r}: the kafka sink"
        self._options = self.address.options
        if destination.ordered and self._options.get("partitioner") == "random":
            fix = "events of one key would be in several partitions; choose another, or ordered = false"
            raise wrong(f"{self._where}: partitioner", "random", fix)
        self.max_message: int = self._options.get("max_message", LARGEST_MESSAGE)
        self.configuration = {
            "bootstrap.servers": ",".join(self.address.netlocs),
            "client.id": self._options.get("client_id", "relaybox"),
            "enable.idempotence": True,
            "acks": "all",
            "partitioner": self._options.get("partitioner", "murmur2_random"),
            "compression.type": self._options.get("compression", "none"),
            "message.max.bytes": self.max_message,
            "batch.size": self._options.get("batch_bytes", BATCH_BYTES),
            "queue.buffering.max.messages": QUEUE,
            "socket.keepalive.enable": True,
            "reconnect.backoff.max.ms": 1000,
            "topic.metadata.refresh.interval.ms": round(REFRESH * 1000),
            **self._times(destination.timeout),
            **self._security(),
        }

    def _times(self, timeout: float) -> dict[str, Any]:
        """Return time limits that make the producer give up before the sink: it knows a message's fate."""
        linger = self._options.get("linger", LINGER) * 1000
        before = round((timeout - min(1.0, timeout / 4)) * 1000)
        message = min(max(before, int(linger) + 1), LONGEST_TIMEOUT)
        return {
            "linger.ms": linger,
            "message.timeout.ms": message,
            # A topic that the broker creates on first use takes a moment.
            "topic.metadata.propagation.max.ms": min(message // 2, 5000),
            "socket.connection.setup.timeout.ms": min(max(message, 1000), 30_000),
        }

    def _security(self) -> dict[str, Any]:
        given, user = self._options, self.address.user
        files: list[str] = [name for name in ("ca", "certificate", "key") if name in given]
        usual = ("sasl_ssl" if user else "ssl") if user or files else "plaintext"
        protocol = given.get("security", usual)
        self._check(protocol, files)
        settings = {
            "security.protocol": protocol.upper(),
            "ssl.ca.location": given.get("ca"),
            "ssl.certificate.location": given.get("certificate"),
            "ssl.key.location": given.get("key"),
        }
        if user:
            settings |= {
                "sasl.mechanism": given.get("mechanism", "PLAIN"),
                "sasl.username": user,
                "sasl.password": self.address.password,
            }
        return {name: value for name, value in settings.items() if value is not None}

    def _check(self, protocol: str, files: list[str]) -> None:
        sasl, user = protocol.startswith("sasl"), self.address.user
        security = f"{self._where}: security = {protocol!r}"
        if sasl and (not user or self.address.password is None):
            raise ConfigError(f"{security} needs a user and a password: kafka://user@host with auth = …")
        if user and not sasl:
            raise ConfigError(f"{security} takes no user; write sasl_ssl, or sasl_plaintext")
        if "mechanism" in self._options and not user:
            raise ConfigError(
                f"{self._where}: mechanism is set, and there is no user; write kafka://user@host"
            )
        if files and not protocol.endswith("ssl"):
            raise ConfigError(f"{security} uses no {files[0]}; write ssl or sasl_ssl")
        if ("certificate" in files) != ("key" in files):
            raise ConfigError(f"{self._where}: certificate and key belong together; write both")


class KafkaSink(Limited):
    """Produces to the brokers that the URL names; raises ``ConfigError`` if a setting is wrong."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination.concurrency)
        self._settings = KafkaSettings(destination)
        path = self._settings.address.path
        self._topic = Template(path or DEFAULT_TOPIC, destination, "topic", lower=not path)
        if path and not _TOPIC.fullmatch(re.sub(r"\{\w+\}", "x", path)):
            raise ConfigError(f"destination {destination.name!r}: topic = {path!r}: {ALLOWED}")
        self._fixed = None if self._topic.fields else path
        self._few = self._topic.fields <= {"aggregate_type", "event_type", "destination"}
        self._topics: dict[tuple[str, str], str] = {}
        self._key = key_of(destination)
        self._message = Messages(destination)
        self._timeout = destination.timeout
        self._producers: dict[bool, KafkaProducer] = {}

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """Return one answer for each delivery, in the same order."""
        run = Run(deliveries, progress)
        async with self._places:
            try:
                while run.ready or run.under_way:
                    await self._hand_over(run)
                    await run.change()
            finally:
                run.over = True
        return run.answers

    async def check(self) -> None:
        """Reach the brokers, and find the topic if it is fixed; raise ``Unavailable``."""
        await self._producer(alone=False).ask(self._fixed)

    async def close(self) -> None:
        """Close the producers and drop their messages."""
        producers, self._producers = self._producers, {}
        for producer in producers.values():
            await producer.close()

    async def _hand_over(self, run: Run) -> None:
        while run.ready:
            full = not self._stretch(run)
            if run.ready:
                await asyncio.sleep(FULL if full else 0)

    def _stretch(self, run: Run) -> bool:
        """Hand over a few messages, so that the loop is not blocked; return False if the producer is full."""
        producer: KafkaProducer | None = None
        for _ in range(min(len(run.ready), AT_A_STRETCH)):
            at = run.ready.popleft()
            if not run.progress.begin(run.deliveries[at]):
                continue
            try:
                if producer is None or producer.broken is not None:
                    producer = self._producer(alone=False)
                taken = self._produce(run, at, producer)
            except Exception as error:
                run.answer(at, answer_of(error))
            else:
                if not taken:
                    run.ready.appendleft(at)
                    return False
        return True

    def _produce(self, run: Run, at: int, producer: KafkaProducer) -> bool:
        """Hand over one message, or raise an answer; return False if the producer is full."""
        delivery, alone = run.deliveries[at], at in run.alone
        message = self._message(delivery)
        topic, key = self._topic_of(delivery), self._key(delivery)
        sent = Sent(run, at, topic, alone)
        try:
            producer = self._producer(alone=True) if alone else producer
            producer.produce(sent, topic, message.body, key, _headers(message))
        except KafkaException as error:
            raise self._refused(error.args[0], topic) from None
        except BufferError:
            return False
        except (ValueError, TypeError) as error:
            raise Reject(f"the client of Kafka does not take it: {describe(error)}") from None
        run.under_way += 1
        return True

    def _producer(self, *, alone: bool) -> KafkaProducer:
        """Return the producer, or if ``alone`` the second one, which puts each message into its own batch."""
        producer = self._producers.get(alone)
        if producer is None or not producer.usable:
            if producer is not None:
                producer.give_up(Retry("the delivery was given up: its event loop has ended"))
            configuration = self._settings.configuration
            if alone:
                configuration = {**configuration, "batch.num.messages": 1}
            producer = KafkaProducer(self._settings.address, configuration, self._timeout)
            self._producers[alone] = producer
        return producer

    def _topic_of(self, delivery: Delivery) -> str:
        if self._fixed is not None:
            return self._fixed
        about = (delivery.aggregate_type, delivery.event_type)
        if self._few and (known := self._topics.get(about)):
            return known
        topic = self._topic(delivery)
        if not _TOPIC.fullmatch(topic):
            raise Reject(f"topic {topic!r}: {ALLOWED}")
        if self._few and len(self._topics) < REMEMBERED:
            self._topics[about] = topic
        return topic

    def _refused(self, error: KafkaError, topic: str) -> Retry | Reject | Unavailable:
        if error.code() in TOO_LARGE:
            limit = f"max_message = {self._settings.max_message} bytes"
            return Reject(f"the message is over {limit}; raise it, and the broker's limit with it")
        return classify(error, topic)


def _headers(message: Envelope) -> Headers:
    """Return the headers; a text with a NUL becomes bytes, because the client cuts texts at a NUL."""
    # The client crashes on a name that is not valid UTF-8; ``encode`` raises on such a name.
    if b"\0" in "".join(message.headers).encode():
        raise ValueError("the name of a header holds a NUL")
    headers: Headers = {**message.headers}
    if "\0" in "".join(message.headers.values()):
        headers = {name: value.encode() for name, value in message.headers.items()}
    headers["content-type"] = message.content_type
    return headers


class Run:
    """The state of one send: messages that are ready, the number in progress, and the answers."""

    def __init__(self, deliveries: Sequence[Delivery], progress: Progress) -> None:
        self.deliveries = deliveries
        self.progress = progress
        self.answers: list[Answer] = [RELEASED] * len(deliveries)
        heads, self._following = runs(deliveries)
        self.ready = deque(heads)
        self.alone: set[int] = set()
        self.under_way = 0
        self.over = False
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait until a message is ready, or none is in progress."""
        self._changed.clear()
        if self.under_way and not self.ready:
            await self._changed.wait()

    def answer(self, at: int, answer: Answer) -> None:
        """Record an answer; if the delivery arrived, the next of its key is ready."""
        self.answers[at] = answer
        self.progress.report(self.deliveries[at], answer)
        if answer is DELIVERED and at in self._following:
            self.ready.append(self._following[at])

    def landed(self, at: int, answer: Answer) -> None:
        """Record the answer of a message in progress."""
        if not self.over:
            self._ended()
            self.answer(at, answer)

    def once_more(self, at: int) -> None:
        """Send the message again in a batch of its own, because its batch was refused."""
        if not self.over:
            self.alone.add(at)
            self.ready.append(at)
            self._ended()

    def _ended(self) -> None:
        self.under_way -= 1
        # The send wakes in the next turn of the loop, when all reports of this moment are in.
        self._changed.set()


class Sent:
    """A message in progress; the producer calls it with the delivery report."""

    __slots__ = ("_alone", "_at", "_run", "_topic", "end", "producer")

    producer: KafkaProducer
    end: float

    def __init__(self, run: Run, at: int, topic: str, alone: bool) -> None:
        self._run = run
        self._at = at
        self._topic = topic
        self._alone = alone

    def __call__(self, error: KafkaError | None, message: object) -> None:
        """Queue the delivery report."""
        self.producer.reports.append((self, error))

    def refused(self, error: KafkaError) -> None:
        """Retry alone if the whole batch was refused for it, else record the answer."""
        if error.code() in OF_A_BATCH and not self._alone:
            self._run.once_more(self._at)
        else:
            self._run.landed(self._at, classify(error, self._topic))

    def landed(self, answer: Answer) -> None:
        """Record the answer of a message that arrived, or of one with an unknown fate."""
        self._run.landed(self._at, answer)
