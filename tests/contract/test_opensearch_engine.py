"""What an engine promises, of OpenSearch: each answer is one that a real server gave."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

from relaybox.core.outcome import Delivered, Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.search.engine import Change, encode_changes, parts_of
from relaybox.search.opensearch import engine as opensearch_engine
from relaybox.search.opensearch.cluster import bulk_action_of
from relaybox.search.opensearch.engine import PAGE, OpenSearchEngine
from tests.conftest import available
from tests.contract.engines import Place, kinds, reason, rejected
from tests.servers import opensearch, restart
from tests.waiting import await_for

pytestmark = pytest.mark.full

BREAKER = "network.breaker.inflight_requests.limit"
STRICT = {"mappings": {"dynamic": "strict", "properties": {"id": {"type": "keyword"}, "n": {"type": "long"}}}}
"""Of an index that takes ``document``, and nothing else."""
KEYS = [f"k{at}" for at in range(300)]
READERS = 3
LARGE = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


def document(key: str, n: object) -> dict[str, Any]:
    return {"id": key, "n": n}


def index(key: str, n: object, version: int = 1) -> Change:
    return Change(key, document(key, n), version)


def delete(key: str, version: int = 1) -> Change:
    return Change(key, None, version)


@asynccontextmanager
async def opened(url: str, patience: str = "10s", **options: Any) -> AsyncIterator[OpenSearchEngine]:
    engine = OpenSearchEngine(Destination("search", url, timeout=patience, options=options))
    try:
        yield engine
    finally:
        await engine.close()


class Api:
    """The server's own API, as anybody else uses it."""

    def __init__(self, url: str) -> None:
        self.base = url.replace("opensearch://", "http://")

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{self.base}{path}", sent, headers, method=method), timeout=60) as answer:
            return json.load(answer)

    def exists(self, name: str) -> bool:
        return bool(self("GET", f"/{name}?ignore_unavailable=true"))

    def concrete(self, name: str) -> list[str]:
        return sorted(self("GET", f"/{name}/_alias"))


@pytest.fixture
def api(opensearch_url: str) -> Api:
    return Api(opensearch_url)


@pytest.fixture
async def engine(opensearch_url: str) -> AsyncIterator[OpenSearchEngine]:
    async with opened(opensearch_url) as engine:
        yield engine


@pytest.fixture
def blank(engine: OpenSearchEngine, api: Api) -> Iterator[Place]:
    """Name an index that does not exist yet; delete what the test made of it."""
    place = Place(engine, f"documents{uuid4().hex}")
    yield place
    for concrete in api("GET", f"/{place.index}*?expand_wildcards=all"):
        api("DELETE", f"/{concrete}")


@pytest.fixture
def strict(api: Api, blank: Place) -> Place:
    """Create an index with exactly this name."""
    api("PUT", f"/{blank.index}", STRICT)
    return blank


async def test_documents_are_written_replaced_and_deleted(strict: Place) -> None:
    await strict.write([index("a", 1), index("b", 1), index("c", 1)])
    assert await strict.kinds([index("a", 2, 2), delete("b", 2), delete("unknown", 2)]) == [Delivered] * 3
    found = await strict.get(["a", "b", "c", "unknown"])
    assert found == {"a": document("a", 2), "c": document("c", 1)}


async def test_of_500_only_the_three_bad_ones_are_refused(strict: Place) -> None:
    bad = {17, 250, 499}
    changes = [index(f"k{at}", "no number" if at in bad else at) for at in range(500)]
    answers = await strict.write(changes)
    assert rejected(answers) == bad
    assert kinds(answers).count(Delivered) == 497
    assert "[n] of type [long]" in reason(answers[17])
    await strict.engine.refresh(strict.index)
    assert await strict.count() == 497


async def test_a_field_that_the_mapping_does_not_know_is_refused(strict: Place) -> None:
    said = await strict.refused(Change("a", {"id": "a", "other": 1}, 1), Reject)
    assert "strict_dynamic_mapping_exception" in said
    assert "other" in said


async def test_more_fields_than_the_index_may_have_are_refused(api: Api, blank: Place) -> None:
    api("PUT", f"/{blank.index}", {"settings": {"index.mapping.total_fields.limit": 5}})
    said = await blank.refused(Change("a", {f"f{at}": at for at in range(9)}, 1), Reject)
    assert "Limit of total fields [5]" in said


@pytest.mark.parametrize("key", ["", "k" * 513, "ü" * 257])
async def test_an_id_that_no_server_takes_is_refused_alone(strict: Place, key: str) -> None:
    answers = await strict.write([index("a", 1), index(key, 1), index("ü" * 256, 1)])
    assert kinds(answers) == [Delivered, Reject, Delivered]


@pytest.mark.parametrize("key", ["a/b", "a b?c#d", "日本", '"quoted"', "_id", "-"])
async def test_any_other_id_is_written_and_read(strict: Place, key: str) -> None:
    assert await strict.kinds([index(key, 1)]) == [Delivered]
    assert await strict.get([key]) == {key: document(key, 1)}


async def test_with_refresh_what_is_delivered_is_found(opensearch_url: str, api: Api, strict: Place) -> None:
    async with opened(opensearch_url, refresh=True) as engine:
        await engine.write(strict.index, [index("a", 7)])
    found = api("POST", f"/{strict.index}/_search", {"query": {"match": {"n": 7}}})
    assert [hit["_id"] for hit in found["hits"]["hits"]] == ["a"]


async def test_an_older_one_never_takes_the_place_of_a_newer_one(strict: Place) -> None:
    await strict.write([index("a", "10", 10)])
    for older in (index("a", 9, 9), delete("a", 9)):
        assert await strict.kinds([older]) == [Delivered]
    assert await strict.get(["a"]) == {"a": document("a", "10")}


async def test_an_older_one_does_not_bring_back_what_was_deleted(strict: Place) -> None:
    await strict.write([index("a", 1, 1)])
    await strict.write([delete("a", 3), delete("never there", 3)])
    answers = await strict.write([index("a", 2, 2), index("never there", 2, 2)])
    assert kinds(answers) == [Delivered] * 2
    assert await strict.get(["a", "never there"]) == {}


async def test_the_same_one_may_come_twice(strict: Place) -> None:
    for change in (index("a", 1, 5), index("a", 1, 5), delete("a", 5), delete("a", 5)):
        assert await strict.kinds([change]) == [Delivered]
    assert await strict.get(["a"]) == {}


@LARGE
async def test_a_request_that_is_too_large_goes_in_halves(api: Api, blank: Place) -> None:
    api("PUT", f"/{blank.index}", {"mappings": {"dynamic": False}})
    large = [Change(f"k{at}", {"text": "x" * 500_000}, 1) for at in range(9)]
    assert await blank.kinds(large) == [Delivered] * 9
    await blank.engine.refresh(blank.index)
    assert await blank.count() == 9


@LARGE
async def test_a_document_that_is_too_large_alone_is_refused_alone(api: Api, blank: Place) -> None:
    api("PUT", f"/{blank.index}", {"mappings": {"dynamic": False}})
    changes = [index("a", 1), Change("b", {"text": "x" * (opensearch.LARGEST + 1)}, 1), index("c", 1)]
    answers = await blank.write(changes)
    assert kinds(answers) == [Delivered, Reject, Delivered]
    assert "http.max_content_length" in reason(answers[1])


async def test_requests_are_cut_by_bytes(api: Api, blank: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opensearch_engine, "LARGEST_BODY", 1000)
    items = encode_changes([index(f"k{at}", "x" * 300) for at in range(7)], bulk_action_of, {})
    parts = [[item.at for item in part] for part in parts_of(items, 1000)]
    assert parts == [[0, 1], [2, 3], [4, 5], [6]]
    api("PUT", f"/{blank.index}", {"mappings": {"dynamic": False}})
    assert await blank.kinds([index(f"k{at}", "x" * 300) for at in range(7)]) == [Delivered] * 7
    assert len(await blank.get([f"k{at}" for at in range(7)])) == 7


@pytest.mark.parametrize("change", [index("a", 1), delete("a")])
async def test_an_index_that_does_not_exist_is_not_created(api: Api, blank: Place, change: Change) -> None:
    with pytest.raises(Unavailable, match="does not exist"):
        await blank.write([change])
    assert not api.exists(blank.index)


@pytest.mark.parametrize("changes", [[index("a", 1)], [delete("a")], [index("a", 1), delete("b")]])
async def test_an_alias_that_went_away_is_not_created(
    opensearch_url: str, api: Api, blank: Place, changes: Sequence[Change]
) -> None:
    await blank.engine.create(blank.index)
    assert await blank.kinds([index("a", 1), delete("b"), delete("c")]) == [Delivered] * 3
    async with opened(opensearch_url) as other:
        await other.drop(blank.index)
    answers = await blank.write(changes)
    assert kinds(answers) == [Unavailable] * len(changes)
    assert not api.exists(blank.index)


async def test_deletes_alone_write_nothing_else_to_an_alias(blank: Place) -> None:
    await blank.engine.create(blank.index)
    await blank.write([index("a", 1), index("-", 1)])
    assert await blank.kinds([delete("a", 2), delete("b", 2)]) == [Delivered] * 2
    await blank.engine.refresh(blank.index)
    assert await blank.ids() == ["-"]
    assert await blank.get(["-"]) == {"-": document("-", 1)}


@pytest.mark.parametrize("block", ["read_only", "read_only_allow_delete", "write"])
async def test_a_blocked_index_takes_no_more_for_now(api: Api, strict: Place, block: str) -> None:
    api("PUT", f"/{strict.index}/_settings", {f"index.blocks.{block}": True})
    [answer] = await strict.write([index("a", 1)])
    assert type(answer) is Throttled
    assert "blocked" in answer.reason
    api("PUT", f"/{strict.index}/_settings", {f"index.blocks.{block}": None})
    assert await strict.kinds([index("a", 1)]) == [Delivered]


async def test_an_index_that_is_closed_is_unavailable(api: Api, strict: Place) -> None:
    api("POST", f"/{strict.index}/_close")
    assert await strict.kinds([index("a", 1)]) == [Unavailable]
    api("POST", f"/{strict.index}/_open")
    assert await strict.kinds([index("a", 1)]) == [Delivered]


async def test_an_alias_of_two_indexes_is_unavailable(api: Api, blank: Place) -> None:
    for ending in "xy":
        api("PUT", f"/{blank.index}-{ending}", {"aliases": {blank.index: {}}})
    [answer] = await blank.write([index("a", 1)])
    assert type(answer) is Unavailable
    assert "no write index" in answer.reason
    with pytest.raises(Unavailable, match="covers 2 indexes"):
        await blank.build()


@pytest.mark.parametrize("bad", ["a,b", "*", "_all", "-a", "a/b", "", "..", "a b", "a" * 256])
async def test_a_name_that_means_something_else_is_refused(engine: OpenSearchEngine, bad: str) -> None:
    for asked in (engine.present([bad]), engine.write(bad, [index("a", 1)]), engine.drop(bad)):
        with pytest.raises(Reject, match="can be called"):
            await asked


async def test_a_server_that_is_sent_more_than_it_takes_throttles(api: Api, strict: Place) -> None:
    api("PUT", "/_cluster/settings", {"transient": {BREAKER: "2kb"}})
    try:
        answers = await strict.write([index(f"k{at}", at) for at in range(100)])
    finally:
        api("PUT", "/_cluster/settings", {"transient": {BREAKER: None}})
    assert kinds(answers) == [Throttled] * 100
    assert "Data too large" in reason(answers[0])
    assert await strict.kinds([index("a", 1)]) == [Delivered]


async def test_a_server_without_tls_is_unreachable_by_it(opensearch_url: str) -> None:
    async with opened(opensearch_url, tls=True) as engine:
        with pytest.raises(Unreachable, match="TLS with"):
            await engine.check()


async def test_nobody_there_is_unreachable() -> None:
    async with opened("opensearch://127.0.0.1:1") as engine:
        for asked in (engine.check(), engine.write("documents", [index("a", 1)])):
            with pytest.raises(Unreachable, match="cannot connect"):
                await asked


async def test_the_next_host_is_asked_where_one_is_not_there(opensearch_url: str, strict: Place) -> None:
    async with opened(opensearch_url.replace("://", "://127.0.0.1:1,")) as engine:
        await engine.check()
        for key in "ab":
            assert kinds(await engine.write(strict.index, [index(key, 1)])) == [Delivered]


@pytest.fixture(scope="module")
def node() -> Iterator[restart.Restartable]:
    with available("OpenSearch", opensearch.node()) as started:
        yield started


async def test_what_was_acknowledged_outlives_the_server(node: restart.Restartable) -> None:
    async with opened(opensearch.url_of(node)) as engine:
        durable = Place(engine, "durable")
        await engine.create("durable")
        assert await durable.kinds([index("a", 1)]) == [Delivered]
        node.kill()
        try:
            await durable.refused(index("b", 1), Unreachable)
        finally:
            node.start()

        async def recovered() -> bool:
            [answer] = await durable.write([index("c", 1)])
            assert isinstance(answer, Delivered | Unavailable)
            return isinstance(answer, Delivered)

        await await_for(recovered)
        assert sorted(await durable.get(["a", "b", "c"])) == ["a", "c"]


async def test_a_server_that_says_nothing_is_unavailable(node: restart.Restartable) -> None:
    async with opened(opensearch.url_of(node), patience="500ms") as engine:
        with node.silent(), pytest.raises(Unavailable, match=r"no answer .* within 0\.5s"):
            await engine.check()
    async with opened(opensearch.url_of(node)) as engine:
        await engine.check()


async def test_only_those_that_exist_are_present_each_with_its_identity(api: Api, strict: Place) -> None:
    await strict.build()
    present = await strict.present(strict.index, strict.building, f"{strict.index}-none")
    assert set(present) == {strict.index, strict.building}
    assert len(set(present.values())) == 2
    api("DELETE", f"/{strict.index}")
    api("PUT", f"/{strict.index}", STRICT)
    assert (await strict.present())[strict.index] != present[strict.index]


async def test_a_created_index_is_an_alias_of_one_that_can_be_written(api: Api, blank: Place) -> None:
    await blank.engine.create(blank.index)
    assert api.concrete(blank.index) == [f"{blank.index}-000001"]
    assert await blank.kinds([index("a", 1)]) == [Delivered]


async def test_many_may_create_one_at_once(api: Api, blank: Place) -> None:
    await asyncio.gather(*(blank.engine.create(blank.index) for _ in range(5)))
    assert len(api.concrete(blank.index)) == 1
    assert await blank.kinds([index("a", 1)]) == [Delivered]


async def test_many_that_build_one_at_once_never_share_it(strict: Place) -> None:
    made = await asyncio.gather(*(strict.build() for _ in range(4)), return_exceptions=True)
    assert made.count(None) <= 1
    assert all(one is None or isinstance(one, Retry | Unavailable) for one in made)
    assert len((await strict.present()).get(strict.building, "").split(",")) == 1


async def test_a_copy_has_the_mappings_and_settings_and_no_documents(api: Api, blank: Place) -> None:
    settings = {
        "index.number_of_shards": "2",
        "index.number_of_replicas": "0",
        "index.refresh_interval": "7s",
        "index.analysis.analyzer.own.type": "custom",
        "index.analysis.analyzer.own.tokenizer": "standard",
    }
    api("PUT", f"/{blank.index}", {**STRICT, "settings": settings})
    await blank.write([index("a", 1)])
    await blank.build()
    [copy] = api("GET", f"/{blank.index}__building?flat_settings=true").values()
    assert copy["mappings"] == api("GET", f"/{blank.index}")[blank.index]["mappings"]
    assert settings.items() <= copy["settings"].items()
    assert await blank.engine.count(blank.building) == 0


async def test_a_copy_of_a_blocked_index_is_not_blocked(api: Api, strict: Place) -> None:
    api("PUT", f"/{strict.index}/_settings", {"index.blocks.write": True})
    await strict.build()
    assert kinds(await strict.engine.write(strict.building, [index("a", 1)])) == [Delivered]


async def test_a_building_index_that_exists_is_not_taken_for_a_new_one(strict: Place) -> None:
    await strict.build()
    with pytest.raises(Unavailable, match="exists already"):
        await strict.build()


async def test_what_is_dropped_is_gone_with_what_is_behind_it(api: Api, strict: Place) -> None:
    await strict.build()
    [concrete] = api.concrete(strict.building)
    for name in (strict.building, strict.index, strict.index):
        await strict.engine.drop(name)
    assert await strict.present() == {}
    assert not api.exists(concrete)


async def test_all_ids_are_scanned(strict: Place) -> None:
    keys = [f"k{at:05}" for at in range(PAGE + 10)]
    for begin in range(0, len(keys), strict.engine.most):
        await strict.write([index(key, 1) for key in keys[begin : begin + strict.engine.most]])
    await strict.engine.refresh(strict.index)
    assert [len(page) async for page in strict.engine.scan(strict.index)] == [PAGE, 10]
    assert await strict.ids() == keys
    assert len(await strict.get(keys[:1200])) == 1200


async def test_an_index_that_is_not_there_cannot_be_read(blank: Place) -> None:
    for reading in (blank.count(), blank.engine.refresh(blank.index), blank.get(["a"]), blank.ids()):
        with pytest.raises(Unavailable, match="no such index"):
            await reading


async def rebuild(place: Place, keys: Sequence[str], n: int) -> None:
    await place.build()
    fresh = Place(place.engine, place.building)
    assert await fresh.kinds([index(key, n) for key in keys]) == [Delivered] * len(keys)
    await place.engine.refresh(fresh.index)
    await place.replace()


async def test_somebodys_own_index_becomes_an_alias_when_it_is_first_rebuilt(api: Api, strict: Place) -> None:
    await strict.write([index("old", 1)])
    before = await strict.present()
    await rebuild(strict, ["new"], 2)
    [concrete] = api.concrete(strict.index)
    assert concrete.startswith(f"{strict.index}-2")
    assert await strict.ids() == ["new"]
    after = await strict.present()
    assert list(after) == [strict.index]
    assert after != before
    assert await strict.kinds([index("live", 3)]) == [Delivered]
    await rebuild(strict, ["newer"], 3)
    assert not api.exists(concrete)
    assert await strict.ids() == ["newer"]


async def test_a_fresh_one_takes_a_place_that_is_empty(api: Api, strict: Place) -> None:
    await strict.build()
    api("DELETE", f"/{strict.index}")
    await strict.replace()
    assert list(await strict.present()) == [strict.index]


async def test_other_aliases_go_over_as_they_were(api: Api, strict: Place) -> None:
    only = {"filter": {"term": {"n": 7}}, "index_routing": "1", "search_routing": "1"}
    api("PUT", f"/{strict.index}/_alias/{strict.index}-sevens", only)
    await rebuild(strict, ["a"], 7)
    [index_now] = api("GET", f"/{strict.index}").values()
    assert index_now["aliases"] == {strict.index: {}, f"{strict.index}-sevens": only}


async def seen_late(place: Place, patch: pytest.MonkeyPatch, change: Coroutine[Any, Any, None]) -> Any:
    """Change an index; the next look still finds what was there before, which is returned."""
    look = place.engine._cluster.look
    found = await look([place.index, place.building])
    await change
    seen = [found]

    async def late(names: Sequence[str]) -> Any:
        return {name: one for name, one in seen.pop().items() if name in names} if seen else await look(names)

    patch.setattr(place.engine._cluster, "look", late)
    return found


async def test_what_was_dropped_is_never_put_in_place(strict: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    await strict.write([index("a", 1)])
    await strict.build()
    await seen_late(strict, monkeypatch, strict.engine.drop(strict.building))
    with pytest.raises(Unavailable):
        await strict.replace()
    assert await strict.get(["a"]) == {"a": document("a", 1)}


async def test_what_was_put_in_place_is_not_dropped(strict: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    await strict.build()
    await seen_late(strict, monkeypatch, strict.replace())
    await strict.engine.drop(strict.building)
    assert list(await strict.present()) == [strict.index]


async def test_a_replacement_that_was_done_already_is_done(
    api: Api, strict: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the answer was lost and the request was sent again."""
    await strict.build()
    found = await seen_late(strict, monkeypatch, strict.replace())
    await strict.replace()
    assert api.concrete(strict.index) == list(found[strict.building])


async def test_searches_see_a_whole_index_all_the_time(opensearch_url: str, strict: Place) -> None:
    await rebuild(strict, KEYS, 0)
    async with searching(opensearch_url, strict.index) as seen:
        for n in range(1, 4):
            await rebuild(strict, KEYS, n)
            await await_for(lambda n=n: n in {newest for _, newest in seen}, f"{n} is seen")
    assert {total for total, _ in seen} == {len(KEYS)}
    assert {n for _, n in seen} == set(range(4))


async def test_also_when_somebodys_own_index_is_first_rebuilt(opensearch_url: str, strict: Place) -> None:
    """But a search that is under way in that moment may fail: there its index goes at once."""
    await strict.write([index(key, 0) for key in KEYS])
    await strict.engine.refresh(strict.index)
    async with searching(opensearch_url, strict.index, forgiven="all shards failed|no such index") as seen:
        await rebuild(strict, KEYS, 1)
    assert {total for total, _ in seen} == {len(KEYS)}
    assert {n for _, n in seen} == {0, 1}


async def test_an_old_index_that_could_not_be_deleted_is_deleted_by_the_next_rebuild(
    api: Api, strict: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rebuild(strict, ["a"], 1)
    [old] = api.concrete(strict.index)

    async def fail(_: str) -> None:
        raise Unavailable("gone")

    with monkeypatch.context() as failing:
        failing.setattr(strict.engine._cluster, "delete", fail)
        await rebuild(strict, ["b"], 2)
    assert await strict.ids() == ["b"]
    assert api.exists(old)
    await strict.build()
    assert not api.exists(old)
    assert await strict.ids() == ["b"]


@asynccontextmanager
async def searching(url: str, name: str, forgiven: str = "$none") -> AsyncIterator[list[tuple[int, int]]]:
    """Search all the time: how many documents there were, and the largest of their numbers."""
    seen: list[tuple[int, int]] = []
    query = {"size": 1, "track_total_hits": True, "sort": [{"n": "desc"}]}

    async def search(reader: OpenSearchEngine) -> None:
        try:
            answer = await reader._cluster.json("POST", f"/{name}/_search", query)
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
