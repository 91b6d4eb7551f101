"""OpenSearch: changes go in bulk requests, with an answer for each.

Relaybox creates a concrete index, such as ``documents-000001``, and an alias ``documents``, so a rebuilt
index replaces it in one request. A concrete index called ``documents`` works too, until the first rebuild
replaces it by an alias.

A write to an alias never creates an index. Without an alias, each write first checks that the index exists.
If it is deleted in that moment, the server creates it again with its own mappings, unless
``action.auto_create_index`` forbids that.

A search finds a change after the next refresh (``index.refresh_interval``, one second by default). If nobody
searched for 30 seconds, the next search refreshes. The option ``refresh`` delivers a change only when a
search finds it; it is not for an interval of -1.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from secrets import token_hex
from typing import Any
from urllib.parse import quote

from msgspec import Struct, ValidationError, convert, field

from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.core.values import Parse
from relaybox.errors import ConfigError
from relaybox.search.change import BUILDING, SEARCH_OPTIONS
from relaybox.search.engine import TROUBLE, Change, Item, encode_changes, halves, parts_of
from relaybox.search.http import Client, Reply
from relaybox.search.opensearch.bulk import GUARD, answer_to, bulk_action_of, items_of
from relaybox.sinks.broker import TLS_OPTIONS, Address, flag, parse_address, tls_context
from relaybox.sinks.sink import Answer, answer_of, clean

PORT = 9200
MOST = 1000
LARGEST_BODY = 10_000_000
"""Bytes of a request with several changes; a server takes 100 MB by default."""
PAGE = 5000
MOST_GOT = 500
"""Documents that ``get`` asks for in one request."""
SCROLL = "5m"
"""How long a server keeps a ``scan`` open between two pages."""

REPLACED = "__replaced"
"""The suffix of the alias of indexes that were replaced or given up."""
GRACE = 1.0
"""Seconds to keep such an index, for searches that are under way."""
MOST_GRACES = 10
"""How often to wait that long while searches go on."""

OPTIONS: dict[str, Parse[Any]] = {**SEARCH_OPTIONS, "refresh": flag, "tls": flag, **TLS_OPTIONS}

_NDJSON = "application/x-ndjson"
_NO_NAME = re.compile(r'[-_+].*|\.{1,2}|.*[\\/*?"<>|\s,#:].*|', re.DOTALL)
_LONGEST_NAME = 255
# Set by the server, valid only for the old index, or blocking writes at the moment.
_NOT_COPIED = re.compile(
    r"index\.(uuid|creation_date|provided_name|history\.|version\.|blocks\.|resize\.|shrink\.|remote_store\.|"
    r"verified_before_close|routing\.allocation\.initial_recovery\.)"
)


class _Settings(Struct, gc=False):
    uuid: str = ""


class _IndexSettings(Struct, gc=False):
    index: _Settings = field(default_factory=_Settings)


class _Index(Struct, gc=False):
    """A concrete index: its aliases with their options, and its identity."""

    aliases: dict[str, dict[str, Any]] = {}
    settings: _IndexSettings = field(default_factory=_IndexSettings)


class OpenSearchEngine:
    """A cluster. Raises ``ConfigError`` if the URL or an option is wrong, or a file cannot be read."""

    most = MOST

    def __init__(self, destination: Destination) -> None:
        address = parse_address(destination, PORT, OPTIONS)
        options = address.options
        encrypted = any(options.get(name) for name in ("tls", *TLS_OPTIONS))
        scheme = "https" if encrypted else "http"
        headers = _login(address, destination)
        self._secrets = (*address.secrets, *(login.removeprefix("Basic ") for login in headers.values()))
        self._client = Client(
            [f"{scheme}://{netloc}" for netloc in address.netlocs],
            timeout=destination.timeout,
            headers=headers,
            secrets=self._secrets,
            ssl=tls_context(options, destination) if encrypted else None,
        )
        self._refresh: bool = options.get("refresh", False)
        self._aliases: set[str] = set()
        self.where = self._client.where

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        """Apply the changes; return the server's answer for each."""
        answers: dict[int, Answer] = {}
        items = encode_changes(changes, bulk_action_of, answers)
        if items and index not in self._aliases and index not in await self.present([index]):
            raise self._missing(index)
        otherwise: Answer | None = None
        for part in parts_of(items, LARGEST_BODY):
            if otherwise is None:
                try:
                    answers |= await self._bulk(index, part)
                    continue
                except TROUBLE as error:
                    otherwise = answer_of(error)
            answers.update((item.at, otherwise) for item in part)
        return [answers[at] for at in range(len(changes))]

    async def present(self, names: Sequence[str]) -> Mapping[str, str]:
        """Return the indexes that exist, each with its unique id; for an alias, the ids behind it."""
        found = await self._look(names)
        return {
            name: ",".join(sorted(index.settings.index.uuid for index in indexes.values()))
            for name, indexes in found.items()
        }

    async def create(self, name: str, *, like: str | None = None) -> None:
        """Create an empty index with the mappings and settings of ``like``, and an alias ``name`` for it.

        An existing one is left alone; with ``like``, raise ``Unavailable``.
        """
        if await self._look([name]):
            if like is None:
                return
            raise Unavailable(f"the index {name!r} exists already on {self.where}; drop it first")
        await self._clear(name.removesuffix(BUILDING))
        body: dict[str, Any] = {} if like is None else await self._copied(like)
        # Relays that create it at once use the same name, so only one succeeds.
        ending = "000001" if like is None else f"{datetime.now(UTC):%Y%m%dt%H%M%S}-{token_hex(3)}"
        concrete = f"{name.removesuffix(BUILDING).lower()}-{ending}"
        reply = await self._client.request("PUT", f"/{_path(concrete)}", {**body, "aliases": {name: {}}})
        if not reply.ok and b"resource_already_exists_exception" not in reply.body:
            raise self._client.failed(reply)
        if reply.ok and not reply.json().get("shards_acknowledged"):
            raise Retry(f"the index {concrete!r} was created on {self.where}, but is not usable yet")
        if len((await self._look([name])).get(name, {})) > 1:
            await self._delete(concrete)
            raise Retry(f"the index {name!r} was created by somebody else on {self.where} at the same time")

    async def replace(self, live: str, fresh: str) -> None:
        """Make ``live`` an alias of the index behind ``fresh`` in one step, and remove the old index.

        Other aliases of the old index move to the new one. If ``live`` is not an alias, a search under way
        may fail; otherwise the old index is kept until such searches are done.
        """
        found = await self._look([live, fresh])
        new = self._only(found, fresh)
        # ``drop`` removes this alias first; then the whole request is refused.
        actions = [{"remove": {"index": new, "alias": fresh, "must_exist": True}}]
        aliases: dict[str, dict[str, Any]] = {live: {}}
        if live in found:
            old = self._only(found, live)
            aliases |= found[live][old].aliases
            actions += _removal(live, old, aliases)
        actions += [{"add": {"index": new, "alias": alias, **more}} for alias, more in aliases.items()]
        reply = await self._client.request("POST", "/_aliases", {"actions": actions})
        if not reply.ok and list((await self._look([live])).get(live, {})) != [new]:
            raise self._client.failed(reply)
        # The new index serves; the next rebuild deletes what is left of the old one.
        with suppress(*TROUBLE):
            await self._clear(live)

    async def drop(self, name: str) -> None:
        """Delete the index, or what is behind the alias, if it exists."""
        for concrete in (await self._look([name])).get(name, {}):
            if concrete != name:
                # ``replace`` may be about to put it in place: only one of the two finds the alias.
                remove = {"remove": {"index": concrete, "alias": name, "must_exist": True}}
                given_up = {"index": concrete, "alias": f"{name.removesuffix(BUILDING)}{REPLACED}"}
                actions = [remove, {"add": given_up}]
                reply = await self._client.request("POST", "/_aliases", {"actions": actions})
                if reply.status == HTTPStatus.NOT_FOUND:
                    continue
                self._done(reply)
            await self._delete(concrete)

    async def refresh(self, index: str) -> None:
        """Make all writes visible."""
        await self._json("POST", f"/{_path(index)}/_refresh")

    async def count(self, index: str) -> int:
        """Return the number of documents, as of the last refresh."""
        answer = await self._json("POST", f"/{_path(index)}/_count")
        return int(answer["count"])

    async def get(self, index: str, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the documents with these ids that exist."""
        found: dict[str, Mapping[str, Any]] = {}
        for begin in range(0, len(ids), MOST_GOT):
            body = {"ids": ids[begin : begin + MOST_GOT]}
            for document in (await self._json("POST", f"/{_path(index)}/_mget", body))["docs"]:
                if "error" in document:
                    said = clean(str(document["error"]), self._secrets)
                    raise Unavailable(f"{self.where}: {said}")
                if document["found"]:
                    found[document["_id"]] = document["_source"]
        return found

    async def scan(self, index: str) -> AsyncIterator[Sequence[str]]:
        """Yield the ids of all documents as of the last refresh, page by page."""
        body: dict[str, Any] = {"size": PAGE, "sort": ["_doc"], "_source": False}
        more = {"scroll": SCROLL, "allow_partial_search_results": "false"}
        page = await self._json("POST", f"/{_path(index)}/_search", body, more)
        try:
            while hits := page["hits"]["hits"]:
                yield [hit["_id"] for hit in hits]
                body = {"scroll": SCROLL, "scroll_id": page["_scroll_id"]}
                page = await self._json("POST", "/_search/scroll", body)
        finally:
            with suppress(Unavailable):
                await self._client.request("DELETE", "/_search/scroll", {"scroll_id": page["_scroll_id"]})

    async def check(self) -> None:
        """Reach the cluster with its user. Raise ``Unavailable`` with the reason."""
        reply = await self._client.request("GET", "/")
        if not reply.ok:
            raise Unavailable(self._client.reason(reply))
        if not isinstance(answer := reply.json(), dict) or "version" not in answer:
            raise Unavailable(f"{reply.where} answers, but is not OpenSearch")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _bulk(self, index: str, part: Sequence[Item]) -> dict[int, Answer]:
        params = {}
        guard = b""
        if index in self._aliases:
            params["require_alias"] = "true"
            guard = GUARD if all(item.deletes for item in part) else b""
        if self._refresh and not index.endswith(BUILDING):
            params["refresh"] = "wait_for"
        body = guard + b"".join([item.sent for item in part])
        path = f"/{_path(index)}/_bulk"
        reply = await self._client.request("POST", path, body, content_type=_NDJSON, params=params)
        if reply.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            if len(part) == 1:
                problem = f"the document has {len(part[0].sent)} bytes, too many for {reply.where}"
                return {part[0].at: Reject(f"{problem}: its http.max_content_length allows less")}
            first, second = halves(part)
            return await self._bulk(index, first) | await self._bulk(index, second)
        if not reply.ok:
            raise self._refused(reply)
        done = items_of(reply, len(part) + bool(guard))[bool(guard) :]
        if any(item.status == HTTPStatus.NOT_FOUND and item.error is not None for item in done):
            # The alias is gone; the next look tells what the name is now.
            self._aliases.discard(index)
        return {
            item.at: answer_to(answer, reply.where, self._secrets)
            for item, answer in zip(part, done, strict=True)
        }

    async def _look(self, names: Sequence[str]) -> dict[str, dict[str, _Index]]:
        """Return the concrete indexes of each name that exists: itself, or those behind the alias."""
        if not names:
            return {}
        params = {"ignore_unavailable": "true", "filter_path": "*.aliases,*.settings.index.uuid"}
        reply = await self._client.request("GET", f"/{','.join(map(_path, names))}", params=params)
        if not reply.ok:
            raise self._refused(reply)
        try:
            indexes = convert(self._done(reply), dict[str, _Index])
        except ValidationError:
            raise Unavailable(f"{reply.where} tells of its indexes otherwise than OpenSearch does") from None
        found = {}
        for name in names:
            behind = {own: index for own, index in indexes.items() if own == name or name in index.aliases}
            if behind:
                found[name] = behind
            (self._aliases.discard if name in indexes or not behind else self._aliases.add)(name)
        return found

    def _only(self, found: Mapping[str, Mapping[str, _Index]], name: str) -> str:
        match list(found.get(name, ())):
            case [concrete]:
                return concrete
            case []:
                raise self._missing(name)
            case several:
                problem = f"the alias {name!r} on {self.where} covers {len(several)} indexes"
                raise Unavailable(f"{problem} ({', '.join(sorted(several))}); leave it one of them")

    async def _clear(self, live: str) -> None:
        """Delete replaced indexes, once the searches in them are done."""
        for concrete in (await self._look([f"{live}{REPLACED}"])).get(f"{live}{REPLACED}", {}):
            for _ in range(MOST_GRACES):
                await asyncio.sleep(GRACE)
                if not await self._is_searched(concrete):
                    break
            await self._delete(concrete)

    async def _is_searched(self, concrete: str) -> bool:
        reply = await self._client.request("GET", f"/{_path(concrete)}/_stats/search")
        if reply.status == HTTPStatus.NOT_FOUND:
            return False
        search = self._done(reply)["_all"]["total"].get("search", {})
        return bool(search.get("query_current") or search.get("fetch_current"))

    async def _delete(self, concrete: str) -> None:
        reply = await self._client.request("DELETE", f"/{_path(concrete)}")
        if reply.status != HTTPStatus.NOT_FOUND:
            self._done(reply)

    async def _copied(self, like: str) -> dict[str, Any]:
        concrete = self._only(await self._look([like]), like)
        answer = await self._json("GET", f"/{concrete}", params={"flat_settings": "true"})
        settings = answer[concrete]["settings"]
        kept = {name: value for name, value in settings.items() if not _NOT_COPIED.match(name)}
        return {"mappings": answer[concrete]["mappings"], "settings": kept}

    async def _json(
        self, method: str, path: str, body: Any = None, params: Mapping[str, str] | None = None
    ) -> Any:
        return self._done(await self._client.request(method, path, body, params=params))

    def _done(self, reply: Reply) -> Any:
        """Return the answer. Raise if the request failed, even if only for some shards."""
        if not reply.ok:
            raise self._client.failed(reply)
        answer = reply.json()
        shards = answer.get("_shards") if isinstance(answer, dict) else None
        if isinstance(shards, dict) and shards.get("failed"):
            raise Unavailable(
                f"{reply.where} answers for a part of the index only: some of its shards failed"
            )
        return answer

    def _refused(self, reply: Reply) -> Retry | Unavailable:
        """Return why a whole request failed; never ``Reject``, because no document is at fault."""
        failure = self._client.failed(reply)
        return Unavailable(failure.reason) if isinstance(failure, Reject) else failure

    def _missing(self, name: str) -> Unavailable:
        return Unavailable(f"the index {name!r} does not exist on {self.where}")


def _removal(live: str, old: str, aliases: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the actions that detach the old index; if its own name is ``live``, it is deleted at once."""
    if old == live:
        return [{"remove_index": {"index": old}}]
    removed = [{"remove": {"index": old, "alias": alias}} for alias in aliases]
    return [*removed, {"add": {"index": old, "alias": f"{live}{REPLACED}"}}]


def _login(address: Address, destination: Destination) -> dict[str, str]:
    if address.user is None:
        if address.password is not None:
            fix = "name the user in the URL, such as opensearch://user@host:9200/documents"
            raise ConfigError(f"destination {destination.name!r}: a password is set, but no user; {fix}")
        return {}
    login = f"{address.user}:{address.password or ''}".encode()
    return {"Authorization": f"Basic {base64.b64encode(login).decode()}"}


def _path(name: str) -> str:
    if _NO_NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
        raise Reject(f"no index of OpenSearch can be called {name!r}")
    return quote(name, safe="")
