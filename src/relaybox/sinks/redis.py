"""Send pipelines of XADD to Redis Streams; after a broken connection a stream may hold an event twice."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC
from typing import Any, NamedTuple

from redis import exceptions
from redis.asyncio import Connection, SSLConnection

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.core.values import Parse, mask_url
from relaybox.errors import ConfigError
from relaybox.sinks.broker import (
    TLS_OPTIONS,
    Address,
    Messages,
    Template,
    count,
    explain,
    flag,
    parse_address,
    text,
    tls_context,
)
from relaybox.sinks.deadline import Deadline, no_answer
from relaybox.sinks.sink import DELIVERED, Answer, InBatches, being_cancelled, try_each

PORT = 6379
DEFAULT_STREAM = "{aggregate_type}-events"
BATCH = 200
CONNECTIONS = 4
"""More connections do not speed up a server that runs one command at a time."""
LARGEST_VALUE = 512 * 1024 * 1024
"""Bytes; the default of ``proto-max-bulk-len``, for servers that do not report theirs."""

OPTIONS: dict[str, Parse[Any]] = {"stream": text, "maxlen": count, "approximate": flag}


class Command(NamedTuple):
    """A packed XADD command: packing it with redis-py takes most of the time of a send."""

    stream: str
    packed: bytes


_SERVERS_TROUBLE = (
    exceptions.ReadOnlyError,
    exceptions.NoPermissionError,
    exceptions.ClusterDownError,
    exceptions.AskError,
    exceptions.TryAgainError,
)
_CODES_OF_TROUBLE = ("WRONGTYPE", "MISCONF", "NOREPLICAS", "BUSY", "unknown command")


class RedisSink(InBatches):
    """Adds deliveries to streams; raises ``ConfigError`` if the URL, an option or a TLS file is wrong."""

    def __init__(self, destination: Destination) -> None:
        super().__init__(min(destination.concurrency, CONNECTIONS), BATCH)
        encrypted = destination.scheme == "rediss"
        known = {**OPTIONS, **(TLS_OPTIONS if encrypted else {})}
        self._address = parse_address(destination, PORT, known, one_host=True)
        options = self._address.options
        self._open = _opener(self._address, destination, encrypted=encrypted)
        self._where = self._address.where
        stream = options.get("stream")
        self._stream = Template(stream or DEFAULT_STREAM, destination, "stream", lower=stream is None)
        trim = [*_trim(options, destination), b"*"]
        self._between = b"".join(map(_bulk, trim))
        self._words = 4 + len(trim)
        self._messages = Messages(destination)
        self._timeout = destination.timeout
        self._deadline = Deadline(destination.timeout)
        self._idle: list[Connection] = []
        self._writers: dict[Connection, asyncio.StreamWriter | None] = {}
        self._limit = LARGEST_VALUE

    def limit(self, concurrency: int) -> None:
        """Set how many pipelines may be in progress at once, at most four."""
        super().limit(min(concurrency, CONNECTIONS))

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[Answer]:
        """Send all commands in one pipeline; each delivery gets the answer of its command."""
        answers: dict[int, Answer] = {}
        try:
            with self._deadline():
                async with self._lent() as connection:
                    await self._ask(connection, try_each(deliveries, self.command, answers), answers)
        except (OSError, exceptions.RedisError, Unavailable) as error:
            otherwise: Answer = self._explained(error)
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            otherwise = Retry(f"{self._where} was given up: the sink is closed")
        else:
            return [answers[at] for at in range(len(deliveries))]
        return [answers.get(at, otherwise) for at in range(len(deliveries))]

    async def check(self) -> None:
        """Ping the server; raise ``Unavailable`` with the reason."""
        try:
            async with asyncio.timeout(self._timeout), self._lent() as connection:
                await connection.send_command("PING", check_health=False)
                await connection.read_response()
        except (OSError, exceptions.RedisError, Unavailable) as error:
            raise self._explained(error) from None

    async def close(self) -> None:
        """Close all connections, including those that wait for an answer."""
        self._idle.clear()
        for connection in list(self._writers):
            self._drop(connection)
        # asyncio closes a socket in the next turn of the loop.
        await asyncio.sleep(0)

    def command(self, delivery: Delivery) -> Command:
        """Return the XADD of a delivery; raise ``Reject`` if it is too large for the server."""
        message = self._messages(delivery)
        if len(message.body) > self._limit:
            raise Reject(f"the body has {len(message.body)} bytes; proto-max-bulk-len is {self._limit}")
        fields = message.headers
        fields["content-type"] = message.content_type
        fields["timestamp"] = delivery.created_at.astimezone(UTC).isoformat().replace("+00:00", "Z")
        # ``data`` is always the last field, even if the event has a header of that name.
        fields.pop("data", None)
        stream = self._stream(delivery)
        begin = b"*%d\r\n$4\r\nXADD\r\n%b%b" % (
            self._words + 2 * len(fields),
            _bulk(stream.encode()),
            self._between,
        )
        pairs = [_name(name) + _bulk(value.encode()) for name, value in fields.items()]
        return Command(stream, b"".join((begin, *pairs, _DATA, _bulk(message.body))))

    async def _ask(
        self, connection: Connection, commands: Mapping[int, Command], answers: dict[int, Answer]
    ) -> None:
        packed = [command.packed for command in commands.values()]
        await connection.send_packed_command(packed, check_health=False)
        for at, command in commands.items():
            try:
                await connection.read_response()
            except exceptions.ResponseError as error:
                answers[at] = self._refused(error, command)
            else:
                answers[at] = DELIVERED

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[Connection]:
        connection = await self._take()
        try:
            yield connection
        except BaseException:
            # Answers may still arrive on it that nobody waits for.
            self._drop(connection)
            raise
        self._idle.append(connection)

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if _is_open(connection):
                return connection
            self._drop(connection)
        connection = self._open()
        self._writers[connection] = None
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            self._writers[connection] = _writer_of(connection)
            self._limit = await _largest_value(connection)
        except BaseException as error:
            self._drop(connection)
            if isinstance(error, exceptions.ConnectionError):
                raise self._explained(error, connecting=True) from None
            raise
        return connection

    def _drop(self, connection: Connection) -> None:
        """Close a connection at once and discard what it has not sent yet."""
        # After an error redis-py drops its reference to the writer, but lets it send the rest: use ours.
        writer = self._writers.pop(connection, None) or _writer_of(connection)
        _forget_streams(connection)
        if writer is not None:
            writer.transport.abort()

    def _refused(self, error: exceptions.ResponseError, command: Command) -> Answer:
        reason = f"{self._where} refuses it for the stream {command.stream!r}: {explain(error)}"
        if isinstance(error, exceptions.OutOfMemoryError):
            return Throttled(reason)
        if isinstance(error, _SERVERS_TROUBLE) or str(error).startswith(_CODES_OF_TROUBLE):
            return Unavailable(reason)
        return Retry(reason)

    def _explained(self, error: Exception, *, connecting: bool = False) -> Unavailable:
        reason = explain(error)
        match error:
            case Unavailable():
                return error
            case TimeoutError():
                return no_answer(self._where, self._timeout)
            case exceptions.AuthenticationError() | exceptions.AuthorizationError():
                return Unavailable(f"{self._where} refuses the credentials: {reason}")
            case exceptions.ConnectionError() if "max number of clients" in reason:
                return Throttled(f"{self._where}: {reason}")
            case exceptions.BusyLoadingError():
                return Unavailable(f"{self._where} is starting: {reason}")
            case exceptions.ConnectionError() if connecting:
                return Unreachable(f"cannot connect to {self._where}: {reason}")
        return Unavailable(f"{self._where}: {reason}")


# Private attributes of redis-py, tested with 8.1.0: nothing public shows that the server closed a connection,
# or aborts one. See tests/unit/test_private_attributes.py if they change.


def _is_open(connection: Connection) -> bool:
    return connection._reader is not None and not connection._reader.at_eof()


def _writer_of(connection: Connection) -> asyncio.StreamWriter | None:
    return connection._writer


def _forget_streams(connection: Connection) -> None:
    connection._writer = connection._reader = None


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


@functools.lru_cache(maxsize=1000)
def _name(name: str) -> bytes:
    return _bulk(name.encode())


_DATA = _name("data")


async def _largest_value(connection: Connection) -> int:
    """Return the server's ``proto-max-bulk-len``; the server closes a connection that sends more."""
    try:
        await connection.send_command("CONFIG", "GET", "proto-max-bulk-len", check_health=False)
        answer: list[bytes] = await connection.read_response()
    except exceptions.ResponseError:
        return LARGEST_VALUE
    return int(answer[1]) if len(answer) == 2 else LARGEST_VALUE


def _opener(address: Address, destination: Destination, *, encrypted: bool) -> Callable[[], Connection]:
    if address.path and not re.fullmatch(r"[0-9]{1,9}", address.path, re.ASCII):
        setting = f"destination {destination.name!r}: sink = {mask_url(destination.sink)!r}"
        raise ConfigError(f"{setting}: the path is the database's number, as in redis://host:6379/0")
    [(host, port)] = address.hosts
    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "db": int(address.path or 0),
        "username": address.user,
        "password": address.password,
        # The destination's timeout limits these.
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "protocol": 2,
    }
    if not encrypted:
        return functools.partial(Connection, **settings)
    files = {name: address.options.get(name) for name in TLS_OPTIONS}
    tls_context(address.options, destination)
    settings |= {"ssl_ca_certs": files["ca"], "ssl_check_hostname": True}
    settings |= {"ssl_certfile": files["certificate"], "ssl_keyfile": files["key"]}
    return functools.partial(SSLConnection, **settings)


def _trim(options: Mapping[str, Any], destination: Destination) -> list[bytes]:
    if "maxlen" in options:
        return [b"MAXLEN", b"~" if options.get("approximate", True) else b"=", b"%d" % options["maxlen"]]
    if "approximate" in options:
        raise ConfigError(f"destination {destination.name!r}: approximate is of no use without maxlen")
    return []
