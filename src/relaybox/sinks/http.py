"""Webhooks: each delivery is a signed POST.

A receiver is not trusted: it is connected to only at an address that ``relaybox.sinks.address`` lets pass,
has ``timeout`` for everything from the first DNS query to the last byte of its answer, and of that answer no
more than a little is read. Redirects are not followed, cookies not kept, proxies of the environment not used.

The status decides, also where the rest of the answer never comes: a receiver that said 200 has the event.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import time
from collections.abc import Callable, Iterable
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from importlib.metadata import version

from relaybox.config import Destination
from relaybox.envelope import packer
from relaybox.errors import ConfigError, MissingExtra
from relaybox.event import Delivery
from relaybox.outcome import Retry, Unavailable, Unreachable
from relaybox.signature import ID, SIGNATURE, TIMESTAMP, sign
from relaybox.sink import OneByOne, being_cancelled

try:
    import aiohttp
    from yarl import URL
except ImportError:
    raise MissingExtra("aiohttp", "http") from None

from relaybox.sinks.address import Guard, Lookup, Resolver, shown
from relaybox.sinks.credentials import parse_url, read_credentials
from relaybox.sinks.deadline import Deadline
from relaybox.sinks.status import classify, phrase_of

LONGEST_RETRY_AFTER = 3600.0
"""Seconds: a receiver that asks for more is asked again after this."""

_ANSWER_LIMIT = 65_536
_EXCERPT = 200
# Many servers close an idle connection after 5 s, and a request sent in that moment is lost.
_KEEPALIVE = 4.0
# Above this aiohttp wants a file, which it sends in pieces.
_LARGE = 2**20


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
        self._user_agent = f"relaybox/{version('relaybox')}"
        self._deadline = Deadline(destination.timeout)
        self._session: aiohttp.ClientSession | None = None

    async def deliver(self, delivery: Delivery) -> None:
        """Post it; returns where the answer is 2xx."""
        body, headers = self._request(delivery)
        acknowledged, answer = False, None
        try:
            with self._deadline():
                self._guard.check_host(self._url.raw_host or "")
                post = self._open().post(self._url, data=body, headers=headers, allow_redirects=False)
                # Not ``async with post``, which wraps what the response does by itself.
                async with await post as response:
                    acknowledged = response.status // 100 == 2
                    if not (acknowledged and response.content.is_eof()):
                        answer = Answered(response)
                        await answer.read(response)
        except (aiohttp.ClientError, OSError, ValueError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            # A status that came is the answer, whatever became of the rest.
            if not acknowledged and answer is None:
                raise _explained(error, self._url, self._destination.timeout) from None
        if answer is not None and not acknowledged:
            await self._fail(answer)

    async def close(self) -> None:
        """Give up the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _request(self, delivery: Delivery) -> tuple[bytes | io.BytesIO, dict[str, str]]:
        body, content_type, sent = self._pack(delivery)
        message_id = str(delivery.event_id)
        timestamp = int(self._now())
        headers = {
            **sent,
            **self._credentials.headers,
            "content-type": content_type,
            ID: message_id,
            TIMESTAMP: str(timestamp),
        }
        if keys := self._credentials.keys:
            headers[SIGNATURE] = sign(keys, message_id, timestamp, body)
        return io.BytesIO(body) if len(body) > _LARGE else body, headers

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._destination.concurrency,
                keepalive_timeout=_KEEPALIVE,
                resolver=Resolver(self._guard, self._lookup),
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                auto_decompress=False,
                trust_env=False,
                headers={"user-agent": self._user_agent, "accept-encoding": "identity"},
            )
        return self._session

    async def _fail(self, answer: Answered) -> None:
        # Before anything is read again: what was just sent is what may be echoed.
        reason = answer.reason(self._credentials.texts)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            await self._read_credentials_again()
        raise classify(answer.status, reason, retry_after(answer.retry_after, self._now()))

    async def _read_credentials_again(self) -> None:
        try:
            self._credentials = await asyncio.to_thread(read_credentials, self._destination, self._given)
        except ConfigError:
            # A file that is just being replaced: what was read before is the best there is.
            return


class Answered:
    """What a receiver answered: the status, and of the body what is worth showing."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.retry_after = response.headers.get("Retry-After")
        self._phrase = response.reason or phrase_of(response.status)
        self._readable = response.headers.get("Content-Encoding", "identity").lower() == "identity"
        self._body = b""

    async def read(self, response: aiohttp.ClientResponse) -> None:
        """Take in the body up to a limit; beyond that the connection is closed and not used again."""
        while len(self._body) < _ANSWER_LIMIT:
            chunk = await response.content.read(_ANSWER_LIMIT - len(self._body))
            if not chunk:
                return
            self._body += chunk
            if response.content.at_eof():
                return
        response.close()

    def reason(self, secrets: Iterable[str]) -> str:
        """``503 Service Unavailable: the beginning of the body``, without what is secret."""
        text = self._body.decode("utf-8", "replace") if self._readable else ""
        status = clean(f"{self.status} {self._phrase}", secrets)
        if self.status // 100 == 3:
            return f"{status}: redirects are not followed; write the new address into the sink's URL"
        excerpt = clean(text, secrets)
        return f"{status}: {excerpt}" if excerpt else status


def retry_after(value: str | None, now: float) -> float | None:
    """The seconds that a ``Retry-After`` asks for (a number or a date), no more than an hour."""
    text = (value or "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        seconds = float(text)
    elif text.isascii() and text.isdigit():
        seconds = LONGEST_RETRY_AFTER
    else:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now
        except Exception:
            # The parser's errors are of many kinds, and a date is no reason to fail.
            return None
    return min(seconds, LONGEST_RETRY_AFTER) if seconds > 0 else None


def clean(text: str, secrets: Iterable[str]) -> str:
    """The beginning of a text from outside, as one line without control characters or secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    # Twice what is shown is enough to look at: white space is folded.
    printable = "".join(c if c.isprintable() else " " for c in text[: 4 * _EXCERPT])
    line = " ".join(printable.split())
    return line if len(line) <= _EXCERPT else f"{line[:_EXCERPT]}…"


def _explained(error: BaseException, url: URL, timeout: float) -> Retry | Unavailable:
    """What a request raised, as an answer that shows neither the URL nor what is secret."""
    where = f"{shown(url.raw_host or '')}:{url.port}"
    match error:
        case asyncio.CancelledError():
            return Retry(f"the request to {where} was given up: the sink is closed")
        case TimeoutError():
            return Unavailable(f"no answer from {where} within {timeout:g}s")
        case aiohttp.ClientConnectorDNSError():
            return Unreachable(f"DNS knows no address of {where}: {_cause(error)}")
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError():
            return Unreachable(f"TLS with {where} failed: {_cause(error)}")
        case aiohttp.ClientConnectorError():
            return Unreachable(f"cannot connect to {where}: {_cause(error)}")
        case aiohttp.ClientResponseError():
            return Retry(f"{where} does not answer in HTTP: {clean(error.message, ())}")
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError() | aiohttp.ClientOSError():
            return Retry(f"{where} closed the connection before its answer was complete")
    return Retry(f"the request to {where} failed: {type(error).__name__}")


def _cause(error: BaseException) -> str:
    inner = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    text = getattr(inner, "strerror", None) or str(inner)
    number = getattr(inner, "errno", None)
    if text.startswith("Connect call failed") and number:
        # asyncio tells which address it was, which is known, in the place of what happened.
        text = os.strerror(number)
    return clean(text, ())
