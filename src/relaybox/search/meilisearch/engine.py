"""Meilisearch: documents to add and ids to delete become tasks; a change is done when its task succeeds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from relaybox.core.outcome import Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.search.change import SEARCH_OPTIONS
from relaybox.search.engine import TROUBLE, Change, pages
from relaybox.search.meilisearch.server import Server, path_of
from relaybox.search.meilisearch.writer import Writer, is_id
from relaybox.sinks.broker import TLS_OPTIONS, parse_address, tls_context
from relaybox.sinks.sink import Answer

PORT = 7700
PAGE = 1000
SWAPS = 2
"""Tries of a swap that has no visible effect."""


class MeilisearchEngine:
    """One Meilisearch server. Raises ``ConfigError`` if the URL or an option is wrong."""

    most = 1000

    def __init__(self, destination: Destination) -> None:
        encrypted = destination.scheme == "meilisearchs"
        known = {**SEARCH_OPTIONS, **(TLS_OPTIONS if encrypted else {})}
        address = parse_address(destination, PORT, known, one_host=True)
        self._server = Server(
            f"{'https' if encrypted else 'http'}://{address.netlocs[0]}",
            key=address.password or address.user,
            timeout=destination.timeout,
            ssl=tls_context(address.options, destination) if encrypted else None,
        )
        self._id_field: str = address.options.get("id_field", "id")
        creates: bool = address.options.get("create_index", False)
        self._writer = Writer(self._server, self._id_field, creates=creates)
        self.where = self._server.where

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        """Apply the changes; return an answer for each when its task has finished."""
        return await self._writer.write(index, changes)

    async def present(self, names: Sequence[str]) -> Mapping[str, str]:
        """Return the indexes that exist, each with its time of creation."""
        asked = await asyncio.gather(*map(self._server.index, names))
        found = {
            name: index.created_at.isoformat() for name, index in zip(names, asked, strict=True) if index
        }
        self._writer.remember(found)
        return found

    async def create(self, name: str, *, like: str | None = None) -> None:
        """Create an empty index with the key and settings of ``like``. Raise ``Retry`` if it exists."""
        path = path_of(name)
        key, settings = self._id_field, {}
        if like is not None:
            key = (await self._server.json("GET", path_of(like)))["primaryKey"] or key
            settings = await self._server.json("GET", f"{path_of(like)}/settings")
            _check_copied(like, settings)
        await self._server.do("POST", "/indexes", {"uid": name, "primaryKey": key})
        if not settings:
            return
        try:
            await self._server.do("PATCH", f"{path}/settings", settings)
        except TROUBLE:
            with suppress(*TROUBLE):
                await self.drop(name)
            raise

    async def replace(self, live: str, fresh: str) -> None:
        """Swap the two, and delete the old index, which is then called ``fresh``."""
        if not await self.present([live]):
            await self.create(live)
        await self._swap(live, fresh)
        await self.drop(fresh)

    async def drop(self, name: str) -> None:
        """Delete the index, if it exists."""
        await self._server.drop(name)

    async def refresh(self, index: str) -> None:
        """Do nothing: writes are visible when their task has succeeded."""

    async def count(self, index: str) -> int:
        """Return the number of documents."""
        count: int = (await self._server.json("GET", f"{path_of(index)}/stats"))["numberOfDocuments"]
        return count

    async def get(self, index: str, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the documents with these ids that exist."""
        possible = [each for each in dict.fromkeys(ids) if is_id(each)]
        found: dict[str, Mapping[str, Any]] = {}
        for some in pages(possible, PAGE):
            page = await self._fetch(index, {"ids": some, "limit": len(some)})
            found |= {str(document[self._id_field]): document for document in page["results"]}
        return found

    async def scan(self, index: str) -> AsyncIterator[Sequence[str]]:
        """Yield the ids of all documents. One may be missed if others are deleted meanwhile."""
        offset, total = 0, 1
        while offset < total:
            asked = {"fields": [self._id_field], "limit": PAGE, "offset": offset}
            page = await self._fetch(index, asked)
            if not page["results"]:
                return
            yield [str(document[self._id_field]) for document in page["results"]]
            offset, total = offset + len(page["results"]), page["total"]

    async def check(self) -> None:
        """Reach the server with its key. Raise ``Unavailable`` with the reason."""
        status = (await self._server.json("GET", "/health")).get("status")
        if status != "available":
            raise Unavailable(f"{self.where} says that it is {status!r}")
        await self._server.json("GET", "/indexes", params={"limit": "1"})

    async def close(self) -> None:
        """Close the connections, and stop waiting for tasks."""
        await self._server.close()

    async def _swap(self, live: str, fresh: str) -> None:
        """Swap the two. Check the effect before another try, because a second swap would undo the first."""
        wanted = (await self.present([fresh])).get(fresh)
        if wanted is None:
            raise self._server.missing(fresh)
        trouble = Unavailable(f"{self.where} has not swapped {live!r} and {fresh!r}")
        for _ in range(SWAPS):
            try:
                await self._server.do("POST", "/swap-indexes", [{"indexes": [live, fresh]}])
            except (Retry, Unavailable) as error:
                trouble = Unavailable(error.reason)
                # A swap may still be under way although its answer was lost.
                asked = {"types": "indexSwap", "statuses": "enqueued,processing"}
                for task in (await self._server.json("GET", "/tasks", params=asked))["results"]:
                    await self._server.tasks.finished(task["uid"], self._server.end())
            if (await self.present([live])).get(live) == wanted:
                return
        raise trouble

    async def _fetch(self, index: str, asked: dict[str, Any]) -> Any:
        return await self._server.json("POST", f"{path_of(index)}/documents/fetch", asked)


def _check_copied(like: str, settings: Mapping[str, Any]) -> None:
    """Raise ``Unavailable`` if an embedder has a key: Meilisearch hides it, so it cannot be copied."""
    embedders: Mapping[str, Any] = settings.get("embedders") or {}
    for name, embedder in embedders.items():
        if embedder.get("apiKey"):
            raise Unavailable(
                f"the settings of the index {like!r} cannot be copied: its embedder {name!r} has an apiKey, "
                "which Meilisearch does not tell"
            )
