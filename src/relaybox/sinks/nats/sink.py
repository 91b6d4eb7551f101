"""Publish to NATS JetStream; ``Nats-Msg-Id`` is the event's id, by which a stream drops duplicates."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
from msgspec import DecodeError, Struct, json

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Retry, Throttled, Unavailable
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError
from relaybox.sinks.broker import (
    TLS_OPTIONS,
    Address,
    Messages,
    Shared,
    Template,
    deduplicated_by,
    explain,
    flag,
    parse_address,
    text,
    tls_context,
    unreachable,
)
from relaybox.sinks.deadline import Deadline, no_answer
from relaybox.sinks.nats.connection import Broken, Connection, Refused
from relaybox.sinks.sink import OneByOne, being_cancelled
from relaybox.wire.envelope import Envelope
from relaybox.wire.tracing import NAMES

PORT = 4222
DEFAULT_SUBJECT = "{aggregate_type}.{event_type}"
LONGEST_SUBJECT = 3_000
"""Bytes; a server closes a connection after a line over 4,096 bytes, and the subject is part of it."""
LOOK_SECONDS = 2.0
"""Seconds to wait for a stored message: a server does not answer a client that may not read it."""

OPTIONS = {"stream": text, "tls": flag, "tls_first": flag, "creds": text, **TLS_OPTIONS}
_SIZE_EXCEEDED, _HEADER_EXCEEDED, _EXPECTED_STREAM = 10054, 10097, 10060
_BAD_IN_SUBJECT = re.compile(r"[\s*>\x00-\x1f\x7f]|^\.|\.\.|\.$|^$")
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_OURS = frozenset(("event-id", "event-type", "aggregate-type", "aggregate-id", *NAMES))


class NatsSink(OneByOne):
    """Publishes to JetStream; raises ``ConfigError`` if the URL, an option or a file is wrong."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination.concurrency)
        address = parse_address(destination, PORT, OPTIONS)
        # A user without a password is a token, and therefore a secret.
        self._address = address._replace(password=address.password or address.user)
        self._where = address.where
        self._subject = Subjects(address.path or DEFAULT_SUBJECT, destination)
        self._stream: str | None = address.options.get("stream")
        self._messages = Messages(destination)
        self._timeout = destination.timeout
        self._deadline = Deadline(destination.timeout)
        self._settings, self._encrypted = _settings(address, destination)
        self._shared = Shared(self._open)

    async def deliver(self, delivery: Delivery) -> None:
        """Publish the delivery, and return once a stream has it, now or from an earlier attempt."""
        subject = self._subject(delivery)
        message = self._messages(delivery)
        headers = self._headers(delivery, message)
        try:
            with self._deadline():
                connection = await self._shared.get()
                _check_size(connection.client.max_payload, headers, message.body)
                ack = await self._publish(connection, subject, message.body, headers)
                if ack.duplicate and await self._is_elsewhere(connection, ack, subject):
                    headers["Nats-Msg-Id"] = str(delivery.id)
                    await self._publish(connection, subject, message.body, headers)
        except TimeoutError:
            raise Unavailable(
                f"no acknowledgement from {self._where} of {subject!r} within {self._timeout:g}s"
            ) from None
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise Retry(f"{subject!r} was given up: the sink is closed") from None
        except (OSError, nats.errors.Error, Broken, Refused) as error:
            raise self._explained(error) from None

    async def check(self) -> None:
        """Reach the server and find the stream; raise ``Unavailable`` with the reason."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._check_stream(await self._shared.get())
        except TimeoutError:
            raise no_answer(self._where, self._timeout) from None
        except (OSError, nats.errors.Error, Broken, Refused) as error:
            raise self._explained(error) from None

    async def close(self) -> None:
        """Close the connection."""
        await self._shared.close()

    async def _open(self, old: Connection | None) -> Connection:
        # Close the old one first: its unsent messages must not be sent beside the new one.
        if old is not None:
            await old.close()
        connection = Connection()
        async with asyncio.timeout(self._timeout):
            await connection.open(self._settings, encrypted=self._encrypted)
        return connection

    def _headers(self, delivery: Delivery, message: Envelope) -> dict[str, str]:
        for name, value in message.headers.items():
            if name not in _OURS and (not _HEADER_NAME.fullmatch(name) or name[:5].lower() == "nats-"):
                raise Reject(f"NATS takes no header {name!r} of an event; give it another name")
            if "\n" in value or "\r" in value:
                raise Reject(f"the header {name!r} has a line break, which NATS does not take")
        headers = {
            **message.headers,
            "content-type": message.content_type,
            "Nats-Msg-Id": deduplicated_by(message, delivery),
        }
        if self._stream is not None:
            headers["Nats-Expected-Stream"] = self._stream
        return headers

    async def _publish(
        self, connection: Connection, subject: str, body: bytes, headers: dict[str, str]
    ) -> _Ack:
        """Publish, and return the stream's acknowledgement that it has the message, now or already."""
        answer = await connection.publish(subject, body, headers)
        if not answer.data and answer.headers:
            fix = "create a stream that has it among its subjects"
            raise Unavailable(f"no stream of {self._where} takes the subject {subject!r}: {fix}")
        try:
            ack = _decode(answer.data)
        except DecodeError:
            ack = _Ack()
        if ack.error is not None:
            raise await self._refused(connection, ack, ack.error)
        if not ack.stream:
            raise Unavailable(f"what answers the subject {subject!r} on {self._where} is not a stream")
        return ack

    async def _is_elsewhere(self, connection: Connection, ack: _Ack, subject: str) -> bool:
        """True if the duplicate is another destination's message, under another subject of this stream."""
        manager = connection.client.jsm(timeout=min(LOOK_SECONDS, self._timeout / 2))
        try:
            return (await manager.get_msg(ack.stream, ack.seq)).subject != subject
        except Exception:
            # The client may lack permission, or the message is consumed and gone: trust the stream then.
            return False

    async def _refused(
        self, connection: Connection, ack: _Ack, error: Mapping[str, Any]
    ) -> Retry | Reject | Unavailable:
        code, description = error.get("err_code", 0), str(error.get("description", ""))
        reason = f"{self._where} refuses it: {description} ({code})"
        if code == _HEADER_EXCEEDED:
            return Reject(reason)
        if code == _SIZE_EXCEEDED:
            return Reject(f"{reason}{await _limit_of(connection, ack.stream)}")
        if code == _EXPECTED_STREAM:
            return Unavailable(f"{reason}: the subject is not one of the stream {self._stream!r}")
        if "exceeded" in description or "insufficient resources" in description:
            return Throttled(reason)
        return Unavailable(reason) if error.get("code") == 503 else Retry(reason)

    async def _check_stream(self, connection: Connection) -> None:
        manager = connection.client.jsm(timeout=self._timeout)
        try:
            if self._stream is not None:
                await manager.stream_info(self._stream)
            elif self._subject.fixed is not None:
                await manager.find_stream_name_by_subject(self._subject.fixed)
            else:
                await manager.account_info()
        except nats.js.errors.NotFoundError:
            missing = f"stream {self._stream!r}" if self._stream else f"stream for {self._subject.written!r}"
            raise Unavailable(f"{self._where} has no {missing}; create it") from None
        except nats.js.errors.ServiceUnavailableError:
            raise Unavailable(f"JetStream is not enabled on {self._where}") from None

    def _explained(self, error: Exception) -> Unavailable:
        reason = explain(error)
        match error:
            case Broken() | Refused():
                return Unavailable(f"{self._where}: {error}")
            case nats.errors.Error():
                if "authoriz" in reason.lower() or "authent" in reason.lower():
                    return Unavailable(f"{self._where} refuses the credentials: {reason}")
                return Unavailable(f"{self._where}: {reason}")
        return unreachable(error, self._where, reason)


class Subjects:
    """Makes the subjects of events from the template in the URL."""

    def __init__(self, written: str, destination: Destination) -> None:
        self.written = written
        self._template = Template(written, destination, "subject")
        self.fixed = self._template.fixed
        self._last: str | None = None
        if _BAD_IN_SUBJECT.search(re.sub(r"\{[^{}]*\}", "x", written)):
            fix = "leave out white space, wildcards and empty parts, as in {aggregate_type}.{event_type}"
            raise ConfigError(f"destination {destination.name!r}: the subject {written!r}: {fix}")

    def __call__(self, delivery: Delivery) -> str:
        """Return the subject of one event; raise ``Reject`` if NATS does not accept it."""
        subject = self._template(delivery)
        if subject == self._last:
            return subject
        if _BAD_IN_SUBJECT.search(subject):
            raise Reject(f"{subject!r} is not a subject: it has white space, a wildcard or an empty part")
        if subject[0] == "$" and self.written[0] != "$":
            raise Reject(f"the subject {subject!r} begins with $, which is reserved for the server")
        if len(subject.encode()) > LONGEST_SUBJECT:
            raise Reject(f"a subject of {len(subject.encode())} bytes: the limit is {LONGEST_SUBJECT}")
        self._last = subject
        return subject


class _Ack(Struct, gc=False):
    error: dict[str, Any] | None = None
    stream: str = ""
    seq: int = 0
    duplicate: bool = False


_decode = json.Decoder(_Ack).decode


def _check_size(limit: int, headers: dict[str, str], body: bytes) -> None:
    """Raise ``Reject`` if the message is too large: a server counts headers too, and would disconnect."""
    letters = len("".join(headers)) + len("".join(headers.values()))
    if len(body) + 12 + 4 * (letters + len(headers)) <= limit:
        return
    size = len(body) + 12 + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())
    if size > limit:
        raise Reject(f"the message has {size} bytes with its headers; the server's max_payload is {limit}")


async def _limit_of(connection: Connection, stream: str) -> str:
    try:
        size = (await connection.client.jsm().stream_info(stream)).config.max_msg_size
    except Exception:
        # The client may lack permission; the reason is clear without the number.
        return ""
    return f"; max_msg_size of the stream {stream!r} is {size}"


def _settings(address: Address, destination: Destination) -> tuple[dict[str, Any], bool]:
    options = address.options
    settings: dict[str, Any] = {
        "servers": [f"nats://{netloc}" for netloc in address.netlocs],
        # A host that does not answer must not use up the time of the others.
        "connect_timeout": destination.timeout / len(address.hosts),
        "name": f"relaybox {destination.name}",
    }
    if address.user and address.password:
        settings |= {"user": address.user, "password": address.password}
    elif address.user or address.password:
        settings["token"] = address.user or address.password
    if "creds" in options:
        settings["user_credentials"] = _creds(options["creds"], destination)
    encrypted = any(options.get(name) for name in ("tls", "tls_first", *TLS_OPTIONS))
    if encrypted:
        settings["tls"] = tls_context(options, destination)
        settings["tls_handshake_first"] = options.get("tls_first", False)
    return settings, encrypted


def _creds(file: str, destination: Destination) -> str:
    setting = f"destination {destination.name!r}: creds = {file!r}"
    if find_spec("nkeys") is None:
        raise ConfigError(f"{setting} needs a package that is not installed: pip install 'nats-py[nkeys]'")
    if not Path(file).is_file():
        raise ConfigError(f"{setting}: there is no such file")
    return file
