"""What the URL and the options of a Kafka destination say, as settings of librdkafka."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relaybox.core.settings import Destination
from relaybox.core.values import Duration, Parse, parse_duration, parse_size, wrong
from relaybox.errors import ConfigError
from relaybox.sinks.broker import one_of, parse_address, text

PORT = 9092
LARGEST_MESSAGE = 1_048_588
"""Bytes: what a broker takes unless it is told otherwise."""
BATCH_BYTES = 262_144
SMALLEST, LARGEST = 1000, 1_000_000_000
LINGER = 0.001
LONGEST_LINGER = 60.0
LONGEST_TIMEOUT = 2**31 - 1
"""Milliseconds that librdkafka can count."""
QUEUE = 100_000
"""Messages in the producer, after which a send waits."""
REFRESH = 5.0
"""Seconds after which the producer looks again for a topic that was missing."""


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
    """The address, and how a producer is to be made; raises ``ConfigError`` where they do not fit."""

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
        """The producer is to give up before the sink does: it knows what became of a message."""
        linger = self._options.get("linger", LINGER) * 1000
        before = round((timeout - min(1.0, timeout / 4)) * 1000)
        message = min(max(before, int(linger) + 1), LONGEST_TIMEOUT)
        return {
            "linger.ms": linger,
            "message.timeout.ms": message,
            # A topic that a broker makes when it is first named is not there at once.
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
