"""The sink of search indexes on a real OpenSearch: also while the index is replaced."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from msgspec.structs import replace

from relaybox.config import Destination
from relaybox.engine import Change
from relaybox.event import Delivery
from relaybox.outcome import Delivered, Reject, Unavailable
from relaybox.sinks.opensearch import OpenSearchEngine, open_engine
from relaybox.sinks.search import SearchSink
from relaybox.sinks.search_indexes import LOOK
from relaybox.testing.sink_contract import make_delivery

KEYS = [str(at) for at in range(20)]


def event(key: str, position: int, action: str = "updated") -> Delivery:
    return order(key, {"n": position}, position, action)


def order(key: str, payload: dict[str, Any], position: int, action: str = "updated") -> Delivery:
    return replace(
        make_delivery(json.dumps(payload), key=f"Order:{key}"),
        aggregate_id=key,
        event_type=f"order.{action}",
        position=position,
    )


class Search:
    """A sink and its engine, on an index of its own."""

    def __init__(self, url: str, name: str, options: dict[str, Any]) -> None:
        destination = Destination("search", f"{url}/{name}", timeout="10s", options=options)
        self.name = name
        self.engine: OpenSearchEngine = open_engine(destination)
        self.sink = SearchSink(destination, self.engine)

    async def numbers(self) -> dict[str, int]:
        found = await self.engine.get(self.name, KEYS)
        return {key: document["n"] for key, document in found.items()}


@asynccontextmanager
async def searching(url: str, **options: Any) -> AsyncIterator[Search]:
    search = Search(url, f"orders{uuid4().hex}", options)
    try:
        yield search
    finally:
        for name in (search.name, f"{search.name}__building"):
            await search.engine.drop(name)
        await search.sink.close()


async def test_a_batch_leaves_the_newest_of_each_document(opensearch_url: str) -> None:
    async with searching(opensearch_url, create_index=True) as search:
        events = [event(key, 100 * n + int(key)) for n in range(5) for key in KEYS]
        gone = [event(key, 900, "deleted") for key in KEYS[:3]]
        answers = await search.sink.send([*events, *gone])
        assert {type(answer) for answer in answers} == {Delivered}
        assert await search.numbers() == {key: 400 + int(key) for key in KEYS[3:]}


async def test_a_bad_document_fails_alone(opensearch_url: str) -> None:
    async with searching(opensearch_url, create_index=True) as search:
        await search.sink.send([event("0", 1)])
        bad = order("1", {"n": "no number"}, 2)
        answers = await search.sink.send([event("0", 2), bad, event("2", 2)])
        assert [type(answer) for answer in answers] == [Delivered, Reject, Delivered]
        assert await search.numbers() == {"0": 2, "2": 2}


async def test_an_index_that_is_not_there_stops_the_destination_and_is_not_made(opensearch_url: str) -> None:
    async with searching(opensearch_url) as search:
        for action in ("updated", "deleted"):
            [answer] = await search.sink.send([event("0", 1, action)])
            assert isinstance(answer, Unavailable)
            assert "set create_index = true" in answer.reason
        assert await search.engine.present([search.name]) == {}


@pytest.mark.parametrize("whole", [True, False], ids=["replaced", "given up"])
async def test_nothing_is_lost_while_the_index_is_rebuilt_under_it(opensearch_url: str, whole: bool) -> None:
    async with searching(opensearch_url, create_index=True) as search:
        written: dict[str, int] = {}
        enough = asyncio.Event()

        async def live() -> None:
            for n, key in _forever():
                [answer] = await search.sink.send([event(key, n)])
                # Whoever is refused comes again, as the relay has it.
                while not isinstance(answer, Delivered):
                    assert isinstance(answer, Unavailable), answer
                    [answer] = await search.sink.send([event(key, n)])
                written[key] = n
                if enough.is_set():
                    return

        await search.sink.send([event(key, 1) for key in KEYS])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(live())
            building = f"{search.name}__building"
            await search.engine.create(building, like=search.name)
            await asyncio.sleep(2 * LOOK)
            # What the database had at some moment before: always older than what comes by the events.
            old = [Change(key, {"id": key, "n": 1}, 1) for key in KEYS]
            await search.engine.write(building, old)
            if whole:
                await search.engine.replace(search.name, building)
            else:
                await search.engine.drop(building)
            enough.set()
        assert len(written) == len(KEYS)
        assert await search.numbers() == written
        assert list(await search.engine.present([search.name, building])) == [search.name]


def _forever() -> Iterator[tuple[int, str]]:
    return zip(itertools.count(2), itertools.cycle(KEYS))
