"""The Algolia engine, with a server behind it that behaves as Algolia's documentation says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from uuid import uuid4

import pytest

from relaybox.config import Destination
from relaybox.engine import Change
from relaybox.errors import ConfigError
from relaybox.outcome import Delivered, Reject, Throttled, Unavailable, Unreachable
from relaybox.sink import Answer
from relaybox.sinks.algolia import AlgoliaEngine, open_engine
from relaybox.sinks.algolia_place import place_of
from tests.servers import algolia

BAD_POINT: dict[str, Any] = {"_geoloc": "48.85,2.35"}
"""What Algolia refuses without a word of where it is."""


@pytest.fixture(scope="module")
def started() -> Iterator[algolia.Server]:
    with algolia.server() as server:
        yield server


@pytest.fixture
def server(started: algolia.Server) -> Iterator[algolia.Server]:
    yield started
    started.faults()


@pytest.fixture
def index() -> str:
    return f"documents-{uuid4().hex[:8]}"


@pytest.fixture
async def engine(server: algolia.Server) -> AsyncIterator[AlgoliaEngine]:
    engine = open_engine(destination(server))
    yield engine
    await engine.close()


def destination(server: algolia.Server, *, timeout: str = "10s", **options: Any) -> Destination:
    return Destination("search", server.url, timeout=timeout, auth=server.key, options=options)


def indexed(id: str, version: int = 1, **attributes: Any) -> Change:
    return Change(id, {"id": id, **attributes}, version)


def deleted(id: str, version: int = 1) -> Change:
    return Change(id, None, version)


def delivered(answers: Sequence[Answer]) -> bool:
    return all(isinstance(answer, Delivered) for answer in answers)


async def ids_of(engine: AlgoliaEngine, index: str) -> list[str]:
    return sorted([id async for page in engine.scan(index) for id in page])


def batches(server: algolia.Server, index: str) -> int:
    return sum(path == f"/1/indexes/{index}/batch" for _, path, _ in server.requests())


async def test_what_was_written_is_there_when_write_returns(engine: AlgoliaEngine, index: str) -> None:
    assert delivered(await engine.write(index, [indexed("1", title="a"), indexed("2", title="b")]))
    assert await engine.get(index, ["1", "2", "3"]) == {
        "1": {"id": "1", "title": "a"},
        "2": {"id": "2", "title": "b"},
    }
    assert delivered(await engine.write(index, [indexed("1", text="c"), deleted("2"), deleted("never")]))
    assert await engine.get(index, ["1", "2"]) == {"1": {"id": "1", "text": "c"}}
    assert await engine.count(index) == 1


async def test_ids_of_any_letters(engine: AlgoliaEngine, index: str) -> None:
    ids = ["a/b", "ünï", "a b", '"', "?#%", "*", "," * 400]
    assert delivered(await engine.write(index, [indexed(id) for id in ids]))
    assert await ids_of(engine, index) == sorted(ids)
    assert set(await engine.get(index, ids)) == set(ids)
    assert delivered(await engine.write(index, [deleted(id) for id in ids]))
    assert await engine.count(index) == 0


async def test_an_empty_id_and_a_foreign_object_id_are_rejected(
    engine: AlgoliaEngine, server: algolia.Server, index: str
) -> None:
    empty, foreign, good = await engine.write(index, [indexed(""), indexed("1", objectID="1"), indexed("2")])
    assert isinstance(empty, Reject)
    assert isinstance(foreign, Reject)
    assert "id_field" in foreign.reason
    assert isinstance(good, Delivered)
    own = open_engine(destination(server, id_field="objectID"))
    assert delivered(await own.write(index, [Change("7", {"objectID": "7", "n": 1}, 1)]))
    assert await own.get(index, ["7"]) == {"7": {"objectID": "7", "n": 1}}
    await own.close()


@pytest.mark.parametrize("terse", [False, True])
async def test_three_too_big_of_500(
    engine: AlgoliaEngine, server: algolia.Server, index: str, terse: bool
) -> None:
    server.faults(terse=terse)
    sizes = {7: 30_000, 8: 20_000, 499: 40_000}
    changes = [indexed(str(at), text="x" * sizes.get(at, 10)) for at in range(500)]
    answers = await engine.write(index, changes)
    assert [at for at, answer in enumerate(answers) if isinstance(answer, Reject)] == [7, 8, 499]
    assert isinstance(answers[7], Reject)
    assert "is too big size=300" in answers[7].reason
    assert delivered([answer for answer in answers if not isinstance(answer, Reject)])
    assert await engine.count(index) == 497
    # The last is larger than the first that was refused, and needs no request of its own.
    assert batches(server, index) == 3


async def test_bad_ones_that_algolia_does_not_name_are_found(
    engine: AlgoliaEngine, server: algolia.Server, index: str
) -> None:
    bad = {3, 250, 499}
    changes = [indexed(str(at), **(BAD_POINT if at in bad else {})) for at in range(500)]
    answers = await engine.write(index, changes)
    assert {at for at, answer in enumerate(answers) if isinstance(answer, Reject)} == bad
    assert all("_geoloc" in answer.reason for answer in answers if isinstance(answer, Reject))
    assert await engine.count(index) == 497
    assert batches(server, index) < 60


async def test_only_bad_ones(engine: AlgoliaEngine, index: str) -> None:
    answers = await engine.write(index, [indexed(str(at), **BAD_POINT) for at in range(5)])
    assert all(isinstance(answer, Reject) for answer in answers)
    assert await engine.present([index]) == {}


async def test_a_body_too_large_is_split(engine: AlgoliaEngine, server: algolia.Server, index: str) -> None:
    server.faults(body_limit=4_000)
    answers = await engine.write(index, [indexed(str(at), text="x" * 300) for at in range(40)])
    assert delivered(answers)
    assert await engine.count(index) == 40
    server.faults(body_limit=200)
    [large, small] = await engine.write(index, [indexed("big", text="x" * 300), indexed("small")])
    assert isinstance(large, Reject)
    assert "413" in large.reason
    assert isinstance(small, Delivered)


async def test_batches_are_not_larger_than_algolia_advises(
    engine: AlgoliaEngine, server: algolia.Server, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaybox.sinks.algolia.LARGEST_BODY", 1_000)
    sizes = [400, 400, 5_000, 400, 400]
    answers = await engine.write(index, [indexed(str(at), text="x" * size) for at, size in enumerate(sizes)])
    assert delivered(answers)
    assert await engine.count(index) == 5
    assert batches(server, index) == 3


async def test_throttled(engine: AlgoliaEngine, server: algolia.Server, index: str) -> None:
    server.faults(status=429, times=1, message="Too many jobs", retry_after="7")
    [answer] = await engine.write(index, [indexed("1")])
    assert isinstance(answer, Throttled)
    assert answer.after == 7
    assert "Too many jobs" in answer.reason
    assert delivered(await engine.write(index, [indexed("1")]))


async def test_half_done(engine: AlgoliaEngine, server: algolia.Server, index: str) -> None:
    server.faults(body_limit=1_200, status=429, times=100, skip=2, path="/batch")
    answers = await engine.write(index, [indexed(str(at), text="x" * 100) for at in range(12)])
    done = {str(at) for at, answer in enumerate(answers) if isinstance(answer, Delivered)}
    assert 0 < len(done) < 12
    assert sum(isinstance(answer, Throttled) for answer in answers) == 12 - len(done)
    server.faults()
    assert set(await ids_of(engine, index)) == done


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, "Operations quota exceeded, change plan to get more Operations."),
        (402, "Feature not enabled"),
        (500, "Internal Error"),
        (503, "Unavailable"),
        (404, "Not Found"),
        (400, "indexName is not valid"),
    ],
)
async def test_trouble_of_the_application_is_no_events_fault(
    engine: AlgoliaEngine, server: algolia.Server, index: str, status: int, message: str
) -> None:
    server.faults(status=status, message=message, times=2, path="/batch")
    first, second = await engine.write(index, [indexed("1"), indexed("2")])
    for answer in (first, second):
        assert isinstance(answer, Unavailable)
        assert message in answer.reason


async def test_a_quota_of_records(engine: AlgoliaEngine, server: algolia.Server, index: str) -> None:
    server.faults(quota=0)
    [answer] = await engine.write(index, [indexed("1")])
    assert isinstance(answer, Unavailable)
    assert "Record quota" in answer.reason
    assert "auth" not in answer.reason


async def test_deletes_do_not_wait_for_the_room_that_they_make(
    engine: AlgoliaEngine, server: algolia.Server, index: str
) -> None:
    assert delivered(await engine.write(index, [indexed("1"), indexed("2")]))
    server.faults(quota=1)
    first, second, third = await engine.write(index, [indexed("3"), deleted("1"), indexed("2", n=1)])
    assert isinstance(second, Delivered)
    for answer in (first, third):
        assert isinstance(answer, Unavailable)
        assert "Record quota" in answer.reason
    assert await ids_of(engine, index) == ["2"]


async def test_a_wrong_key_is_told_and_not_shown(server: algolia.Server, index: str) -> None:
    wrong = open_engine(Destination("search", server.url, auth="verysecret"))
    [answer] = await wrong.write(index, [indexed("1")])
    assert isinstance(answer, Unavailable)
    assert "Invalid Application-ID or API key" in answer.reason
    assert "auth" in answer.reason
    assert "verysecret" not in answer.reason
    with pytest.raises(Unavailable, match="403"):
        await wrong.check()
    with pytest.raises(Unavailable, match="403"):
        await wrong.present([index])
    await wrong.close()


@pytest.mark.parametrize("fault", [{"stuck": True}, {"lose": 1}])
async def test_a_task_that_is_not_published_is_not_delivered(
    engine: AlgoliaEngine, server: algolia.Server, index: str, fault: dict[str, Any]
) -> None:
    hasty = open_engine(destination(server, timeout="1s"))
    server.faults(**fault)
    bad, answer = await hasty.write(index, [indexed("bad", **BAD_POINT), indexed("1")])
    await hasty.close()
    assert isinstance(bad, Reject)
    assert isinstance(answer, Unavailable)
    assert "not published" in answer.reason
    server.faults()
    assert delivered(await engine.write(index, [indexed("1")]))
    assert await ids_of(engine, index) == ["1"]


async def test_a_server_that_dies_before_the_task_is_published(
    engine: AlgoliaEngine, server: algolia.Server, index: str
) -> None:
    server.faults(stuck=True)
    writing = asyncio.create_task(engine.write(index, [indexed("1", n=1)]))
    async with asyncio.timeout(10):
        while not batches(server, index):  # noqa: ASYNC110 - there is no signal
            await asyncio.sleep(0.01)
    server.kill()
    try:
        [answer] = await writing
        assert isinstance(answer, Unavailable)
        [answer] = await engine.write(index, [indexed("1", n=1)])
        assert isinstance(answer, Unreachable)
    finally:
        server.start()
    assert delivered(await engine.write(index, [indexed("1", n=1)]))
    assert await engine.get(index, ["1"]) == {"1": {"id": "1", "n": 1}}


async def test_an_answer_that_gets_lost(engine: AlgoliaEngine, server: algolia.Server, index: str) -> None:
    server.faults(drop=2, path="/batch")
    [answer] = await engine.write(index, [indexed("1", n=1)])
    assert isinstance(answer, Unavailable)
    server.faults()
    assert delivered(await engine.write(index, [indexed("1", n=2)]))
    assert await engine.get(index, ["1"]) == {"1": {"id": "1", "n": 2}}


async def test_a_server_that_says_nothing(server: algolia.Server, index: str) -> None:
    engine = open_engine(destination(server, timeout="200ms"))
    with server.silent():
        [answer] = await engine.write(index, [indexed("1")])
    assert isinstance(answer, Unavailable)
    assert "no answer" in answer.reason
    await engine.close()


@pytest.fixture
def other() -> Iterator[algolia.Server]:
    with algolia.server() as other:
        yield other


def of_both(first: algolia.Server, second: algolia.Server, timeout: str = "10s") -> AlgoliaEngine:
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in (first, second))
    sink = f"algolia://{algolia.APPLICATION}/documents"
    options = {"host": hosts, "tls": False}
    return open_engine(Destination("search", sink, timeout=timeout, auth=first.key, options=options))


async def test_what_there_is_room_for_is_written(other: algolia.Server, index: str) -> None:
    engine = open_engine(destination(other))
    other.faults(quota=5)
    answers = await engine.write(index, [indexed(str(at)) for at in range(16)])
    assert [type(answer) for answer in answers] == [Delivered] * 4 + [Throttled] * 12
    assert await ids_of(engine, index) == ["0", "1", "2", "3"]
    assert batches(other, index) == 3
    await engine.close()


async def test_a_host_in_trouble_is_asked_after_the_others(
    server: algolia.Server, other: algolia.Server, index: str
) -> None:
    engine = of_both(other, server)
    other.faults(status=503, times=100)
    assert delivered(await engine.write(index, [indexed("1")]))
    asked = len(other.requests())
    assert delivered(await engine.write(index, [indexed("2")]))
    assert len(other.requests()) == asked
    assert await ids_of(engine, index) == ["1", "2"]
    await engine.close()


async def test_a_host_that_is_away_is_passed_over(
    server: algolia.Server, other: algolia.Server, index: str
) -> None:
    engine = of_both(other, server)
    other.kill()
    assert delivered(await engine.write(index, [indexed("1")]))
    assert await ids_of(engine, index) == ["1"]
    await engine.close()


async def test_a_host_that_says_nothing_is_not_the_first_to_be_asked_again(
    server: algolia.Server, other: algolia.Server, index: str
) -> None:
    engine = of_both(other, server, timeout="2s")
    with other.silent():
        [answer] = await engine.write(index, [indexed("1")])
        assert isinstance(answer, Unavailable)
        assert delivered(await engine.write(index, [indexed("1")]))
    assert await ids_of(engine, index) == ["1"]
    await engine.close()


async def test_when_all_hosts_are_away(other: algolia.Server, index: str) -> None:
    engine = of_both(other, other)
    other.kill()
    [answer] = await engine.write(index, [indexed("1")])
    assert isinstance(answer, Unreachable)
    with pytest.raises(Unreachable):
        await engine.check()
    await engine.close()


async def test_an_older_version_never_replaces_a_newer(server: algolia.Server, index: str) -> None:
    engine = open_engine(destination(server, version_field="_version"))
    assert delivered(await engine.write(index, [indexed("1", 5, title="new", more=1)]))
    assert delivered(await engine.write(index, [indexed("1", 4, title="old"), indexed("2", 4)]))
    assert await engine.get(index, ["1", "2"]) == {
        "1": {"id": "1", "title": "new", "more": 1},
        "2": {"id": "2"},
    }
    assert delivered(await engine.write(index, [indexed("1", 6, title="newest")]))
    assert await engine.get(index, ["1"]) == {"1": {"id": "1", "title": "newest", "more": 1}}
    assert delivered(await engine.write(index, [deleted("1", 1)]))
    assert await engine.get(index, ["1"]) == {}
    await engine.close()


async def test_what_a_versioned_document_must_not_have(server: algolia.Server, index: str) -> None:
    engine = open_engine(destination(server, version_field="_version"))
    changes = [indexed("1", _version=3), indexed("2", n={"_operation": "Increment", "value": 1})]
    answers = await engine.write(index, changes)
    reasons = [answer.reason for answer in answers if isinstance(answer, Reject)]
    assert len(reasons) == 2
    assert "version_field" in reasons[0]
    assert "_operation" in reasons[1]
    await engine.close()


async def test_create_marks_an_index_and_takes_over_settings(
    engine: AlgoliaEngine, server: algolia.Server, index: str
) -> None:
    assert await engine.present([index, "none"]) == {}
    await engine.create(index)
    first = await engine.present([index, "none"])
    assert set(first) == {index}
    assert await engine.count(index) == 0
    await engine._do("PUT", index, "/settings", {"hitsPerPage": 7, "userData": {"own": 1}})
    await engine.write(index, [indexed("1")])
    await engine.create(f"{index}__building", like=index)
    settings = await engine._read("GET", f"/1/indexes/{index}__building/settings")
    assert settings["hitsPerPage"] == 7
    assert settings["userData"]["own"] == 1
    assert await engine.count(f"{index}__building") == 0
    assert await engine.count(index) == 1


async def test_an_index_deleted_and_made_anew_is_told_apart(engine: AlgoliaEngine, index: str) -> None:
    await engine.create(index)
    first = await engine.present([index])
    await engine.write(index, [indexed("1")])
    assert await engine.present([index]) == first
    await engine.drop(index)
    await engine.drop(index)
    assert await engine.present([index]) == {}
    # Algolia makes an index of whatever is written; it is not the one that was created.
    assert delivered(await engine.write(index, [indexed("2")]))
    assert await engine.present([index]) == {index: ""}
    await engine.create(index)
    assert await engine.present([index]) != first


async def test_a_late_write_does_not_bring_back_what_was_built(engine: AlgoliaEngine, index: str) -> None:
    fresh = f"{index}__building"
    await engine.create(index)
    await engine.create(fresh, like=index)
    await engine.replace(index, fresh)
    assert delivered(await engine.write(fresh, [indexed("late")]))
    assert set(await engine.present([index, fresh])) == {index}
    await engine.create(fresh, like=index)
    assert set(await engine.present([index, fresh])) == {index, fresh}
    assert await engine.count(fresh) == 0


async def test_replace_moves_the_fresh_one_over_the_live(engine: AlgoliaEngine, index: str) -> None:
    fresh = f"{index}__building"
    await engine.write(index, [indexed("old"), indexed("both", n=1)])
    await engine.create(fresh, like=index)
    marked = await engine.present([fresh])
    await engine.write(fresh, [indexed("both", n=2)])
    await engine.replace(index, fresh)
    assert await engine.present([index, fresh]) == {index: marked[fresh]}
    assert await engine.get(index, ["old", "both"]) == {"both": {"id": "both", "n": 2}}


async def test_replace_by_what_does_not_exist_leaves_the_live_one(engine: AlgoliaEngine, index: str) -> None:
    await engine.create(index)
    await engine.write(index, [indexed("1")])
    with pytest.raises(Unavailable, match="does not exist"):
        await engine.replace(index, f"{index}__building")
    assert await ids_of(engine, index) == ["1"]


async def test_scan_goes_on_from_page_to_page(engine: AlgoliaEngine, index: str) -> None:
    changes = [indexed(f"{at:04}") for at in range(2_300)]
    for begin in range(0, len(changes), engine.most):
        assert delivered(await engine.write(index, changes[begin : begin + engine.most]))
    pages = [page async for page in engine.scan(index)]
    assert [len(page) for page in pages] == [1000, 1000, 300]
    assert {id for page in pages for id in page} == {change.id for change in changes}
    assert len(await engine.get(index, [change.id for change in changes])) == 2_300
    assert await engine.count(index) == 2_300


async def test_an_index_that_does_not_exist(engine: AlgoliaEngine, index: str) -> None:
    with pytest.raises(Unavailable, match="does not exist"):
        await engine.count(index)
    with pytest.raises(Unavailable, match="does not exist"):
        await engine.get(index, ["1"])
    with pytest.raises(Unavailable, match="does not exist"):
        await ids_of(engine, index)


async def test_a_key_of_one_index_sees_no_other_that_is_built(
    server: algolia.Server, engine: AlgoliaEngine, index: str
) -> None:
    await engine.create(index)
    server.faults(status=403, times=1, path=f"/{index}__building/settings")
    assert list(await engine.present([index, f"{index}__building"])) == [index]
    server.faults(status=403, times=1, path=f"/{index}/settings")
    with pytest.raises(Unavailable, match="403"):
        await engine.present([index, f"{index}__building"])


async def test_check(engine: AlgoliaEngine) -> None:
    await engine.check()
    await engine.close()
    await engine.check()


def test_the_hosts_of_an_application() -> None:
    place = place_of(Destination("search", "algolia://ABCDEF1234/documents", auth="key"))
    others = tuple(f"https://ABCDEF1234-{number}.algolianet.com" for number in (1, 2, 3))
    assert place.writing == ("https://ABCDEF1234.algolia.net", *others)
    assert place.reading == ("https://ABCDEF1234-dsn.algolia.net", *others)
    assert place.application == "ABCDEF1234"
    assert place.ssl is not None


@pytest.mark.parametrize(
    ("sink", "options", "message"),
    [
        ("algolia://APP/x", {"tls": False}, "name it in host"),
        ("algolia://APP/x", {"host": "127.0.0.1"}, "write host:port"),
        ("algolia://APP/x", {"host": "h:1", "tls": False, "ca": "file"}, "ca is of no use"),
        ("algolia://APP/x", {"version_field": "id"}, "version_field"),
        ("algolia://a.b/x", {}, "APPLICATION-ID"),
        ("algolia://A,B/x", {}, "APPLICATION-ID"),
        ("algolia://APP/x", {"hots": "h:1"}, "host"),
    ],
)
def test_what_is_configured_wrongly_is_told(sink: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_engine(Destination("search", sink, auth="key", options=options))


def test_a_key_is_needed() -> None:
    with pytest.raises(ConfigError, match="auth"):
        open_engine(Destination("search", "algolia://APP/documents"))
