"""Webhooks: each delivery is a signed POST.

A receiver is not trusted: it is connected to only at an address that ``sinks.http.address`` lets pass,
has ``timeout`` for everything from the first DNS query to the last byte of its answer, and of that answer no
more than a little is read. Redirects are not followed, cookies not kept, proxies of the environment not used.

The status decides, also where the rest of the answer never comes: a receiver that said 200 has the event.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from importlib.metadata import version
from typing import NamedTuple

import aiohttp
from aiohttp.http import HttpProcessingError, RawResponseMessage
from aiohttp.streams import StreamReader
from yarl import URL

from relaybox.core.event import Delivery
from relaybox.core.outcome import Retry, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.core.values import mask_url
from relaybox.errors import ConfigError
from relaybox.sinks.broker import reveal
from relaybox.sinks.deadline import Deadline
from relaybox.sinks.http.address import Guard, Lookup, Resolver, shown
from relaybox.sinks.http.exchange import Exchange, release
from relaybox.sinks.http.status import classify, phrase_of, retry_after
from relaybox.sinks.sink import OneByOne, being_cancelled, clean
from relaybox.wire.envelope import packer
from relaybox.wire.signature import ID, SIGNATURE, TIMESTAMP, Key, parse_keys, sign

_ANSWER_LIMIT = 65_536
_ERRORS = (aiohttp.ClientError, HttpProcessingError, OSError, ValueError, asyncio.CancelledError)


class Credentials(NamedTuple):
    """The secrets of a destination, as they were last read."""

    keys: tuple[Key, ...]
    headers: dict[str, str]
    texts: tuple[str, ...]
    """All that may not appear in a message, though a receiver may echo it."""


class HttpSink(OneByOne):
    """Posts deliveries to the URL of a destination.

    Raises ``ConfigError`` where the URL is malformed, or a secret is missing or malformed. Secrets are read
    again after a 401, so that a new one needs no restart.
    """

    def __init__(
        self, destination: Destination, *, lookup: Lookup | None = None, now: Callable[[], float] = time.time
    ) -> None:
        super().__init__(destination.concurrency)
        self._destination = destination
        self._now = now
        self._given = parse_url(destination)
        self._url = self._given.with_user(None)
        self._pack = packer(destination.format)
        self._credentials = read_credentials(destination, self._given)
        self._guard = Guard(destination.name, destination.allow)
        self._lookup = lookup
        user_agent = f"relaybox/{version('relaybox')}"
        self._own_headers = _lines({"user-agent": user_agent, "accept": "*/*", "accept-encoding": "identity"})
        self._deadline = Deadline(destination.timeout)
        self._exchange: Exchange | None = None

    async def deliver(self, delivery: Delivery) -> None:
        """Post it; returns where the answer is 2xx."""
        headers, body = self._request(delivery)
        answer: Answered | None = None
        try:
            with self._deadline():
                self._guard.check_host(self._url.raw_host or "")
                exchange = self._open()
                connection = await exchange.connect()
                try:
                    message, content = await exchange.ask(connection, headers, body)
                    if message.code // 100 != 2 or not content.is_eof():
                        answer = Answered(message)
                        await answer.read(content)
                except BaseException:
                    connection.close()
                    raise
                release(connection)
        except _ERRORS as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            # A status that came is the answer, whatever became of the rest.
            if answer is None:
                raise _explained(error, self._url, self._destination.timeout) from None
        if answer is not None and answer.status // 100 != 2:
            await self._fail(answer)

    async def check(self) -> None:
        """Connect, and send nothing; raises ``Unavailable`` or ``Retry`` with the reason."""
        try:
            with self._deadline():
                self._guard.check_host(self._url.raw_host or "")
                release(await self._open().connect())
        except _ERRORS as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            raise _explained(error, self._url, self._destination.timeout) from None

    async def close(self) -> None:
        """Give up the connections."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            await exchange.close()

    def _request(self, delivery: Delivery) -> tuple[bytes, bytes]:
        """The headers as lines, and the body."""
        body, content_type, sent = self._pack(delivery)
        message_id, timestamp = str(delivery.event_id), int(self._now())
        credentials = self._credentials
        # No value holds a line break: each was made here, or checked where it was taken in.
        lines = (
            f"{self._own_headers}content-type: {content_type}\r\ncontent-length: {len(body)}\r\n"
            f"{ID}: {message_id}\r\n{TIMESTAMP}: {timestamp}\r\n"
        )
        if credentials.keys:
            lines += f"{SIGNATURE}: {sign(credentials.keys, message_id, timestamp, body)}\r\n"
        if sent or credentials.headers:
            lines += _lines({**sent, **credentials.headers})
        return f"{lines}\r\n".encode(), body

    def _open(self) -> Exchange:
        if self._exchange is None:
            resolver = Resolver(self._guard, self._lookup)
            self._exchange = Exchange(self._url, resolver, limit=self._destination.concurrency)
        return self._exchange

    async def _fail(self, answer: Answered) -> None:
        # Before anything is read again: what was just sent is what may be echoed.
        reason = answer.reason(self._credentials.texts)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            # A file that is just being replaced: what was read before is the best there is.
            with suppress(ConfigError):
                self._credentials = await asyncio.to_thread(read_credentials, self._destination, self._given)
        raise classify(answer.status, reason, retry_after(answer.retry_after, self._now()))


class Answered:
    """What a receiver answered: the status, and of the body what is worth showing."""

    def __init__(self, message: RawResponseMessage) -> None:
        self.status = message.code
        self.retry_after = message.headers.get("Retry-After")
        self._phrase = message.reason or phrase_of(message.code)
        self._readable = message.headers.get("Content-Encoding", "identity").lower() == "identity"
        self._body = b""

    async def read(self, content: StreamReader) -> None:
        """Take in the body up to a limit; a connection with more in it is not used again."""
        while len(self._body) < _ANSWER_LIMIT:
            chunk = await content.read(_ANSWER_LIMIT - len(self._body))
            if not chunk:
                return
            self._body += chunk
            if content.at_eof():
                return

    def reason(self, secrets: Iterable[str]) -> str:
        """``503 Service Unavailable: the beginning of the body``, without what is secret."""
        text = self._body.decode("utf-8", "replace") if self._readable else ""
        status = clean(f"{self.status} {self._phrase}", secrets)
        if self.status // 100 == 3:
            return f"{status}: redirects are not followed; write the new address into the sink's URL"
        excerpt = clean(text, secrets)
        return f"{status}: {excerpt}" if excerpt else status


def _lines(headers: Mapping[str, str]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


def _explained(error: BaseException, url: URL, timeout: float) -> Retry | Unavailable:
    """What a request raised, as an answer that shows neither the URL nor what is secret."""
    where = f"{shown(url.raw_host or '')}:{url.port}"
    match error:
        case asyncio.CancelledError():
            return Retry(f"the request to {where} was given up: the sink is closed")
        case TimeoutError():
            return Unavailable(f"no answer from {where} within {timeout:g}s")
        case aiohttp.ClientConnectorError():
            return not_connected(error, where)
        case HttpProcessingError():
            return Retry(f"{where} does not answer in HTTP: {clean(error.message, ())}")
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError() | aiohttp.ClientOSError():
            return Retry(f"{where} closed the connection before its answer was complete")
    return Retry(f"the request to {where} failed: {type(error).__name__}")


def not_connected(error: aiohttp.ClientError, where: str) -> Unreachable:
    """Say why there is no connection to ``where``."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return Unreachable(f"DNS knows no address of {where}: {_cause(error)}")
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            return Unreachable(f"TLS with {where} failed: {_cause(error)}")
    return Unreachable(f"cannot connect to {where}: {_cause(error)}")


def _cause(error: BaseException) -> str:
    """Why a connection failed, in one line."""
    inner = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    text = getattr(inner, "strerror", None) or str(inner)
    number = getattr(inner, "errno", None)
    if text.startswith("Connect call failed") and number:
        # asyncio tells which address it was, which is known, in the place of what happened.
        text = os.strerror(number)
    return clean(text, ())


def parse_url(destination: Destination) -> URL:
    """The URL of the destination's sink; raises ``ConfigError``."""
    setting = f"destination {destination.name!r}: sink"
    try:
        url = URL(destination.sink)
        host, port = url.raw_host, url.port
    except ValueError:
        # Not chained: its message shows the URL, password and all.
        raise ConfigError(f"{setting} = {mask_url(destination.sink)!r} is not a valid URL") from None
    if not host or not port:
        raise ConfigError(f"{setting} = {mask_url(destination.sink)!r} names no host")
    if url.raw_user is not None and destination.auth is not None:
        raise ConfigError(f"{setting} holds a user, and auth is set too; keep one of them")
    return url


def read_credentials(destination: Destination, url: URL) -> Credentials:
    """The secrets as they are now; raises ``ConfigError`` where one is missing or malformed."""
    signing = reveal(destination, "secret") or ""
    token = reveal(destination, "auth") or ""
    if not re.fullmatch(r"[!-~]*", token):
        raise ConfigError(f"destination {destination.name!r}: auth holds what no header may; write a token")
    headers = {}
    if token:
        headers["authorization"] = f"Bearer {token}"
    elif url.raw_user is not None:
        pair = f"{url.user or ''}:{url.password or ''}"
        headers["authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    texts = _texts(signing, token, headers.get("authorization", ""), url)
    return Credentials(_keys(destination, signing), headers, texts)


def _texts(signing: str, token: str, authorization: str, url: URL) -> tuple[str, ...]:
    secrets = signing.split()
    texts = [*secrets, *(secret.partition("_")[2] for secret in secrets)]
    texts += [token, authorization.partition(" ")[2], url.password or "", url.raw_password or ""]
    texts += [url.raw_query_string, url.query_string, *url.query.values()]
    # The longest first, so that none is left in part; the shortest would hide half of every message.
    return tuple(sorted({text for text in texts if len(text) > 3}, key=len, reverse=True))


def _keys(destination: Destination, secret: str) -> tuple[Key, ...]:
    where = f"destination {destination.name!r}: secret"
    try:
        keys = parse_keys(secret) if secret else ()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if any(key.sign is None for key in keys):
        raise ConfigError(f"{where} holds a public key, which receivers verify with; write the private one")
    return keys
