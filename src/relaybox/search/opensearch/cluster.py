"""The client of an OpenSearch cluster: its errors, and the concrete indexes behind names and aliases."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from msgspec import Struct, ValidationError, convert

from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.search.http import Client, Params, Reply

_NO_NAME = re.compile(r'[-_+].*|\.{1,2}|.*[\\/*?"<>|\s,#:].*|', re.DOTALL)
_LONGEST_NAME = 255


class Index(Struct, gc=False):
    """A concrete index: its aliases with their options, and its settings."""

    aliases: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, str]] = {}

    @property
    def uuid(self) -> str:
        """Return the id that no later index of the same name has."""
        return self.settings.get("index", {}).get("uuid", "")


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
