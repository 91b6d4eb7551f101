"""The Algolia engine, with a server behind it that behaves as Algolia's documentation says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest

from relaybox.core.outcome import Delivered, Reject, Throttled, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError
from relaybox.search.algolia.engine import open_engine
from relaybox.search.algolia.hosts import application_of
from relaybox.search.engine import Change
from relaybox.sinks.sink import Answer
from tests.contract.engines import Place, kinds, reason, rejected
from tests.servers import algolia
from tests.servers.algolia import Server
from tests.waiting import await_for

BAD_POINT: dict[str, Any] = {"_geoloc": "48.85,2.35"}
"""What Algolia refuses without a word of where it is."""


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    with algolia.server() as server:
        yield server


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    yield started
    started.faults()


@asynccontextmanager
async def opened(server: Server, **given: Any) -> AsyncIterator[Place]:
    """Open an engine for the server, and name an index of its own that does not exist yet."""
    engine = open_engine(destination(server, **given))
    try:
        yield Place(engine, f"documents-{uuid4().hex[:8]}")
    finally:
        await engine.close()


@pytest.fixture
async def place(server: Server) -> AsyncIterator[Place]:
    async with opened(server) as place:
        yield place


def destination(
    server: Server, url: str = "", timeout: str = "10s", auth: str = "", **options: Any
) -> Destination:
    return Destination("search", url or server.url, timeout=timeout, auth=auth or server.key, options=options)


def indexed(id: str, version: int = 1, **attributes: Any) -> Change:
    return Change(id, {"id": id, **attributes}, version)


def deleted(id: str, version: int = 1) -> Change:
    return Change(id, None, version)


def delivered(answers: Sequence[Answer]) -> bool:
    return all(isinstance(answer, Delivered) for answer in answers)


def batches(server: Server, place: Place) -> int:
    return sum(path == f"/1/indexes/{place.index}/batch" for _, path, _ in server.requests())


async def test_what_was_written_is_there_when_write_returns(place: Place) -> None:
    first, second = indexed("1", title="a"), indexed("2", title="b")
    assert delivered(await place.write([first, second]))
    assert await place.get(["1", "2", "3"]) == {"1": first.document, "2": second.document}
    assert delivered(await place.write([indexed("1", text="c"), deleted("2"), deleted("never")]))
    assert await place.get(["1", "2"]) == {"1": {"id": "1", "text": "c"}}
    assert await place.count() == 1


async def test_ids_of_any_letters(place: Place) -> None:
    ids = ["a/b", "ünï", "a b", '"', "?#%", "*", "," * 400]
    assert delivered(await place.write([indexed(id) for id in ids]))
    assert await place.ids() == sorted(ids)
    assert set(await place.get(ids)) == set(ids)
    assert delivered(await place.write([deleted(id) for id in ids]))
    assert await place.count() == 0


async def test_an_empty_id_and_a_foreign_object_id_are_rejected(place: Place, server: Server) -> None:
    answers = await place.write([indexed(""), indexed("1", objectID="1"), indexed("2")])
    assert kinds(answers) == [Reject, Reject, Delivered]
    assert "id_field" in reason(answers[1])
    async with opened(server, id_field="objectID") as own:
        assert delivered(await own.write([Change("7", {"objectID": "7", "n": 1}, 1)]))
        assert await own.get(["7"]) == {"7": {"objectID": "7", "n": 1}}


@pytest.mark.parametrize("terse", [False, True])
async def test_three_too_big_of_500(place: Place, server: Server, terse: bool) -> None:
    server.faults(terse=terse)
    sizes = {7: 30_000, 8: 20_000, 499: 40_000}
    answers = await place.write([indexed(str(at), text="x" * sizes.get(at, 10)) for at in range(500)])
    assert rejected(answers) == {7, 8, 499}
    assert "is too big size=300" in reason(answers[7])
    assert kinds(answers).count(Delivered) == await place.count() == 497
    # The last is larger than the first that was refused, and needs no request of its own.
    assert batches(server, place) == 3


async def test_bad_ones_that_algolia_does_not_name_are_found(place: Place, server: Server) -> None:
    bad = {3, 250, 499}
    answers = await place.write([indexed(str(at), **(BAD_POINT if at in bad else {})) for at in range(500)])
    assert rejected(answers) == bad
    assert all("_geoloc" in reason(answers[at]) for at in bad)
    assert await place.count() == 497
    assert batches(server, place) < 60


async def test_only_bad_ones(place: Place) -> None:
    assert await place.kinds([indexed(str(at), **BAD_POINT) for at in range(5)]) == [Reject] * 5
    assert await place.present() == {}


async def test_a_body_too_large_is_split(place: Place, server: Server) -> None:
    server.faults(body_limit=4_000)
    assert delivered(await place.write([indexed(str(at), text="x" * 300) for at in range(40)]))
    assert await place.count() == 40
    server.faults(body_limit=200)
    answers = await place.write([indexed("big", text="x" * 300), indexed("small")])
    assert kinds(answers) == [Reject, Delivered]
    assert "413" in reason(answers[0])


async def test_batches_are_not_larger_than_algolia_advises(
    place: Place, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaybox.search.algolia.engine.LARGEST_BODY", 1_000)
    sizes = [400, 400, 5_000, 400, 400]
    assert delivered(await place.write([indexed(str(at), text="x" * size) for at, size in enumerate(sizes)]))
    assert await place.count() == 5
    assert batches(server, place) == 3


async def test_throttled(place: Place, server: Server) -> None:
    server.faults(status=429, times=1, message="Too many jobs", retry_after="7")
    [answer] = await place.write([indexed("1")])
    assert isinstance(answer, Throttled)
    assert answer.after == 7
    assert "Too many jobs" in answer.reason
    assert delivered(await place.write([indexed("1")]))


async def test_half_done(place: Place, server: Server) -> None:
    server.faults(body_limit=1_200, status=429, times=100, skip=2, path="/batch")
    answers = await place.write([indexed(str(at), text="x" * 100) for at in range(12)])
    done = {str(at) for at, answer in enumerate(answers) if isinstance(answer, Delivered)}
    assert 0 < len(done) < 12
    assert kinds(answers).count(Throttled) == 12 - len(done)
    server.faults()
    assert set(await place.ids()) == done


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
async def test_trouble_of_the_application_is_not_blamed_on_an_event(
    place: Place, server: Server, status: int, message: str
) -> None:
    server.faults(status=status, message=message, times=2, path="/batch")
    answers = await place.write([indexed("1"), indexed("2")])
    assert len(answers) == 2
    for answer in answers:
        assert isinstance(answer, Unavailable)
        assert message in answer.reason


async def test_a_quota_of_records(place: Place, server: Server) -> None:
    server.faults(quota=0)
    said = await place.refused(indexed("1"))
    assert "Record quota" in said
    assert "auth" not in said


async def test_deletes_do_not_wait_for_the_room_that_they_make(place: Place, server: Server) -> None:
    assert delivered(await place.write([indexed("1"), indexed("2")]))
    server.faults(quota=1)
    first, second, third = await place.write([indexed("3"), deleted("1"), indexed("2", n=1)])
    assert isinstance(second, Delivered)
    for answer in (first, third):
        assert isinstance(answer, Unavailable)
        assert "Record quota" in answer.reason
    assert await place.ids() == ["2"]


async def test_a_wrong_key_is_reported_and_not_shown(server: Server) -> None:
    async with opened(server, auth="verysecret") as wrong:
        said = await wrong.refused(indexed("1"))
        assert "Invalid Application-ID or API key" in said
        assert "auth" in said
        assert "verysecret" not in said
        for asked in (wrong.engine.check(), wrong.present()):
            with pytest.raises(Unavailable, match="403"):
                await asked


@pytest.mark.parametrize("fault", [{"stuck": True}, {"lose": 1}])
async def test_an_unpublished_task_is_not_delivered(
    place: Place, server: Server, fault: dict[str, Any]
) -> None:
    server.faults(**fault)
    # Long enough for all that comes before the wait for the task.
    async with opened(server, timeout="2s") as hasty:
        bad, answer = await hasty.engine.write(place.index, [indexed("bad", **BAD_POINT), indexed("1")])
    assert isinstance(bad, Reject)
    assert isinstance(answer, Unavailable)
    assert "not published" in answer.reason
    server.faults()
    assert delivered(await place.write([indexed("1")]))
    assert await place.ids() == ["1"]


async def test_a_server_that_dies_before_the_task_is_published(place: Place, server: Server) -> None:
    server.faults(stuck=True)
    writing = asyncio.create_task(place.refused(indexed("1", n=1)))
    await await_for(lambda: batches(server, place))
    server.kill()
    try:
        await writing
        await place.refused(indexed("1", n=1), Unreachable)
    finally:
        server.start()
    assert delivered(await place.write([indexed("1", n=1)]))
    assert await place.get(["1"]) == {"1": {"id": "1", "n": 1}}


async def test_an_answer_that_gets_lost(place: Place, server: Server) -> None:
    server.faults(drop=2, path="/batch")
    await place.refused(indexed("1", n=1))
    server.faults()
    assert delivered(await place.write([indexed("1", n=2)]))
    assert await place.get(["1"]) == {"1": {"id": "1", "n": 2}}


async def test_a_server_that_says_nothing(server: Server) -> None:
    async with opened(server, timeout="200ms") as place:
        with server.silent():
            assert "no answer" in await place.refused(indexed("1"))


async def written(place: Place, change: Change) -> bool:
    return delivered(await place.write([change]))


@pytest.fixture
def other() -> Iterator[Server]:
    with algolia.server() as other:
        yield other


@asynccontextmanager
async def of_both(first: Server, second: Server, **given: Any) -> AsyncIterator[Place]:
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in (first, second))
    url = f"algolia://{algolia.APPLICATION}/documents?host={hosts}&tls=false"
    async with opened(first, url=url, **given) as place:
        yield place


async def test_what_there_is_room_for_is_written(other: Server) -> None:
    other.faults(quota=5)
    async with opened(other) as place:
        assert await place.kinds([indexed(str(at)) for at in range(16)]) == [Delivered] * 4 + [Throttled] * 12
        assert await place.ids() == ["0", "1", "2", "3"]
        assert batches(other, place) == 3


async def test_a_host_in_trouble_is_asked_after_the_others(server: Server, other: Server) -> None:
    other.faults(status=503, times=100)
    async with of_both(other, server) as place:
        assert delivered(await place.write([indexed("1")]))
        asked = len(other.requests())
        assert delivered(await place.write([indexed("2")]))
        assert len(other.requests()) == asked
        assert await place.ids() == ["1", "2"]


async def test_a_host_that_is_away_is_passed_over(server: Server, other: Server) -> None:
    async with of_both(other, server) as place:
        other.kill()
        assert delivered(await place.write([indexed("1")]))
        assert await place.ids() == ["1"]


async def test_a_host_that_says_nothing_is_asked_last_from_then_on(server: Server, other: Server) -> None:
    async with of_both(other, server, timeout="2s") as place:
        with other.silent():
            await place.refused(indexed("1"))
            # Were it asked first again, it would be so each time.
            await await_for(lambda: written(place, indexed("1")))
        assert await place.ids() == ["1"]


async def test_when_all_hosts_are_away(other: Server) -> None:
    async with of_both(other, other) as place:
        other.kill()
        await place.refused(indexed("1"), Unreachable)
        with pytest.raises(Unreachable):
            await place.engine.check()


async def test_an_older_version_never_replaces_a_newer(server: Server) -> None:
    async with opened(server, version_field="_version") as place:
        newer = indexed("1", 5, title="new", more=1)
        assert delivered(await place.write([newer]))
        assert delivered(await place.write([indexed("1", 4, title="old"), indexed("2", 4)]))
        assert await place.get(["1", "2"]) == {"1": newer.document, "2": {"id": "2"}}
        assert delivered(await place.write([indexed("1", 6, title="newest")]))
        assert await place.get(["1"]) == {"1": {"id": "1", "title": "newest", "more": 1}}
        assert delivered(await place.write([deleted("1", 1)]))
        assert await place.get(["1"]) == {}


async def test_what_a_versioned_document_must_not_have(server: Server) -> None:
    async with opened(server, version_field="_version") as place:
        assert "version_field" in await place.refused(indexed("1", _version=3), Reject)
        operation = {"_operation": "Increment", "value": 1}
        assert "_operation" in await place.refused(indexed("2", n=operation), Reject)


async def test_create_marks_an_index_and_takes_over_settings(place: Place) -> None:
    assert await place.present(place.index, "none") == {}
    await place.engine.create(place.index)
    first = await place.present(place.index, "none")
    assert set(first) == {place.index}
    assert await place.count() == 0
    await place.engine._hosts.do("PUT", place.index, "/settings", {"hitsPerPage": 7, "userData": {"own": 1}})
    await place.write([indexed("1")])
    await place.build()
    settings = await place.engine._hosts.json("GET", f"/1/indexes/{place.index}__building/settings")
    assert settings["hitsPerPage"] == 7
    assert settings["userData"]["own"] == 1
    assert await place.engine.count(place.building) == 0
    assert await place.count() == 1


async def test_an_index_that_was_deleted_and_made_again_is_recognised(place: Place) -> None:
    await place.engine.create(place.index)
    first = await place.present(place.index)
    await place.write([indexed("1")])
    assert await place.present(place.index) == first
    await place.engine.drop(place.index)
    await place.engine.drop(place.index)
    assert await place.present(place.index) == {}
    # Algolia makes an index of whatever is written; it is not the one that was created.
    assert delivered(await place.write([indexed("2")]))
    assert await place.present(place.index) == {place.index: ""}
    await place.engine.create(place.index)
    assert await place.present(place.index) != first


async def test_a_late_write_does_not_bring_back_what_was_built(place: Place) -> None:
    await place.engine.create(place.index)
    await place.build()
    await place.replace()
    assert delivered(await place.engine.write(place.building, [indexed("late")]))
    assert set(await place.present()) == {place.index}
    await place.build()
    assert set(await place.present()) == {place.index, place.building}
    assert await place.engine.count(place.building) == 0


async def test_replace_moves_the_fresh_one_over_the_live(place: Place) -> None:
    await place.write([indexed("old"), indexed("both", n=1)])
    await place.build()
    marked = await place.present(place.building)
    await place.engine.write(place.building, [indexed("both", n=2)])
    await place.replace()
    assert await place.present() == {place.index: marked[place.building]}
    assert await place.get(["old", "both"]) == {"both": {"id": "both", "n": 2}}


async def test_replace_by_what_does_not_exist_leaves_the_live_one(place: Place) -> None:
    await place.engine.create(place.index)
    await place.write([indexed("1")])
    with pytest.raises(Unavailable, match="does not exist"):
        await place.replace()
    assert await place.ids() == ["1"]


async def test_scan_goes_on_from_page_to_page(place: Place) -> None:
    changes = [indexed(f"{at:04}") for at in range(2_300)]
    for begin in range(0, len(changes), place.engine.most):
        assert delivered(await place.write(changes[begin : begin + place.engine.most]))
    pages = [page async for page in place.engine.scan(place.index)]
    assert [len(page) for page in pages] == [1000, 1000, 300]
    assert {id for page in pages for id in page} == {change.id for change in changes}
    assert len(await place.get([change.id for change in changes])) == 2_300
    assert await place.count() == 2_300


async def test_an_index_that_does_not_exist(place: Place) -> None:
    for asked in (place.count(), place.get(["1"]), place.ids()):
        with pytest.raises(Unavailable, match="does not exist"):
            await asked


async def test_a_key_of_one_index_sees_no_other_that_is_built(server: Server, place: Place) -> None:
    await place.engine.create(place.index)
    server.faults(status=403, times=1, path=f"/{place.index}__building/settings")
    assert list(await place.present()) == [place.index]
    server.faults(status=403, times=1, path=f"/{place.index}/settings")
    with pytest.raises(Unavailable, match="403"):
        await place.present()


async def test_check(place: Place) -> None:
    await place.engine.check()
    await place.engine.close()
    await place.engine.check()


def test_the_hosts_of_an_application() -> None:
    application = application_of(Destination("search", "algolia://ABCDEF1234/documents", auth="key"))
    others = tuple(f"https://ABCDEF1234-{number}.algolianet.com" for number in (1, 2, 3))
    assert application.writing == ("https://ABCDEF1234.algolia.net", *others)
    assert application.reading == ("https://ABCDEF1234-dsn.algolia.net", *others)
    assert application.id == "ABCDEF1234"
    assert application.ssl is not None


@pytest.mark.parametrize(
    ("sink", "auth", "options", "message"),
    [
        ("algolia://APP/x", "key", {"tls": False}, "name it in host"),
        ("algolia://APP/x", "key", {"host": "127.0.0.1"}, "write host:port"),
        ("algolia://APP/x", "key", {"host": "h:1", "tls": False, "ca": "file"}, "ca is of no use"),
        ("algolia://APP/x", "key", {"version_field": "id"}, "version_field"),
        ("algolia://a.b/x", "key", {}, "APPLICATION-ID"),
        ("algolia://A,B/x", "key", {}, "APPLICATION-ID"),
        ("algolia://APP/x", "key", {"hots": "h:1"}, "host"),
        ("algolia://APP/x", None, {}, "auth"),
    ],
)
def test_a_wrong_setting_is_reported(
    sink: str, auth: str | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_engine(Destination("search", sink, auth=auth, options=options))
