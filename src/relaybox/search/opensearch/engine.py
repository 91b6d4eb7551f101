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

from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.core.values import Parse
from relaybox.errors import ConfigError
from relaybox.search.change import BUILDING, SEARCH_OPTIONS
from relaybox.search.engine import TROUBLE, Change, Write, encode_changes, halves, pages, parts_of
from relaybox.search.opensearch.cluster import GUARD, Cluster, answer_to, bulk_action_of, path_of, results_of
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
# Set by the server, valid only for the old index, or blocking writes at the moment.
_NOT_COPIED = re.compile(
    r"index\.(uuid|creation_date|provided_name|history\.|version\.|blocks\.|resize\.|shrink\.|remote_store\.|"
    r"verified_before_close|routing\.allocation\.initial_recovery\.)"
)


class OpenSearchEngine:
    """A cluster. Raises ``ConfigError`` if the URL or an option is wrong, or a file cannot be read."""

    most = MOST

    def __init__(self, destination: Destination) -> None:
        address = parse_address(destination, PORT, OPTIONS)
        options = address.options
        encrypted = any(options.get(name) for name in ("tls", *TLS_OPTIONS))
        scheme = "https" if encrypted else "http"
        headers = _login(address, destination)
        self._cluster = Cluster(
            [f"{scheme}://{netloc}" for netloc in address.netlocs],
            timeout=destination.timeout,
            headers=headers,
            ssl=tls_context(options, destination) if encrypted else None,
        )
        self._refresh: bool = options.get("refresh", False)
        self.where = self._cluster.where

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        """Apply the changes; return the server's answer for each."""
        answers: dict[int, Answer] = {}
        writes = encode_changes(changes, bulk_action_of, answers)
        if writes and index not in self._cluster.aliases and index not in await self.present([index]):
            raise self._cluster.missing(index)
        otherwise: Answer | None = None
        for part in parts_of(writes, LARGEST_BODY):
            if otherwise is None:
                try:
                    answers |= await self._bulk(index, part)
                    continue
                except TROUBLE as error:
                    otherwise = answer_of(error)
            answers.update((write.at, otherwise) for write in part)
        return [answers[at] for at in range(len(changes))]

    async def present(self, names: Sequence[str]) -> Mapping[str, str]:
        """Return the indexes that exist, each with its unique id; for an alias, the ids behind it."""
        found = await self._cluster.look(names)
        return {
            name: ",".join(sorted(index.uuid for index in indexes.values()))
            for name, indexes in found.items()
        }

    async def create(self, name: str, *, like: str | None = None) -> None:
        """Create an empty index with the mappings and settings of ``like``, and an alias ``name`` for it.

        An existing one is left alone; with ``like``, raise ``Unavailable``.
        """
        if await self._cluster.look([name]):
            if like is None:
                return
            raise Unavailable(f"the index {name!r} exists already on {self.where}; drop it first")
        await self._clear(name.removesuffix(BUILDING))
        body: dict[str, Any] = {} if like is None else await self._copied(like)
        # Relays that create it at once use the same name, so only one succeeds.
        ending = "000001" if like is None else f"{datetime.now(UTC):%Y%m%dt%H%M%S}-{token_hex(3)}"
        concrete = f"{name.removesuffix(BUILDING).lower()}-{ending}"
        reply = await self._cluster.request("PUT", f"/{path_of(concrete)}", {**body, "aliases": {name: {}}})
        if not reply.ok and b"resource_already_exists_exception" not in reply.body:
            raise self._cluster.failed(reply)
        if reply.ok and not reply.json().get("shards_acknowledged"):
            raise Retry(f"the index {concrete!r} was created on {self.where}, but is not usable yet")
        if len((await self._cluster.look([name])).get(name, {})) > 1:
            await self._cluster.delete(concrete)
            raise Retry(f"the index {name!r} was created by somebody else on {self.where} at the same time")

    async def replace(self, live: str, fresh: str) -> None:
        """Make ``live`` an alias of the index behind ``fresh`` in one step, and remove the old index.

        Other aliases of the old index move to the new one. If ``live`` is not an alias, a search under way
        may fail; otherwise the old index is kept until such searches are done.
        """
        found = await self._cluster.look([live, fresh])
        new = self._cluster.only(found, fresh)
        # ``drop`` removes this alias first; then the whole request is refused.
        actions = [{"remove": {"index": new, "alias": fresh, "must_exist": True}}]
        aliases: dict[str, dict[str, Any]] = {live: {}}
        if live in found:
            old = self._cluster.only(found, live)
            aliases |= found[live][old].aliases
            actions += _removal(live, old, aliases)
        actions += [{"add": {"index": new, "alias": alias, **more}} for alias, more in aliases.items()]
        reply = await self._cluster.request("POST", "/_aliases", {"actions": actions})
        if not reply.ok and list((await self._cluster.look([live])).get(live, {})) != [new]:
            raise self._cluster.failed(reply)
        # The new index serves; the next rebuild deletes what is left of the old one.
        with suppress(*TROUBLE):
            await self._clear(live)

    async def drop(self, name: str) -> None:
        """Delete the index, or what is behind the alias, if it exists."""
        for concrete in (await self._cluster.look([name])).get(name, {}):
            if concrete != name:
                # ``replace`` may be about to put it in place: only one of the two finds the alias.
                remove = {"remove": {"index": concrete, "alias": name, "must_exist": True}}
                given_up = {"index": concrete, "alias": f"{name.removesuffix(BUILDING)}{REPLACED}"}
                actions = [remove, {"add": given_up}]
                reply = await self._cluster.request("POST", "/_aliases", {"actions": actions})
                if reply.status == HTTPStatus.NOT_FOUND:
                    continue
                self._cluster.done(reply)
            await self._cluster.delete(concrete)

    async def refresh(self, index: str) -> None:
        """Make all writes visible."""
        await self._cluster.json("POST", f"/{path_of(index)}/_refresh")

    async def count(self, index: str) -> int:
        """Return the number of documents, as of the last refresh."""
        answer = await self._cluster.json("POST", f"/{path_of(index)}/_count")
        return int(answer["count"])

    async def get(self, index: str, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the documents with these ids that exist."""
        found: dict[str, Mapping[str, Any]] = {}
        for some in pages(ids, MOST_GOT):
            answer = await self._cluster.json("POST", f"/{path_of(index)}/_mget", {"ids": some})
            for document in answer["docs"]:
                if "error" in document:
                    said = clean(str(document["error"]))
                    raise Unavailable(f"{self.where}: {said}")
                if document["found"]:
                    found[document["_id"]] = document["_source"]
        return found

    async def scan(self, index: str) -> AsyncIterator[Sequence[str]]:
        """Yield the ids of all documents as of the last refresh, page by page."""
        body: dict[str, Any] = {"size": PAGE, "sort": ["_doc"], "_source": False}
        more = {"scroll": SCROLL, "allow_partial_search_results": "false"}
        page = await self._cluster.json("POST", f"/{path_of(index)}/_search", body, params=more)
        try:
            while hits := page["hits"]["hits"]:
                yield [hit["_id"] for hit in hits]
                body = {"scroll": SCROLL, "scroll_id": page["_scroll_id"]}
                page = await self._cluster.json("POST", "/_search/scroll", body)
        finally:
            with suppress(Unavailable):
                await self._cluster.request("DELETE", "/_search/scroll", {"scroll_id": page["_scroll_id"]})

    async def check(self) -> None:
        """Reach the cluster with its user. Raise ``Unavailable`` with the reason."""
        reply = await self._cluster.request("GET", "/")
        if not reply.ok:
            raise Unavailable(self._cluster.reason(reply))
        if not isinstance(answer := reply.json(), dict) or "version" not in answer:
            raise Unavailable(f"{reply.where} answers, but is not OpenSearch")

    async def close(self) -> None:
        """Close the connections."""
        await self._cluster.close()

    async def _bulk(self, index: str, part: Sequence[Write]) -> dict[int, Answer]:
        params = {}
        guard = b""
        if index in self._cluster.aliases:
            params["require_alias"] = "true"
            guard = GUARD if all(write.deletes for write in part) else b""
        if self._refresh and not index.endswith(BUILDING):
            params["refresh"] = "wait_for"
        body = guard + b"".join([write.sent for write in part])
        path = f"/{path_of(index)}/_bulk"
        reply = await self._cluster.request("POST", path, body, content_type=_NDJSON, params=params)
        if reply.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            if len(part) == 1:
                problem = f"the document has {len(part[0].sent)} bytes, too many for {reply.where}"
                return {part[0].at: Reject(f"{problem}: its http.max_content_length allows less")}
            first, second = halves(part)
            return await self._bulk(index, first) | await self._bulk(index, second)
        if not reply.ok:
            raise self._cluster.refused(reply)
        done = results_of(reply, len(part) + bool(guard))[bool(guard) :]
        if any(result.status == HTTPStatus.NOT_FOUND and result.error is not None for result in done):
            # The alias is gone; the next look tells what the name is now.
            self._cluster.aliases.discard(index)
        return {write.at: answer_to(result, reply.where) for write, result in zip(part, done, strict=True)}

    async def _clear(self, live: str) -> None:
        """Delete replaced indexes, once the searches in them are done."""
        for concrete in (await self._cluster.look([f"{live}{REPLACED}"])).get(f"{live}{REPLACED}", {}):
            for _ in range(MOST_GRACES):
                await asyncio.sleep(GRACE)
                if not await self._cluster.is_searched(concrete):
                    break
            await self._cluster.delete(concrete)

    async def _copied(self, like: str) -> dict[str, Any]:
        concrete = self._cluster.only(await self._cluster.look([like]), like)
        answer = await self._cluster.json("GET", f"/{concrete}", params={"flat_settings": "true"})
        settings = answer[concrete]["settings"]
        kept = {name: value for name, value in settings.items() if not _NOT_COPIED.match(name)}
        return {"mappings": answer[concrete]["mappings"], "settings": kept}


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
