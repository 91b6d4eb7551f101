"""What an engine promises of writing, of OpenSearch: each answer is one that a real server gave."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from relaybox.engine import Change
from relaybox.outcome import Delivered, Reject, Throttled, Unavailable, Unreachable
from relaybox.sinks import opensearch_bulk
from relaybox.sinks.opensearch import OpenSearchEngine
from tests.conftest import available
from tests.contract.opensearch import (
    Api,
    OnOpenSearch,
    delete,
    document,
    ids_of,
    index,
    kinds,
    opened,
    reason_of,
)
from tests.servers import base, opensearch, restart

BREAKER = "network.breaker.inflight_requests.limit"


class TestWriting(OnOpenSearch):
    async def test_documents_are_written_replaced_and_deleted(
        self, engine: OpenSearchEngine, strict: str
    ) -> None:
        await engine.write(strict, [index("a", 1), index("b", 1), index("c", 1)])
        answers = await engine.write(strict, [index("a", 2, 2), delete("b", 2), delete("unknown", 2)])
        assert kinds(answers) == [Delivered] * 3
        assert await engine.get(strict, ["a", "b", "c", "unknown"]) == {
            "a": document("a", 2),
            "c": document("c", 1),
        }

    async def test_of_500_only_the_three_bad_ones_are_refused(
        self, engine: OpenSearchEngine, strict: str
    ) -> None:
        bad = {17, 250, 499}
        changes = [index(f"k{at}", "no number" if at in bad else at) for at in range(500)]
        answers = await engine.write(strict, changes)
        assert {at for at, answer in enumerate(answers) if isinstance(answer, Reject)} == bad
        assert kinds(answers).count(Delivered) == 497
        assert "[n] of type [long]" in reason_of(answers[17])
        await engine.refresh(strict)
        assert await engine.count(strict) == 497

    async def test_a_field_that_the_mapping_does_not_know_is_refused(
        self, engine: OpenSearchEngine, strict: str
    ) -> None:
        [answer] = await engine.write(strict, [Change("a", {"id": "a", "other": 1}, 1)])
        assert isinstance(answer, Reject)
        assert "strict_dynamic_mapping_exception" in answer.reason
        assert "other" in answer.reason

    async def test_more_fields_than_the_index_may_have_are_refused(
        self, engine: OpenSearchEngine, api: Api, name: str
    ) -> None:
        api("PUT", f"/{name}", {"settings": {"index.mapping.total_fields.limit": 5}})
        [answer] = await engine.write(name, [Change("a", {f"f{at}": at for at in range(9)}, 1)])
        assert isinstance(answer, Reject)
        assert "Limit of total fields [5]" in answer.reason

    @pytest.mark.parametrize("key", ["", "k" * 513, "ü" * 257])
    async def test_an_id_that_no_server_takes_is_refused_alone(
        self, engine: OpenSearchEngine, strict: str, key: str
    ) -> None:
        answers = await engine.write(strict, [index("a", 1), index(key, 1), index("ü" * 256, 1)])
        assert kinds(answers) == [Delivered, Reject, Delivered]

    @pytest.mark.parametrize("key", ["a/b", "a b?c#d", "日本", '"quoted"', "_id", "-"])
    async def test_any_other_id_is_written_and_read(
        self, engine: OpenSearchEngine, strict: str, key: str
    ) -> None:
        assert kinds(await engine.write(strict, [index(key, 1)])) == [Delivered]
        assert await engine.get(strict, [key]) == {key: document(key, 1)}

    async def test_with_refresh_what_is_delivered_is_found_by_a_search(
        self, opensearch_url: str, api: Api, strict: str
    ) -> None:
        async with opened(opensearch_url, refresh=True) as engine:
            await engine.write(strict, [index("a", 7)])
        found = api("POST", f"/{strict}/_search", {"query": {"match": {"n": 7}}})
        assert [hit["_id"] for hit in found["hits"]["hits"]] == ["a"]


class TestVersions(OnOpenSearch):
    async def test_an_older_one_never_takes_the_place_of_a_newer_one(
        self, engine: OpenSearchEngine, strict: str
    ) -> None:
        await engine.write(strict, [index("a", "10", 10)])
        assert kinds(await engine.write(strict, [index("a", 9, 9)])) == [Delivered]
        assert kinds(await engine.write(strict, [delete("a", 9)])) == [Delivered]
        assert await engine.get(strict, ["a"]) == {"a": document("a", "10")}

    async def test_an_older_one_does_not_bring_back_what_was_deleted(
        self, engine: OpenSearchEngine, strict: str
    ) -> None:
        await engine.write(strict, [index("a", 1, 1)])
        await engine.write(strict, [delete("a", 3), delete("never there", 3)])
        answers = await engine.write(strict, [index("a", 2, 2), index("never there", 2, 2)])
        assert kinds(answers) == [Delivered] * 2
        assert await engine.get(strict, ["a", "never there"]) == {}

    async def test_the_same_one_may_come_twice(self, engine: OpenSearchEngine, strict: str) -> None:
        assert kinds(await engine.write(strict, [index("a", 1, 5)])) == [Delivered]
        assert kinds(await engine.write(strict, [index("a", 1, 5)])) == [Delivered]
        assert kinds(await engine.write(strict, [delete("a", 5)])) == [Delivered]
        assert kinds(await engine.write(strict, [delete("a", 5)])) == [Delivered]
        assert await engine.get(strict, ["a"]) == {}


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
class TestSize(OnOpenSearch):
    async def test_a_request_that_is_too_large_goes_in_halves(
        self, engine: OpenSearchEngine, api: Api, name: str
    ) -> None:
        api("PUT", f"/{name}", {"mappings": {"dynamic": False}})
        large = [Change(f"k{at}", {"text": "x" * 500_000}, 1) for at in range(9)]
        assert kinds(await engine.write(name, large)) == [Delivered] * 9
        await engine.refresh(name)
        assert await engine.count(name) == 9

    async def test_a_document_that_is_too_large_alone_is_refused_alone(
        self, engine: OpenSearchEngine, api: Api, name: str
    ) -> None:
        api("PUT", f"/{name}", {"mappings": {"dynamic": False}})
        changes = [index("a", 1), Change("b", {"text": "x" * (opensearch.LARGEST + 1)}, 1), index("c", 1)]
        answers = await engine.write(name, changes)
        assert kinds(answers) == [Delivered, Reject, Delivered]
        assert "http.max_content_length" in reason_of(answers[1])

    async def test_requests_are_cut_by_their_bytes(
        self, engine: OpenSearchEngine, api: Api, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(opensearch_bulk, "LARGEST_BODY", 1000)
        lines = {at: opensearch_bulk.line_of(index(f"k{at}", "x" * 300)) for at in range(7)}
        parts = list(opensearch_bulk.parts_of(lines))
        assert [list(part) for part in parts] == [[0, 1], [2, 3], [4, 5], [6]]
        api("PUT", f"/{name}", {"mappings": {"dynamic": False}})
        assert (
            kinds(await engine.write(name, [index(f"k{at}", "x" * 300) for at in range(7)]))
            == [Delivered] * 7
        )
        assert len(await engine.get(name, [f"k{at}" for at in range(7)])) == 7


class TestTrouble(OnOpenSearch):
    @pytest.mark.parametrize("change", [index("a", 1), delete("a")])
    async def test_an_index_that_does_not_exist_is_not_created(
        self, engine: OpenSearchEngine, api: Api, name: str, change: Change
    ) -> None:
        with pytest.raises(Unavailable, match="does not exist"):
            await engine.write(name, [change])
        assert not api.exists(name)

    @pytest.mark.parametrize("changes", [[index("a", 1)], [delete("a")], [index("a", 1), delete("b")]])
    async def test_an_alias_that_went_away_is_not_created(
        self, engine: OpenSearchEngine, opensearch_url: str, api: Api, name: str, changes: Sequence[Change]
    ) -> None:
        await engine.create(name)
        assert kinds(await engine.write(name, [index("a", 1), delete("b"), delete("c")])) == [Delivered] * 3
        async with opened(opensearch_url) as other:
            await other.drop(name)
        answers = await engine.write(name, changes)
        assert kinds(answers) == [Unavailable] * len(changes)
        assert not api.exists(name)

    async def test_deletes_alone_write_nothing_else_to_an_alias(
        self, engine: OpenSearchEngine, name: str
    ) -> None:
        await engine.create(name)
        await engine.write(name, [index("a", 1), index("-", 1)])
        assert kinds(await engine.write(name, [delete("a", 2), delete("b", 2)])) == [Delivered] * 2
        await engine.refresh(name)
        assert await ids_of(engine, name) == ["-"]
        assert await engine.get(name, ["-"]) == {"-": document("-", 1)}

    @pytest.mark.parametrize("block", ["read_only", "read_only_allow_delete", "write"])
    async def test_an_index_that_must_not_be_written_takes_no_more_for_now(
        self, engine: OpenSearchEngine, api: Api, strict: str, block: str
    ) -> None:
        api("PUT", f"/{strict}/_settings", {f"index.blocks.{block}": True})
        [answer] = await engine.write(strict, [index("a", 1)])
        assert type(answer) is Throttled
        assert "blocked" in answer.reason
        api("PUT", f"/{strict}/_settings", {f"index.blocks.{block}": None})
        assert kinds(await engine.write(strict, [index("a", 1)])) == [Delivered]

    async def test_an_index_that_is_closed_is_unavailable(
        self, engine: OpenSearchEngine, api: Api, strict: str
    ) -> None:
        api("POST", f"/{strict}/_close")
        assert kinds(await engine.write(strict, [index("a", 1)])) == [Unavailable]
        api("POST", f"/{strict}/_open")
        assert kinds(await engine.write(strict, [index("a", 1)])) == [Delivered]

    async def test_an_alias_of_two_indexes_is_unavailable(
        self, engine: OpenSearchEngine, api: Api, name: str
    ) -> None:
        for ending in "xy":
            api("PUT", f"/{name}-{ending}", {"aliases": {name: {}}})
        [answer] = await engine.write(name, [index("a", 1)])
        assert type(answer) is Unavailable
        assert "no write index" in answer.reason
        with pytest.raises(Unavailable, match="covers 2 indexes"):
            await engine.create(f"{name}__building", like=name)

    @pytest.mark.parametrize("bad", ["a,b", "*", "_all", "-a", "a/b", "", "..", "a b", "a" * 256])
    async def test_a_name_that_means_something_else_is_refused(
        self, engine: OpenSearchEngine, bad: str
    ) -> None:
        with pytest.raises(Reject, match="can be called"):
            await engine.present([bad])
        with pytest.raises(Reject, match="can be called"):
            await engine.write(bad, [index("a", 1)])
        with pytest.raises(Reject, match="can be called"):
            await engine.drop(bad)

    async def test_a_server_that_is_sent_more_than_it_takes_throttles(
        self, engine: OpenSearchEngine, api: Api, strict: str
    ) -> None:
        api("PUT", "/_cluster/settings", {"transient": {BREAKER: "2kb"}})
        try:
            answers = await engine.write(strict, [index(f"k{at}", at) for at in range(100)])
        finally:
            api("PUT", "/_cluster/settings", {"transient": {BREAKER: None}})
        assert kinds(answers) == [Throttled] * 100
        assert "Data too large" in reason_of(answers[0])
        assert kinds(await engine.write(strict, [index("a", 1)])) == [Delivered]

    async def test_a_server_without_tls_is_unreachable_by_it(self, opensearch_url: str) -> None:
        async with opened(opensearch_url, tls=True) as engine:
            with pytest.raises(Unreachable, match="TLS with"):
                await engine.check()

    async def test_nobody_there_is_unreachable(self) -> None:
        async with opened(f"opensearch://127.0.0.1:{base._free_port()}") as engine:
            with pytest.raises(Unreachable, match="cannot connect"):
                await engine.check()
            with pytest.raises(Unreachable, match="cannot connect"):
                await engine.write("documents", [index("a", 1)])

    async def test_the_next_host_is_asked_where_one_is_not_there(
        self, opensearch_url: str, strict: str
    ) -> None:
        hosts = f"127.0.0.1:{base._free_port()},{opensearch_url.removeprefix('opensearch://')}"
        async with opened(f"opensearch://{hosts}") as engine:
            await engine.check()
            assert kinds(await engine.write(strict, [index("a", 1)])) == [Delivered]
            assert kinds(await engine.write(strict, [index("b", 1)])) == [Delivered]


@pytest.fixture(scope="module")
def node() -> Iterator[restart.Restartable]:
    with available("OpenSearch", opensearch.node()) as started:
        yield started


class TestFaults:
    async def test_what_was_acknowledged_outlives_the_server(self, node: restart.Restartable) -> None:
        async with opened(opensearch.url_of(node)) as engine:
            await engine.create("durable")
            assert kinds(await engine.write("durable", [index("a", 1)])) == [Delivered]
            node.kill()
            try:
                [answer] = await engine.write("durable", [index("b", 1)])
            finally:
                node.start()
            assert isinstance(answer, Unreachable)
            async with asyncio.timeout(30):
                while True:
                    [answer] = await engine.write("durable", [index("c", 1)])
                    if isinstance(answer, Delivered):
                        break
                    assert isinstance(answer, Unavailable)
            assert sorted(await engine.get("durable", ["a", "b", "c"])) == ["a", "c"]

    async def test_a_server_that_says_nothing_is_unavailable(self, node: restart.Restartable) -> None:
        async with opened(opensearch.url_of(node), patience="500ms") as engine:
            with node.silent(), pytest.raises(Unavailable, match=r"no answer .* within 0\.5s"):
                await engine.check()
        async with opened(opensearch.url_of(node)) as engine:
            await engine.check()
