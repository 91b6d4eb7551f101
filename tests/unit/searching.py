"""A search engine in memory that answers as a test wants, and deliveries for it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Unavailable
from relaybox.core.settings import Destination
from relaybox.search.engine import Change
from relaybox.search.sink import SearchSink
from relaybox.sinks.sink import Answer
from relaybox.testing.sink_contract import make_delivery

BUILDING = "documents__building"


class Double:
    """Keeps documents, and answers or raises what a test put in instead."""

    where = "engine:7700"

    def __init__(self, *indexes: str, most: int = 1000) -> None:
        self.most = most
        self.indexes: dict[str, dict[str, Mapping[str, Any]]] = {name: {} for name in indexes}
        self.requests: list[tuple[str, list[Change]]] = []
        self.refused: dict[str, Answer] = {}
        """By the document's ``title``, or by its id where it is deleted."""
        self.refused_in: dict[tuple[str, str], Answer] = {}
        """By index, and as above."""
        self.raised: BaseException | None = None
        self.looked: Counter[str] = Counter()
        self.closed = False
        self.open = asyncio.Event()
        self.open.set()
        self.under_way = 0
        self.most_at_once = 0

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        self.requests.append((index, list(changes)))
        assert len({change.id for change in changes}) == len(changes), "no two of one document"
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            await self.open.wait()
            await asyncio.sleep(0)
        finally:
            self.under_way -= 1
        if self.raised is not None:
            raise self.raised
        if index not in self.indexes:
            raise Unavailable(f"{index} is missing")
        return [self._write(index, change) for change in changes]

    def _write(self, index: str, change: Change) -> Answer:
        name = change.id if change.document is None else change.document.get("title", change.id)
        answer = self.refused_in.get((index, name)) or self.refused.get(name)
        if answer is not None:
            return answer
        if change.document is None:
            self.indexes[index].pop(change.id, None)
        else:
            self.indexes[index][change.id] = change.document
        return Delivered()

    async def present(self, names: Sequence[str]) -> Mapping[str, str]:
        self.looked.update(names)
        if self.raised is not None:
            raise self.raised
        return {name: name for name in names if name in self.indexes}

    async def create(self, name: str, *, like: str | None = None) -> None:
        self.indexes[name] = {}

    async def replace(self, live: str, fresh: str) -> None:
        self.indexes[live] = self.indexes.pop(fresh)

    async def drop(self, name: str) -> None:
        self.indexes.pop(name, None)

    async def refresh(self, index: str) -> None:
        pass

    async def count(self, index: str) -> int:
        return len(self.indexes[index])

    async def get(self, index: str, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        return {id_: self.indexes[index][id_] for id_ in ids if id_ in self.indexes[index]}

    async def scan(self, index: str) -> AsyncIterator[Sequence[str]]:
        yield list(self.indexes[index])

    async def check(self) -> None:
        if self.raised is not None:
            raise self.raised

    async def close(self) -> None:
        self.closed = True

    def titles(self, index: str = "documents") -> dict[str, str]:
        """Return the titles of an index's documents, by id."""
        return {id_: document["title"] for id_, document in self.indexes[index].items()}

    def written(self) -> list[list[str]]:
        """Return the documents of each request: their titles, and the ids of those that are deleted."""
        return [
            [change.id if change.document is None else change.document["title"] for change in changes]
            for _, changes in self.requests
        ]


def destination(url: str = "meilisearch://engine/documents", **given: Any) -> Destination:
    """Return a search destination."""
    return Destination("search", url, **given)


_positions = itertools.count(1)
KEYED = "the aggregate's"


def event(
    id_: str, title: Any = None, *, type_: str | None = None, key: str | None = KEYED, **given: Any
) -> Delivery:
    """Return an event that sets the document's title, or deletes the document if there is no title."""
    fields = {
        "aggregate_type": "Document",
        "aggregate_id": id_,
        "event_type": type_ or ("document.deleted" if title is None else "document.updated"),
        "payload": json.dumps(None if title is None else {"title": title}),
        "ordering_key": f"Document:{id_}" if key == KEYED else key,
        "position": next(_positions),
        **given,
    }
    return msgspec.structs.replace(make_delivery(), **fields)


def sink(engine: Double, url: str = "meilisearch://engine/documents", **given: Any) -> SearchSink:
    """Return the sink of such a destination, on this engine."""
    return SearchSink(destination(url, **given), engine)
