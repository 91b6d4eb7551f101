"""The client of an OpenSearch cluster: its errors, the indexes behind names and aliases, and bulk requests.

A change carries the version of its event (``external_gte``). OpenSearch refuses an older one, so a conflict
means that a newer version is there. It keeps the versions of deleted documents for ``index.gc_deletes`` (60
seconds); after that only the order of deliveries guards them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from msgspec import Struct, ValidationError, convert, json

from relaybox.core.outcome import Reject, Retry, Throttled, Unavailable
from relaybox.search.engine import Change
from relaybox.search.http import Client, Params, Reply
from relaybox.sinks.http.status import classify
from relaybox.sinks.sink import DELIVERED, Answer, clean

_NO_NAME = re.compile(r'[-_+].*|\.{1,2}|.*[\\/*?"<>|\s,#:].*|', re.DOTALL)
_LONGEST_NAME = 255


class Index(Struct, gc=False):
    """A concrete index: its aliases with their options, and its settings."""

    aliases: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}

    @property
    def uuid(self) -> str:
        """Return the id that no later index of the same name has."""
        return str(self.settings.get("index", {}).get("uuid", ""))


class Cluster(Client):
    """A cluster, and which of the names in use are aliases."""

    def __init__(self, bases: Sequence[str], **options: Any) -> None:
        super().__init__(bases, **options)
        self.aliases: set[str] = set()

    async def json(self, method: str, path: str, body: Any = None, *, params: Params = None) -> Any:
        """Return the decoded answer to a request (see ``done``)."""
        return self.done(await self.request(method, path, body, params=params))

    def done(self, reply: Reply) -> Any:
        """Return the answer. Raise if the request failed, even if only for some shards."""
        if not reply.ok:
            raise self.failed(reply)
        answer = reply.json()
        shards = answer.get("_shards") if isinstance(answer, dict) else None
        if isinstance(shards, dict) and shards.get("failed"):
            raise Unavailable(
                f"{reply.where} answered for only a part of the index, because some of its shards failed"
            )
        return answer

    def refused(self, reply: Reply) -> Retry | Unavailable:
        """Return why a whole request failed; never ``Reject``, because no document is at fault."""
        failure = self.failed(reply)
        return Unavailable(failure.reason) if isinstance(failure, Reject) else failure

    async def look(self, names: Sequence[str]) -> dict[str, dict[str, Index]]:
        """Return the concrete indexes of each name that exists: itself, or those behind the alias."""
        if not names:
            return {}
        params = {"ignore_unavailable": "true", "filter_path": "*.aliases,*.settings.index.uuid"}
        reply = await self.request("GET", f"/{','.join(map(path_of, names))}", params=params)
        if not reply.ok:
            raise self.refused(reply)
        try:
            indexes = convert(self.done(reply), dict[str, Index])
        except ValidationError:
            raise Unavailable(f"{reply.where} tells of its indexes otherwise than OpenSearch does") from None
        found = {}
        for name in names:
            behind = {own: index for own, index in indexes.items() if own == name or name in index.aliases}
            if behind:
                found[name] = behind
            (self.aliases.discard if name in indexes or not behind else self.aliases.add)(name)
        return found

    def only(self, found: Mapping[str, Mapping[str, Index]], name: str) -> str:
        """Return the only concrete index of a name. Raise ``Unavailable`` if there are none or several."""
        match list(found.get(name, ())):
            case [concrete]:
                return concrete
            case []:
                raise self.missing(name)
            case several:
                problem = f"the alias {name!r} on {self.where} covers {len(several)} indexes"
                raise Unavailable(f"{problem} ({', '.join(sorted(several))}); leave it one of them")

    async def is_searched(self, concrete: str) -> bool:
        """True if searches are under way in the index."""
        reply = await self.request("GET", f"/{path_of(concrete)}/_stats/search")
        if reply.status == HTTPStatus.NOT_FOUND:
            return False
        search = self.done(reply)["_all"]["total"].get("search", {})
        return bool(search.get("query_current") or search.get("fetch_current"))

    async def delete(self, concrete: str) -> None:
        """Delete the index, if it exists."""
        reply = await self.request("DELETE", f"/{path_of(concrete)}")
        if reply.status != HTTPStatus.NOT_FOUND:
            self.done(reply)


def path_of(name: str) -> str:
    """Return the name as a part of a path. Raise ``Reject`` if no index can be called that."""
    if _NO_NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
        raise Reject(f"no index of OpenSearch can be called {name!r}")
    return quote(name, safe="")


LONGEST_ID = 512

GUARD = b'{"index":{"_id":"-","if_seq_no":9007199254740991,"if_primary_term":1}}\n{}\n'
"""An action that every index refuses. Deletes alone ignore ``require_alias``; beside it they create none."""

_TROUBLE = frozenset(["index_closed_exception", "invalid_index_name_exception", "security_exception"])
_OVERLOAD = frozenset(
    ["circuit_breaking_exception", "cluster_block_exception", "rejected_execution_exception"]
)
"""A cluster with full disks blocks writes but takes deletes, so a waiting event has not failed."""


def bulk_action_of(change: Change) -> bytes:
    """Encode the action, and the document if there is one. Raise ``Reject`` if no server takes it."""
    size = len(change.id.encode("utf-8", "surrogatepass"))
    if not 0 < size <= LONGEST_ID:
        raise Reject(f"the document's id has {size} bytes; OpenSearch takes 1 to {LONGEST_ID}")
    what = {"_id": change.id, "version": change.version, "version_type": "external_gte"}
    try:
        if change.document is None:
            return json.encode({"delete": what}) + b"\n"
        document = json.encode(change.document)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Reject(f"the document cannot be written as JSON: {error}") from None
    return json.encode({"index": what}) + b"\n" + document + b"\n"


class _Error(Struct, gc=False):
    type: str = ""
    reason: str | None = None
    caused_by: _Error | None = None


class Result(Struct, gc=False):
    """The result of one change."""

    status: int
    error: _Error | None = None


class _Bulk(Struct, gc=False):
    items: list[dict[str, Result]]


def results_of(reply: Reply, count: int) -> Sequence[Result]:
    """Return the result of each change. Raise ``Unavailable`` if the answer does not say."""
    bulk = reply.read(_Bulk) or _Bulk([])
    results = [result for entry in bulk.items for result in entry.values()]
    if len(results) != count:
        raise Unavailable(f"{reply.where} answered a bulk request in another way than OpenSearch does")
    return results


def answer_to(result: Result, where: str) -> Answer:
    """Return the answer for one change; deleting a missing document is not an error."""
    error = result.error
    if error is None or error.type == "version_conflict_engine_exception":
        return DELIVERED
    reason = f"{where} refuses it: {result.status}: {clean(_reported(error))}"
    # Servers compatible with Elasticsearch prefix some names with "es_".
    kind = error.type.removeprefix("es_").removeprefix("open_search_")
    if kind in _TROUBLE or "no write index" in (error.reason or ""):
        return Unavailable(reason)
    return Throttled(reason) if kind in _OVERLOAD else classify(result.status, reason)


def _reported(error: _Error) -> str:
    parts = [error.type, error.reason]
    if error.caused_by is not None and error.caused_by.reason != error.reason:
        parts += [error.caused_by.reason]
    return ": ".join(filter(None, parts))
