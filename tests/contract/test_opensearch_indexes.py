"""What an engine promises of indexes, of a real OpenSearch: looking, creating, reading and replacing them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from relaybox.outcome import Delivered, Retry, Unavailable
from relaybox.sinks.opensearch import PAGE, OpenSearchEngine
from tests.contract.opensearch import STRICT, Api, OnOpenSearch, document, ids_of, index, kinds, opened

KEYS = [f"k{at}" for at in range(300)]
READERS = 3


class TestIndexes(OnOpenSearch):
    async def test_only_those_that_exist_are_present_each_with_its_identity(
        self, engine: OpenSearchEngine, api: Api, strict: str
    ) -> None:
        await engine.create(f"{strict}__building", like=strict)
        names = [strict, f"{strict}__building", f"{strict}-none"]
        present = await engine.present(names)
        assert sorted(present) == sorted(names[:2])
        assert len(set(present.values())) == 2
        api("DELETE", f"/{strict}")
        api("PUT", f"/{strict}", STRICT)
        assert (await engine.present([strict]))[strict] != present[strict]

    async def test_a_created_index_is_an_alias_of_one_that_can_be_written(
        self, engine: OpenSearchEngine, api: Api, name: str
    ) -> None:
        await engine.create(name)
        assert api.concrete(name) == [f"{name}-000001"]
        assert kinds(await engine.write(name, [index("a", 1)])) == [Delivered]

    async def test_many_may_create_one_at_once(
        self, opensearch_url: str, engine: OpenSearchEngine, api: Api, name: str
    ) -> None:
        await asyncio.gather(*(engine.create(name) for _ in range(5)))
        assert len(api.concrete(name)) == 1
        assert kinds(await engine.write(name, [index("a", 1)])) == [Delivered]

    async def test_many_that_build_one_at_once_never_share_it(
        self, engine: OpenSearchEngine, api: Api, strict: str
    ) -> None:
        building = f"{strict}__building"
        made = await asyncio.gather(
            *(engine.create(building, like=strict) for _ in range(4)), return_exceptions=True
        )
        assert made.count(None) <= 1
        assert all(one is None or isinstance(one, Retry | Unavailable) for one in made)
        assert len((await engine.present([building])).get(building, "").split(",")) == 1

    async def test_a_copy_has_the_mappings_and_settings_and_no_documents(
        self, engine: OpenSearchEngine, api: Api, name: str
    ) -> None:
        settings = {
            "index.number_of_shards": "2",
            "index.number_of_replicas": "0",
            "index.refresh_interval": "7s",
            "index.analysis.analyzer.own.type": "custom",
            "index.analysis.analyzer.own.tokenizer": "standard",
        }
        api("PUT", f"/{name}", {**STRICT, "settings": settings})
        await engine.write(name, [index("a", 1)])
        await engine.create(f"{name}__building", like=name)
        [copy] = api("GET", f"/{name}__building?flat_settings=true").values()
        assert copy["mappings"] == api("GET", f"/{name}")[name]["mappings"]
        assert settings.items() <= copy["settings"].items()
        assert await engine.count(f"{name}__building") == 0

    async def test_a_copy_of_a_blocked_index_is_not_blocked(
        self, engine: OpenSearchEngine, api: Api, strict: str
    ) -> None:
        api("PUT", f"/{strict}/_settings", {"index.blocks.write": True})
        await engine.create(f"{strict}__building", like=strict)
        assert kinds(await engine.write(f"{strict}__building", [index("a", 1)])) == [Delivered]

    async def test_a_building_index_that_exists_is_not_taken_for_a_new_one(
        self, engine: OpenSearchEngine, strict: str
    ) -> None:
        await engine.create(f"{strict}__building", like=strict)
        with pytest.raises(Unavailable, match="exists already"):
            await engine.create(f"{strict}__building", like=strict)

    async def test_what_is_dropped_is_gone_with_what_is_behind_it(
        self, engine: OpenSearchEngine, api: Api, strict: str
    ) -> None:
        building = f"{strict}__building"
        await engine.create(building, like=strict)
        [concrete] = api.concrete(building)
        await engine.drop(building)
        await engine.drop(strict)
        await engine.drop(strict)
        assert await engine.present([strict, building]) == {}
        assert not api.exists(concrete)

    async def test_all_ids_are_scanned(self, engine: OpenSearchEngine, strict: str) -> None:
        keys = [f"k{at:05}" for at in range(PAGE + 10)]
        for begin in range(0, len(keys), engine.most):
            await engine.write(strict, [index(key, 1) for key in keys[begin : begin + engine.most]])
        await engine.refresh(strict)
        assert [len(page) async for page in engine.scan(strict)] == [PAGE, 10]
        assert await ids_of(engine, strict) == keys
        assert len(await engine.get(strict, keys[:1200])) == 1200

    async def test_an_index_that_is_not_there_cannot_be_read(
        self, engine: OpenSearchEngine, name: str
    ) -> None:
        for reading in (
            engine.count(name),
            engine.refresh(name),
            engine.get(name, ["a"]),
            ids_of(engine, name),
        ):
            with pytest.raises(Unavailable, match="no such index"):
                await reading


class TestReplacing(OnOpenSearch):
    async def rebuild(self, engine: OpenSearchEngine, live: str, keys: Sequence[str], n: int) -> None:
        fresh = f"{live}__building"
        await engine.create(fresh, like=live)
        answers = await engine.write(fresh, [index(key, n) for key in keys])
        assert kinds(answers) == [Delivered] * len(keys)
        await engine.refresh(fresh)
        await engine.replace(live, fresh)

    async def test_somebodys_own_index_becomes_an_alias_when_it_is_first_rebuilt(
        self, engine: OpenSearchEngine, api: Api, strict: str
    ) -> None:
        await engine.write(strict, [index("old", 1)])
        before = await engine.present([strict])
        await self.rebuild(engine, strict, ["new"], 2)
        [concrete] = api.concrete(strict)
        assert concrete.startswith(f"{strict}-2")
        assert await ids_of(engine, strict) == ["new"]
        after = await engine.present([strict, f"{strict}__building"])
        assert list(after) == [strict]
        assert after != before
        assert kinds(await engine.write(strict, [index("live", 3)])) == [Delivered]
        await self.rebuild(engine, strict, ["newer"], 3)
        assert not api.exists(concrete)
        assert await ids_of(engine, strict) == ["newer"]

    async def test_a_fresh_one_takes_a_place_that_is_empty(
        self, engine: OpenSearchEngine, api: Api, strict: str
    ) -> None:
        await engine.create(f"{strict}__building", like=strict)
        api("DELETE", f"/{strict}")
        await engine.replace(strict, f"{strict}__building")
        assert list(await engine.present([strict, f"{strict}__building"])) == [strict]

    async def test_other_aliases_go_over_as_they_were(
        self, engine: OpenSearchEngine, api: Api, strict: str
    ) -> None:
        only = {"filter": {"term": {"n": 7}}, "index_routing": "1", "search_routing": "1"}
        api("PUT", f"/{strict}/_alias/{strict}-sevens", only)
        await self.rebuild(engine, strict, ["a"], 7)
        [index_now] = api("GET", f"/{strict}").values()
        assert index_now["aliases"] == {strict: {}, f"{strict}-sevens": only}

    async def test_what_was_dropped_is_never_put_in_place(
        self, engine: OpenSearchEngine, api: Api, strict: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fresh = f"{strict}__building"
        await engine.write(strict, [index("a", 1)])
        await engine.create(fresh, like=strict)
        found = await engine._look([strict, fresh])
        await engine.drop(fresh)
        look, seen = engine._look, [found]

        async def late(names: Sequence[str]) -> Any:
            return seen.pop() if seen else await look(names)

        monkeypatch.setattr(engine, "_look", late)
        with pytest.raises(Unavailable):
            await engine.replace(strict, fresh)
        assert await engine.get(strict, ["a"]) == {"a": document("a", 1)}

    async def test_what_was_put_in_place_is_not_dropped(
        self, engine: OpenSearchEngine, strict: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fresh = f"{strict}__building"
        await engine.create(fresh, like=strict)
        found = await engine._look([fresh])
        await engine.replace(strict, fresh)
        look, seen = engine._look, [found]

        async def late(names: Sequence[str]) -> Any:
            return seen.pop() if seen else await look(names)

        monkeypatch.setattr(engine, "_look", late)
        await engine.drop(fresh)
        assert list(await engine.present([strict, fresh])) == [strict]

    async def test_a_replacement_that_was_done_already_is_done(
        self, engine: OpenSearchEngine, api: Api, strict: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As where the answer was lost and the request was sent again."""
        fresh = f"{strict}__building"
        await engine.create(fresh, like=strict)
        found = await engine._look([strict, fresh])
        [concrete] = found[fresh]
        await engine.replace(strict, fresh)
        look, seen = engine._look, [found]

        async def late(names: Sequence[str]) -> Any:
            return seen.pop() if seen else await look(names)

        monkeypatch.setattr(engine, "_look", late)
        await engine.replace(strict, fresh)
        assert api.concrete(strict) == [concrete]

    async def test_whoever_searches_all_the_time_sees_a_whole_index(
        self, engine: OpenSearchEngine, opensearch_url: str, strict: str
    ) -> None:
        await self.rebuild(engine, strict, KEYS, 0)
        async with searching(opensearch_url, strict) as seen:
            for n in range(1, 4):
                await self.rebuild(engine, strict, KEYS, n)
        assert {total for total, _ in seen} == {len(KEYS)}
        assert {n for _, n in seen} == set(range(4))

    async def test_also_when_somebodys_own_index_is_first_rebuilt(
        self, engine: OpenSearchEngine, opensearch_url: str, strict: str
    ) -> None:
        """But a search that is under way in that moment may fail: there its index goes at once."""
        await engine.write(strict, [index(key, 0) for key in KEYS])
        await engine.refresh(strict)
        async with searching(opensearch_url, strict, forgiven="all shards failed|no such index") as seen:
            await self.rebuild(engine, strict, KEYS, 1)
        assert {total for total, _ in seen} == {len(KEYS)}
        assert {n for _, n in seen} == {0, 1}

    async def test_an_old_index_that_could_not_be_deleted_is_deleted_by_the_next_rebuild(
        self, engine: OpenSearchEngine, api: Api, strict: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await self.rebuild(engine, strict, ["a"], 1)
        [old] = api.concrete(strict)

        async def fail(_: str) -> None:
            raise Unavailable("gone")

        with monkeypatch.context() as failing:
            failing.setattr(engine, "_delete", fail)
            await self.rebuild(engine, strict, ["b"], 2)
        assert await ids_of(engine, strict) == ["b"]
        assert api.exists(old)
        await engine.create(f"{strict}__building", like=strict)
        assert not api.exists(old)
        assert await ids_of(engine, strict) == ["b"]


@asynccontextmanager
async def searching(url: str, name: str, forgiven: str = "$none") -> AsyncIterator[list[tuple[int, int]]]:
    """Search all the time: how many documents there were, and the largest of their numbers."""
    seen: list[tuple[int, int]] = []
    query = {"size": 1, "track_total_hits": True, "sort": [{"n": "desc"}]}

    async def search(reader: OpenSearchEngine) -> None:
        try:
            answer = await reader._done(await reader._request("POST", f"{name}/_search", query))
        except Unavailable as error:
            if not re.search(forgiven, error.reason):
                raise
        else:
            seen.append((answer["hits"]["total"]["value"], answer["hits"]["hits"][0]["_source"]["n"]))

    async def search_on() -> None:
        async with opened(url) as reader:
            await search(reader)
            begun.release()
            while not over.is_set():
                await search(reader)
            # What was done in the meantime is seen by one that begins after it.
            await search(reader)

    begun, over = asyncio.Semaphore(0), asyncio.Event()
    async with asyncio.TaskGroup() as readers:
        for _ in range(READERS):
            readers.create_task(search_on())
        for _ in range(READERS):
            await begun.acquire()
        yield seen
        over.set()
