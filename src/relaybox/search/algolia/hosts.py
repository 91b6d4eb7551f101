"""Read an Algolia application from a destination, and send requests to its hosts in turn.

``host`` names servers instead of Algolia's, as host:port, several with commas; ``tls`` is for those.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from ssl import SSLContext
from typing import Any, NamedTuple
from urllib.parse import quote

from msgspec import json

from relaybox.core.outcome import Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.core.values import Parse, mask_url, wrong
from relaybox.errors import ConfigError
from relaybox.search.change import SEARCH_OPTIONS
from relaybox.search.engine import Change
from relaybox.search.http import Client, Params, Reply
from relaybox.sinks.broker import TLS_OPTIONS, flag, parse_address, text, tls_context
from relaybox.sinks.sink import clean

_HOSTS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/?#@,\[\]]+):[0-9]{1,5}", re.ASCII)


class Application(NamedTuple):
    """An application, its hosts for writes and for reads, and how records are stored."""

    id: str
    key: str
    writing: tuple[str, ...]
    reading: tuple[str, ...]
    where: str
    ssl: SSLContext | None
    id_field: str
    version_field: str | None

    def action_of(self, change: Change) -> bytes:
        """Return the action for a batch. Raise ``Reject`` if Algolia cannot store the document."""
        if not change.id:
            raise Reject("the aggregate's id is empty, but Algolia needs an objectID")
        if change.document is None:
            return json.encode({"action": "deleteObject", "body": {"objectID": change.id}})
        document, version = change.document, self.version_field
        if "objectID" in document and self.id_field != "objectID":
            fix = "leave it out, or set id_field = objectID"
            raise Reject(f"the document has an attribute objectID, which is Algolia's own; {fix}")
        if version is None:
            return json.encode({"action": "updateObject", "body": {**document, "objectID": change.id}})
        if version in document:
            raise Reject(
                f"the document has the attribute {version!r}, which is the version_field; rename one"
            )
        for name, value in document.items():
            if isinstance(value, Mapping) and "_operation" in value:
                raise Reject(f"the attribute {name!r} has a key _operation, which would be done, not kept")
        guard = {"_operation": "IncrementSet", "value": change.version}
        body = {**document, "objectID": change.id, version: guard}
        return json.encode({"action": "partialUpdateObject", "body": body})

    def document_of(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a record without the attributes that Relaybox added."""
        added = {self.version_field, "objectID"} - {self.id_field}
        return {name: value for name, value in record.items() if name not in added}


def _hosts(value: str, setting: str) -> tuple[str, ...]:
    hosts = tuple(text(value, setting).split(","))
    if not all(map(_HOSTS.fullmatch, hosts)):
        raise wrong(setting, value, "write host:port")
    return hosts


OPTIONS: dict[str, Parse[Any]] = {"host": _hosts, "tls": flag, "version_field": text}


def application_of(destination: Destination) -> Application:
    """Return what the URL and the options say. Raise ``ConfigError``."""
    address = parse_address(destination, 443, {**SEARCH_OPTIONS, **OPTIONS, **TLS_OPTIONS})
    options, setting = address.options, f"destination {destination.name!r}"
    if not address.password:
        raise ConfigError(f"{setting}: Algolia needs an API key; set auth to one that may write the index")
    encrypted, own = options.get("tls", True), options.get("host")
    if not encrypted and own is None:
        raise ConfigError(f"{setting}: tls = false is for a server of your own; name it in host")
    if not encrypted and (given := [name for name in TLS_OPTIONS if name in options]):
        raise ConfigError(f"{setting}: {given[0]} is of no use with tls = false; keep one of them")
    if options.get("version_field") in ("objectID", options.get("id_field", "id")):
        raise ConfigError(f"{setting}: version_field must be another attribute than the id's")
    id_ = _application_id(destination)
    writing, reading = _bases(id_, own, "https" if encrypted else "http")
    return Application(
        id_,
        address.password,
        writing,
        reading,
        own[0] if own else f"{id_}.algolia.net",
        tls_context(options, destination) if encrypted else None,
        options.get("id_field", "id"),
        options.get("version_field"),
    )


def _bases(
    application: str, own: tuple[str, ...] | None, scheme: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the hosts for writes and for reads, in the order to ask them."""
    if own is not None:
        bases = tuple(f"{scheme}://{host}" for host in own)
        return bases, bases
    others = tuple(f"{scheme}://{application}-{number}.algolianet.com" for number in (1, 2, 3))
    first, near = f"{scheme}://{application}.algolia.net", f"{scheme}://{application}-dsn.algolia.net"
    return (first, *others), (near, *others)


def _application_id(destination: Destination) -> str:
    """Return the URL's host in its original case: the header needs capitals."""
    found = re.match(r"[^:]*://(?:[^/?#]*@)?([A-Za-z0-9]+)(?:[/?]|\Z)", destination.url)
    if found is None:
        masked = mask_url(destination.url)
        fix = "write algolia://APPLICATION-ID/index"
        raise ConfigError(f"destination {destination.name!r}: sink = {masked!r}: {fix}")
    return found[1]


DOWN_SECONDS = 300.0
"""Seconds for which a failed host is asked last."""

_FIRST_PAUSE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 0.01, 1.0


class Hosts(Client):
    """The hosts of an application."""

    def __init__(self, application: Application, timeout: float) -> None:
        super().__init__(
            (*application.writing, *application.reading),
            timeout=timeout,
            headers={"X-Algolia-Application-Id": application.id, "X-Algolia-API-Key": application.key},
            ssl=application.ssl,
        )
        self.where = application.where
        self._application = application
        self._down: dict[str, float] = {}
        self._pause = _FIRST_PAUSE

    async def ask(
        self, method: str, path: str, body: Any = None, *, params: Params = None, reading: bool = False
    ) -> Reply:
        """Ask the hosts in turn, until one is reachable and does not answer 5xx."""
        bases = self._application.reading if reading else self._application.writing
        now = time.monotonic()
        in_turn = sorted(bases, key=lambda base: self._down.get(base, 0.0) > now)
        for base in in_turn:
            last = base is in_turn[-1]
            try:
                reply = await self.request(method, path, body, params=params, bases=[base])
                if reply.status < 500:
                    return reply
                self._down[base] = time.monotonic() + DOWN_SECONDS
                if last:
                    return reply
            except Unavailable as error:
                self._down[base] = time.monotonic() + DOWN_SECONDS
                # A host that took the request may still be working on it.
                if last or not isinstance(error, Unreachable):
                    raise
        raise AssertionError("an application has at least one host")

    async def json(self, method: str, path: str, body: Any = None, *, params: Params = None) -> Any:
        """Return the object that a host for reads answers with. Raise ``Unavailable`` if it is not one."""
        reply = await self.ask(method, path, body, params=params, reading=True)
        if not reply.ok:
            raise self.failed(reply)
        return object_of(reply)

    async def do(
        self, method: str, index: str, path: str, asked: Any = None, seconds: float | None = None
    ) -> None:
        """Change an index, and return when the task of that is done."""
        reply = await self.ask(method, path_of(index, path), asked)
        if not reply.ok:
            raise self.failed(reply)
        end = time.monotonic() + (self.timeout if seconds is None else seconds)
        await self.published(index, task_of(reply), end)

    async def published(self, index: str, task: int, end: float) -> None:
        """Wait until the task is done. The first check comes after half the time that the last task took."""
        begin, pause = time.monotonic(), self._pause
        while True:
            await asyncio.sleep(min(pause, max(end - time.monotonic(), 0.0)))
            status = await self.json("GET", path_of(index, f"/task/{task}"))
            if status.get("status") == "published":
                took = time.monotonic() - begin
                self._pause = min(max(took / 2, _SHORTEST_PAUSE), _LONGEST_PAUSE)
                return
            if "status" not in status:
                raise Unavailable(f"{self.where} tells nothing of a task: is it Algolia?")
            if time.monotonic() >= end:
                raise Unavailable(
                    f"{self.where} has taken task {task} of {index!r}, and not published it yet"
                )
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def failed(self, reply: Reply) -> Retry | Reject | Unavailable:
        """Return the outcome of an answer other than 2xx."""
        if reply.status == 429:
            return Throttled(self.reason(reply), after=reply.after)
        if over_quota(reply):
            said = clean(said_in(reply))
            # Throttled, because deletes still work and an event that waits for space has not failed.
            return Throttled(f"{reply.where}: {reply.status}: {said}", after=reply.after)
        if reply.status in (400, 402) or reply.status >= 500:
            return Unavailable(self.reason(reply), after=reply.after)
        return super().failed(reply)


def path_of(index: str, path: str) -> str:
    """Return the path of an index, or of a part of it. Raise ``Reject`` if there can be no such index."""
    if index in ("", ".", "..", "*"):
        raise Reject(f"no index of Algolia can be called {index!r}")
    return f"/1/indexes/{quote(index, safe='')}{path}"


def object_of(reply: Reply) -> Mapping[str, Any]:
    """Return the decoded answer. Raise ``Unavailable`` if it is not an object."""
    answer = reply.json()
    if not isinstance(answer, dict):
        raise Unavailable(f"{reply.where} answered in another way than Algolia does")
    return answer


def task_of(reply: Reply) -> int:
    """Return the id of the task that a request made."""
    task = object_of(reply).get("taskID")
    if not isinstance(task, int):
        raise Unavailable(f"{reply.where} answered {reply.status} without a task: is it Algolia?")
    return task


def said_in(reply: Reply) -> str:
    """Return the message of Algolia's error."""
    return str(error_in(reply).get("message", ""))


def over_quota(reply: Reply) -> bool:
    """True if the application is full."""
    return reply.status in (402, 403) and "quota" in said_in(reply).lower()


def error_in(reply: Reply) -> Mapping[str, Any]:
    """Return the fields of Algolia's error, or ``{}`` if something else answered."""
    return reply.read(dict[str, Any]) or {}
