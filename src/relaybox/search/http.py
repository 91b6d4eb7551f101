"""Talk HTTP to a search engine: one session for all its hosts.

Redirects, cookies and the environment's proxies are ignored. If the server had closed a reused connection,
the request is sent once more on a new one. Every write of an engine may be repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from importlib.metadata import version
from ssl import SSLContext
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import aiohttp
from msgspec import json
from yarl import URL

from relaybox.core.outcome import Reject, Retry, Unavailable, Unreachable
from relaybox.sinks.deadline import no_answer
from relaybox.sinks.http.address import shown
from relaybox.sinks.http.limits import AnswerTooLong, limit_answers
from relaybox.sinks.http.sink import not_connected, said_before_quote
from relaybox.sinks.http.status import classify, phrase_of, retry_after
from relaybox.sinks.sink import being_cancelled, clean

T = TypeVar("T")
Params: TypeAlias = Mapping[str, str] | None

JSON = "application/json"
LARGEST_ANSWER = 256 * 1024 * 1024
"""Bytes of an answer; no search engine sends more."""

_CHUNK = 65_536
_IN_TROUBLE = frozenset([502, 503, 504])


class Reply(NamedTuple):
    """A server's answer of any status; ``after`` is the number of seconds that it asks to wait."""

    status: int
    body: bytes
    after: float | None
    where: str

    @property
    def ok(self) -> bool:
        """True if the status is 2xx."""
        return self.status // 100 == 2

    def json(self) -> Any:
        """Return the decoded body. Raise ``Unavailable`` if it is not JSON: something else answered."""
        try:
            return json.decode(self.body)
        except (ValueError, RecursionError):
            raise Unavailable(
                f"{self.where} answered {self.status} without JSON: is it the engine?"
            ) from None

    def read(self, kind: type[T]) -> T | None:
        """Return the body decoded as ``kind``, or None if it is something else."""
        try:
            return json.decode(self.body, type=kind)
        except (ValueError, RecursionError):
            return None


class Client:
    """A client for the hosts of one engine; it connects on the first request.

    ``bases`` are like ``http://host:7700``; ``timeout`` includes the answer.
    A subclass for an engine overrides ``failed`` with what it knows of the engine's errors.
    """

    def __init__(
        self,
        bases: Sequence[str],
        *,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        ssl: SSLContext | None = None,
    ) -> None:
        self.bases = tuple(bases)
        self.where = ",".join(map(_where, self.bases))
        self.timeout = timeout
        self._headers = {"User-Agent": f"relaybox/{version('relaybox')}", **(headers or {})}
        self._ssl = ssl
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._first = 0

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = JSON,
        params: Params = None,
        bases: Sequence[str] | None = None,
    ) -> Reply:
        """Return the answer, of any status; ``path`` starts with a slash and is percent-encoded.

        A body of bytes is sent unchanged, any other as JSON. If a host is unreachable, ask the next (of
        ``bases``, if given). Raise ``Unreachable`` if none is reachable, ``Unavailable`` if no answer came.
        """
        headers = self._headers if body is None else {**self._headers, "Content-Type": content_type}
        encoded = body if body is None or isinstance(body, bytes) else json.encode(body)
        sent = {"method": method, "data": encoded, "headers": headers}
        *others, last = bases or (*self.bases[self._first :], *self.bases[: self._first])
        for base in others:
            with suppress(Unreachable):
                return await self._from(base, {**sent, "url": _url(base, path, params)})
        return await self._from(last, {**sent, "url": _url(last, path, params)})

    async def json(self, method: str, path: str, body: Any = None, *, params: Params = None) -> Any:
        """Return the decoded answer to a request. Raise the outcome of a status other than 2xx."""
        reply = await self.request(method, path, body, params=params)
        if not reply.ok:
            raise self.failed(reply)
        return reply.json()

    def failed(self, reply: Reply) -> Retry | Reject | Unavailable:
        """Return the outcome that a status other than 2xx means."""
        return classify(reply.status, self.reason(reply), reply.after)

    def reason(self, reply: Reply) -> str:
        """Return ``host:port: 503 Service Unavailable: engine's message`` on one line, without secrets."""
        status = f"{reply.status} {phrase_of(reply.status)}".strip()
        said = clean(_message(reply.body))
        text = f"{reply.where}: {status}: {said}" if said else f"{reply.where}: {status}"
        if reply.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return f"{text}; see whether the destination's auth is a key that may do this"
        if reply.status // 100 == 3:
            return f"{text}; redirects are not followed, write the new address into the sink's URL"
        return text

    def missing(self, index: str) -> Unavailable:
        """Return the outcome of what needs an index that does not exist."""
        return Unavailable(f"the index {index!r} does not exist on {self.where}")

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _from(self, base: str, sent: Mapping[str, Any]) -> Reply:
        """Ask one host; ``sent`` are arguments for aiohttp.

        The next request starts with this host, or with the one after it if it is in trouble.
        """
        at = self.bases.index(base)
        following = (at + 1) % len(self.bases)
        try:
            reply = await self._ask(_where(base), sent)
        except Unavailable:
            self._first = following
            raise
        self._first = following if reply.status in _IN_TROUBLE else at
        return reply

    async def _ask(self, where: str, sent: Mapping[str, Any]) -> Reply:
        seen = SimpleNamespace(reused=False)
        try:
            async with asyncio.timeout(self.timeout):
                try:
                    return await self._once(where, sent, seen)
                except (aiohttp.ServerDisconnectedError, ConnectionResetError, aiohttp.ClientOSError):
                    if not seen.reused:
                        raise
                return await self._once(where, sent, SimpleNamespace())
        except (aiohttp.ClientError, OSError, ValueError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            raise self._explained(error, where) from None

    async def _once(self, where: str, sent: Mapping[str, Any], seen: SimpleNamespace) -> Reply:
        asking = self._opened().request(**sent, allow_redirects=False, trace_request_ctx=seen)
        async with asking as response:
            read = await _read(response, where)
            after = retry_after(response.headers.get("Retry-After"), time.time())
            return Reply(response.status, read, after, where)

    def _opened(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            # The connections of another loop ended with it.
            self._loop = loop
            connector = aiohttp.TCPConnector(ssl=self._ssl or True)
            limit_answers(connector, size=LARGEST_ANSWER)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                trace_configs=[_watching_reuse()],
            )
        return self._session

    def _explained(self, error: BaseException, where: str) -> Unavailable:
        match error:
            case asyncio.CancelledError():
                return Unavailable(f"the request to {where} was given up: the sink is closed")
            case TimeoutError():
                return no_answer(where, self.timeout)
            case aiohttp.ClientConnectorError():
                return not_connected(error, where)
            case AnswerTooLong():
                return Unavailable(f"{where} sends an answer without end: {error}")
            case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError() | OSError():
                return Unavailable(f"{where} closed the connection before its answer was complete")
            case aiohttp.ClientResponseError():
                return Unavailable(f"{where} does not answer in HTTP: {said_before_quote(error.message)}")
        return Unavailable(f"the request to {where} failed: {type(error).__name__}: {clean(str(error))}")


async def _read(response: aiohttp.ClientResponse, where: str) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        body += chunk
        if len(body) > LARGEST_ANSWER:
            raise Unavailable(f"{where} answers with more than {LARGEST_ANSWER} bytes; is it the engine?")
    return bytes(body)


def _watching_reuse() -> aiohttp.TraceConfig:
    """Return a trace that marks requests on a reused connection."""

    async def reused(_: aiohttp.ClientSession, context: SimpleNamespace, __: Any) -> None:
        context.trace_request_ctx.reused = True

    watching = aiohttp.TraceConfig()
    watching.on_connection_reuseconn.append(reused)
    return watching


def _url(base: str, path: str, params: Params) -> URL:
    url = URL(f"{base}{path}", encoded=True)
    return url.update_query(params) if params else url


def _where(base: str) -> str:
    url = URL(base)
    host = shown(url.raw_host or "")
    return f"[{host}]:{url.port}" if ":" in host else f"{host}:{url.port}"


def _message(body: bytes) -> str:
    text = body[:_CHUNK].decode("utf-8", "replace")
    try:
        said = json.decode(body)
    except (ValueError, RecursionError):
        return text
    if not isinstance(said, dict):
        return text
    error = said.get("error")
    found = said.get("message") or (error.get("reason") if isinstance(error, dict) else error)
    return found if isinstance(found, str) else text
