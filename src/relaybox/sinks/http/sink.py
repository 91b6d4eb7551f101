"""Send webhooks: each delivery is a signed POST to a receiver that is not trusted.

Only addresses that ``sinks.http.address`` allows are used. ``timeout`` covers everything from the DNS query
to the last byte, and only the beginning of an answer is read. Redirects, cookies and proxies of the
environment are not used. The status decides, even if the rest of the answer never arrives.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
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
from relaybox.core.scrub import conceal
from relaybox.core.settings import Destination
from relaybox.core.values import is_reference, mask_url
from relaybox.errors import ConfigError
from relaybox.sinks.broker import reveal
from relaybox.sinks.deadline import Deadline, no_answer
from relaybox.sinks.http.address import Guard, Lookup, Resolver, shown
from relaybox.sinks.http.exchange import Exchange, release
from relaybox.sinks.http.limits import AnswerTooLong
from relaybox.sinks.http.status import classify, phrase_of, retry_after
from relaybox.sinks.sink import OneByOne, being_cancelled, clean
from relaybox.wire.envelope import packer
from relaybox.wire.signature import ID, SIGNATURE, TIMESTAMP, Key, parse_keys, sign

_EXCERPT = 4096
LONG_PART = 16
"""Characters: so long a part of a URL's path may be a secret, and is hidden where it is echoed."""
_ERRORS = (aiohttp.ClientError, HttpProcessingError, OSError, ValueError, asyncio.CancelledError)


class Credentials(NamedTuple):
    """The secrets of a destination, as last read."""

    keys: tuple[Key, ...]
    headers: dict[str, str]


class HttpSink(OneByOne):
    """Posts deliveries to a URL; secrets are read again after a 401, so a new one needs no restart."""

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
        """Post the delivery, and return if the answer is 2xx."""
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
            # Once a status arrived it is the answer, even if the rest was lost.
            if answer is None:
                raise _explained(error, self._url, self._destination.timeout) from None
        if answer is not None and answer.status // 100 != 2:
            await self._fail(answer)

    async def check(self) -> None:
        """Connect without sending anything; raise ``Unavailable`` or ``Retry`` with the reason."""
        try:
            with self._deadline():
                self._guard.check_host(self._url.raw_host or "")
                release(await self._open().connect())
        except _ERRORS as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            raise _explained(error, self._url, self._destination.timeout) from None

    async def close(self) -> None:
        """Close the connections."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            await exchange.close()

    def _request(self, delivery: Delivery) -> tuple[bytes, bytes]:
        body, content_type, sent = self._pack(delivery)
        message_id, timestamp = str(delivery.event_id), int(self._now())
        credentials = self._credentials
        # No value holds a line break: each was made here, or checked when it was accepted.
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
        if answer.status == HTTPStatus.UNAUTHORIZED:
            # The file may be in the middle of being replaced: keep the old secrets then.
            with suppress(ConfigError):
                self._credentials = await asyncio.to_thread(read_credentials, self._destination, self._given)
        raise classify(answer.status, answer.reason(), retry_after(answer.retry_after, self._now()))


class Answered:
    """The answer of a receiver: its status, and the part of the body that is worth showing."""

    def __init__(self, message: RawResponseMessage) -> None:
        self.status = message.code
        self.retry_after = message.headers.get("Retry-After")
        self._phrase = message.reason or phrase_of(message.code)
        self._readable = message.headers.get("Content-Encoding", "identity").lower() == "identity"
        self._body = b""

    async def read(self, content: StreamReader) -> None:
        """Read the part that is shown, and wait for the rest, so that the connection can be used again."""
        while self.status // 100 != 2 and len(self._body) < _EXCERPT:
            chunk = await content.read(_EXCERPT - len(self._body))
            if not chunk:
                return
            self._body += chunk
        if (error := content.exception()) is not None:
            raise error
        await content.wait_eof()

    def reason(self) -> str:
        """Return ``503 Service Unavailable: the beginning of the body``, without secrets."""
        text = self._body.decode("utf-8", "replace") if self._readable else ""
        status = clean(f"{self.status} {self._phrase}")
        if self.status // 100 == 3:
            return f"{status}: redirects are not followed; write the new address into the sink's URL"
        excerpt = clean(text)
        return f"{status}: {excerpt}" if excerpt else status


def _lines(headers: Mapping[str, str]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


def _explained(error: BaseException, url: URL, timeout: float) -> Retry | Unavailable:
    """Return the answer for an exception of a request, showing neither the URL nor secrets."""
    where = f"{shown(url.raw_host or '')}:{url.port}"
    match error:
        case asyncio.CancelledError():
            return Retry(f"the request to {where} was given up: the sink is closed")
        case TimeoutError():
            return no_answer(where, timeout)
        case aiohttp.ClientConnectorError():
            return not_connected(error, where)
        case AnswerTooLong():
            return Unavailable(f"{where} sends an answer without end: {error}")
        case HttpProcessingError():
            return Retry(f"{where} does not answer in HTTP: {said_before_quote(error.message)}")
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError() | aiohttp.ClientOSError():
            return Retry(f"{where} closed the connection before its answer was complete")
    return Retry(f"the request to {where} failed: {type(error).__name__}")


def said_before_quote(message: str) -> str:
    """Return what aiohttp says of an answer, without the part of the answer that it quotes and cuts."""
    return clean(message.partition(":")[0])


def not_connected(error: aiohttp.ClientError, where: str) -> Unreachable:
    """Return why connecting to ``where`` failed."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            return Unreachable(f"DNS knows no address of {where}: {_cause(error)}")
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            return Unreachable(f"TLS with {where} failed: {_cause(error)}")
    return Unreachable(f"cannot connect to {where}: {_cause(error)}")


def _cause(error: BaseException) -> str:
    inner = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    text = getattr(inner, "strerror", None) or str(inner)
    number = getattr(inner, "errno", None)
    if text.startswith("Connect call failed") and number:
        # asyncio's text only repeats the address; the errno says what happened.
        text = os.strerror(number)
    return clean(text)


def parse_url(destination: Destination) -> URL:
    """Return the URL of the destination's sink; raise ``ConfigError`` if it is not valid."""
    setting = f"destination {destination.name!r}: sink"
    try:
        url = URL(destination.url)
        host, port = url.raw_host, url.port
    except ValueError:
        # Not chained: its message shows the URL with the password.
        raise ConfigError(f"{setting} = {mask_url(destination.sink)!r} is not a valid URL") from None
    if not host or not port:
        raise ConfigError(f"{setting} = {mask_url(destination.sink)!r} names no host")
    if url.raw_user is not None and destination.auth is not None:
        raise ConfigError(f"{setting} holds a user, and auth is set too; keep one of them")
    return url


def read_credentials(destination: Destination, url: URL) -> Credentials:
    """Read the secrets; raise ``ConfigError`` if one is missing or malformed."""
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
    # A receiver may echo what it was sent.
    conceal(headers.get("authorization", "").partition(" ")[2], url.password or "")
    conceal(url.raw_query_string, url.query_string, *url.query.values())
    # The path of some webhooks is their secret.
    conceal(*(part for part in url.parts if len(part) >= LONG_PART))
    if is_reference(destination.sink):
        conceal(url.raw_path, url.path)
    return Credentials(_keys(destination, signing), headers)


def _keys(destination: Destination, secret: str) -> tuple[Key, ...]:
    where = f"destination {destination.name!r}: secret"
    try:
        keys = parse_keys(secret) if secret else ()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if any(key.sign is None for key in keys):
        raise ConfigError(f"{where} holds a public key, which receivers verify with; write the private one")
    return keys
