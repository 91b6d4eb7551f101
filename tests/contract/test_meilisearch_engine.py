"""What the engine for Meilisearch makes of its tasks, its refusals and its faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest

from relaybox.core.outcome import Delivered, Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError
from relaybox.search.engine import Change
from relaybox.search.meilisearch import server as meilisearch_server
from relaybox.search.meilisearch import writer as meilisearch_writer
from relaybox.search.meilisearch.engine import MeilisearchEngine
from relaybox.search.meilisearch.server import Task
from relaybox.sinks.sink import Answer
from tests.conftest import available
from tests.contract.engines import Place, kinds, reason, rejected
from tests.servers import meilisearch
from tests.servers.meilisearch import Server, destination_url
from tests.waiting import await_for, cancel

LIMIT = 40_000
"""Bytes of a payload that the server takes."""


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    with available("Meilisearch", meilisearch.server(limit=LIMIT)) as started:
        yield started


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    """Run a server that takes faults."""
    if not started.imitated:
        pytest.skip("MEILISEARCH_URL names a real server, which takes no faults")
    yield started
    started.fault()


@pytest.fixture
async def engine(started: Server) -> AsyncIterator[MeilisearchEngine]:
    async with opened(started) as engine:
        yield engine


@pytest.fixture
async def place(engine: MeilisearchEngine) -> Place:
    place = Place(engine, f"documents-{uuid4()}")
    await engine.create(place.index)
    return place


@asynccontextmanager
async def opened(
    server: Server, *, within: str = "10s", auth: str | None = "", **options: Any
) -> AsyncIterator[MeilisearchEngine]:
    """Open an engine for the server, with its key unless ``auth`` says otherwise."""
    url, key = destination_url(server, "documents"), server.key if auth == "" else auth
    engine = MeilisearchEngine(Destination("search", url, auth=key, timeout=within, options=options))
    try:
        yield engine
    finally:
        await engine.close()


async def configure(server: Server, index: str, settings: dict[str, Any]) -> None:
    task = server.ask("PATCH", f"/indexes/{index}/settings", settings)
    await await_for(lambda: server.ask("GET", f"/tasks/{task['taskUid']}")["status"] == "succeeded")


def put(name: str | int, **fields: Any) -> Change:
    return Change(str(name), {"id": name, "title": f"title {name}", **fields}, 1)


def gone(name: str) -> Change:
    return Change(name, None, 1)


async def test_changes_are_done_when_they_are_answered(place: Place) -> None:
    assert await place.kinds([put("a", old=1), put(7), put("c")]) == [Delivered] * 3
    replaced = Change("a", {"id": "a", "new": 2}, 2)
    assert await place.kinds([replaced, gone("c"), gone("never-there")]) == [Delivered] * 3
    found = await place.get(["a", "7", "c", "no id at all"])
    assert found == {"a": {"id": "a", "new": 2}, "7": {"id": 7, "title": "title 7"}}
    assert await place.ids() == ["7", "a"]
    assert await place.count() == 2


async def test_more_documents_than_a_page_are_scanned_and_got(place: Place) -> None:
    names = [f"d{number}" for number in range(2100)]
    for begin in range(0, len(names), 300):
        await place.write([put(name) for name in names[begin : begin + 300]])
    assert await place.ids() == sorted(names)
    assert (await place.get(names)).keys() == set(names)


@pytest.mark.parametrize("name", ["a b", "", "grün", "a/b", "x" * 512])
async def test_an_id_that_meilisearch_never_takes_is_not_sent(place: Place, name: str) -> None:
    bad, good, deleted = await place.write([put(name), put("good"), gone(name)])
    assert kinds([bad, good, deleted]) == [Reject, Delivered, Reject]
    assert "is not an id for Meilisearch" in reason(bad)
    assert await place.ids() == ["good"]


async def test_an_index_name_that_meilisearch_never_takes_is_refused(engine: MeilisearchEngine) -> None:
    with pytest.raises(Reject, match="'a b' is not an index"):
        await engine.write("a b", [put("a")])
    with pytest.raises(Reject, match="'a b' is not an index"):
        await engine.present(["a b"])


async def test_bad_documents_fail_alone(started: Server, place: Place) -> None:
    await configure(started, place.index, {"filterableAttributes": ["_geo"]})
    bad = {17, 250, 499}
    changes = [put(f"d{n}", **({"_geo": "nowhere"} if n in bad else {})) for n in range(500)]
    answers = await place.write(changes)
    assert rejected(answers) == bad
    assert kinds(answers).count(Delivered) == 497
    assert "`_geo`" in reason(answers[17])
    assert "(invalid_document_geo_field)" in reason(answers[17])
    assert await place.count() == 497


async def test_a_bad_document_that_is_not_named_is_found(place: Place) -> None:
    # Its id is a number with a fraction; what the message names is not what the change is called.
    changes = [put(f"d{n}") for n in range(20)]
    changes[11] = Change("1-5", {"id": 1.5}, 1)
    answers = await place.write(changes)
    assert kinds(answers) == [Delivered] * 11 + [Reject] + [Delivered] * 8
    assert "(invalid_document_id)" in reason(answers[11])
    assert await place.count() == 19


async def test_a_document_that_is_not_json_is_rejected(place: Place) -> None:
    assert await place.kinds([put("a", value=object()), put("b")]) == [Reject, Delivered]


async def test_too_large_a_payload_goes_in_parts(server: Server, place: Place) -> None:
    changes = [put(f"d{n}", body="x" * 9_000) for n in range(10)]
    changes[4] = put("d4", body="x" * (LIMIT + 1))
    answers = await place.write(changes)
    assert rejected(answers) == {4}
    assert "413" in reason(answers[4])
    assert await place.count() == 9


async def test_a_very_large_request_is_not_even_tried(
    server: Server, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meilisearch_writer, "LARGEST_BODY", 1000)
    before = server.asked()
    changes = [*(put(f"d{n}", body="x" * 300) for n in range(8)), put("large", body="x" * 2000)]
    assert await place.kinds(changes) == [Delivered] * 9
    sent = Counter(server.asked()) - Counter(before)
    assert sent["POST /indexes/{uid}/documents"] > 4
    assert await place.count() == 9


CODES: dict[str, type[Answer]] = {"internal": Retry, "vector_embedding_error": Retry}
CODES |= dict.fromkeys(("no_space_left_on_device", "database_size_limit_reached"), Throttled)
CODES |= dict.fromkeys(("index_not_found", "io_error", "too_many_open_files"), Unavailable)


@pytest.mark.parametrize("code", CODES)
async def test_a_failed_task_means_what_its_code_says(server: Server, place: Place, code: str) -> None:
    server.fault(tasks=({"code": code, "count": 1000},))
    answers = await place.write([put("a"), put("b")])
    assert kinds(answers) == [CODES[code]] * 2
    assert f"({code})" in reason(answers[0])
    server.fault()
    assert await place.kinds([put("a"), put("b")]) == [Delivered] * 2


async def test_one_of_two_tasks_may_fail(server: Server, place: Place) -> None:
    await place.write([put("old")])
    server.fault(tasks=({"code": "internal", "count": 1, "type": "documentDeletion"},))
    assert await place.kinds([put("new"), gone("old")]) == [Delivered, Retry]
    assert await place.ids() == ["new", "old"]


async def test_an_unexplained_refusal_fails_nobody_for_good(server: Server, place: Place) -> None:
    fault = {"code": "unheard_of", "count": 1}
    server.fault(tasks=(fault,))
    assert await place.kinds([put("a"), put("b")]) == [Delivered] * 2
    server.fault(tasks=(fault,))
    assert await place.kinds([put("c")]) == [Retry]


async def test_a_canceled_task_is_tried_again(server: Server, place: Place) -> None:
    server.fault(paused=True)
    writing = asyncio.create_task(place.refused(put("a"), Retry))
    enqueued = await await_for(lambda: waiting(server, place))
    server.ask("POST", f"/tasks/cancel?uids={enqueued[0]['uid']}")
    assert (await writing).endswith("was canceled")


async def test_a_task_that_stays_enqueued_is_unavailable(server: Server, place: Place) -> None:
    server.fault(paused=True)
    async with opened(server, within="300ms") as engine:
        said = await Place(engine, place.index).refused(put("a"))
    assert said.endswith("is still enqueued after 0.3s")
    server.fault()
    await await_for(lambda: not waiting(server, place))
    assert await place.ids() == ["a"]


def waiting(server: Server, place: Place) -> Any:
    return server.ask("GET", f"/tasks?indexUids={place.index}&statuses=enqueued,processing")["results"]


async def written_at_once(server: Server, place: Place, count: int) -> int:
    """Write documents whose tasks all wait, and then all end; return the number of looks at them."""
    server.fault(paused=True)
    writing = [asyncio.create_task(place.kinds([put(f"d{n}")])) for n in range(count)]
    await await_for(lambda: len(waiting(server, place)) == count)
    before = server.asked()["GET /tasks"]
    server.fault()
    assert await asyncio.gather(*writing) == [[Delivered]] * count
    return server.asked()["GET /tasks"] - before


async def test_one_look_is_for_all_tasks(server: Server, place: Place) -> None:
    assert await written_at_once(server, place, 20) < 20


async def test_tasks_are_seen_in_parts(server: Server, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meilisearch_server, "AT_A_TIME", 3)
    assert await written_at_once(server, place, 10)


PLAIN = "<html>The plain HTTP request was sent to HTTPS port</html>"
OTHERS: list[tuple[int, str, str, type[Answer], str]] = [
    (200, '{"results": []}', "GET /tasks", Retry, "knows nothing of its task"),
    (200, "<html>Welcome</html>", "GET /tasks", Unavailable, "is it Meilisearch?"),
    (200, "<html>Welcome</html>", "POST /indexes", Unavailable, "is it Meilisearch?"),
    (400, PLAIN, "GET /tasks", Unavailable, "400 Bad"),
    (400, PLAIN, "POST /indexes", Unavailable, "400 Bad"),
    (500, "{}", "GET /tasks", Unavailable, "500"),
]


@pytest.mark.parametrize(("status", "text", "on", "kind", "said"), OTHERS)
async def test_an_answer_that_meilisearch_does_not_give_fails_no_event(
    server: Server, place: Place, status: int, text: str, on: str, kind: type[Answer], said: str
) -> None:
    server.fault(requests=({"status": status, "text": text, "count": 1, "on": on},))
    answers = await place.write([put("a"), put("b")])
    assert kinds(answers) == [kind] * 2
    assert said in reason(answers[0])


@pytest.mark.parametrize("text", ["{}", "[]", '{"createdAt": 1}', '{"createdAt": "now", "primaryKey": "id"}'])
async def test_an_index_that_others_tell_of_is_unavailable(server: Server, place: Place, text: str) -> None:
    other = {"status": 200, "text": text, "count": 1, "on": "GET /indexes"}
    server.fault(requests=(other,))
    assert "is it Meilisearch?" in await place.refused(put("a"))
    server.fault(requests=(other,))
    with pytest.raises(Unavailable, match=r"is it Meilisearch\?"):
        await place.present(place.index)


async def test_an_internal_failure_of_one_document_is_not_the_others(server: Server, place: Place) -> None:
    server.fault(tasks=({"code": "internal", "count": 2},))
    answers = await place.write([put("a"), put("b"), put("c"), put("d")])
    assert kinds(answers) == [Delivered] * 4


async def test_a_cancelled_write_leaves_nothing_behind(server: Server, place: Place) -> None:
    server.fault(paused=True)
    before = asyncio.all_tasks()
    writing = asyncio.create_task(place.write([put("a"), gone("b")]))
    await await_for(lambda: len(waiting(server, place)) == 2)
    await cancel(writing)
    await await_for(lambda: asyncio.all_tasks() <= before)
    server.fault()
    assert await place.kinds([put("c")]) == [Delivered]


async def test_a_closed_engine_lets_go_of_those_who_wait(server: Server, place: Place) -> None:
    server.fault(paused=True)
    async with opened(server) as engine:
        writing = asyncio.create_task(engine.write(place.index, [put("a")]))
        await await_for(lambda: waiting(server, place))
        await engine.close()
        [answer] = await writing
    assert isinstance(answer, Retry | Unavailable)


async def test_the_wait_that_a_server_asks_for_is_reported(server: Server, place: Place) -> None:
    for status, kind in ((429, Throttled), (503, Unavailable)):
        server.fault(requests=({"status": status, "after": 7, "count": 1, "on": "POST"},))
        [answer] = await place.write([put("a")])
        assert type(answer) is kind
        assert isinstance(answer, Unavailable)
        assert answer.after == 7


async def test_a_look_that_is_too_much_is_tried_again(server: Server, place: Place) -> None:
    server.fault(requests=({"status": 429, "after": 0, "count": 1, "on": "GET /tasks"},))
    assert await place.kinds([put("a")]) == [Delivered]


async def test_a_full_database_is_unavailable(server: Server, place: Place) -> None:
    server.fault(quota=0)
    assert "database_size_limit_reached" in await place.refused(put("a"))


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_lost_answer_is_unavailable(server: Server, place: Place, when: str) -> None:
    server.fault(requests=({"drop": when, "count": 2, "on": "POST /indexes/.*/documents"},))
    [answer] = await place.write([put("a")])
    assert isinstance(answer, Unavailable)
    assert await place.kinds([put("a")]) == [Delivered]
    assert await place.ids() == ["a"]


@pytest.mark.parametrize("key", ["another-key", None])
async def test_a_wrong_key_is_reported_and_not_shown(server: Server, place: Place, key: str | None) -> None:
    async with opened(server, auth=key) as engine:
        said = await Place(engine, place.index).refused(put("a"))
        assert "auth" in said
        assert "another-key" not in said
        with pytest.raises(Unavailable, match="auth"):
            await engine.check()


async def test_a_server_that_restarts_meanwhile_keeps_what_it_accepted(server: Server, place: Place) -> None:
    await place.write([put("before")])
    server.fault(paused=True)
    writing = asyncio.create_task(place.write([put("during")]))
    await await_for(lambda: waiting(server, place))
    server.kill()
    [answer] = await writing
    assert isinstance(answer, Unavailable)
    with pytest.raises(Unreachable):
        await place.engine.check()
    server.start()
    assert await place.kinds([put("after")]) == [Delivered]
    assert await place.ids() == ["after", "before", "during"]


async def test_a_silent_server_is_unavailable(server: Server, place: Place) -> None:
    async with opened(server, within="200ms") as engine:
        with server.silent():
            assert "within 0.2s" in await Place(engine, place.index).refused(put("a"))


async def test_an_index_that_is_gone_is_not_made_by_what_is_written(place: Place) -> None:
    await place.engine.drop(place.index)
    assert "does not exist" in await place.refused(put("a"))
    assert "(index_not_found)" in await place.refused(gone("b"))
    assert await place.present() == {}


async def test_what_was_added_to_an_index_that_is_deleted_meanwhile_is_not_delivered(place: Place) -> None:
    async def look(name: str) -> Any:
        await place.engine.drop(name)
        return await really_look(name)

    known = place.engine._server
    really_look, known.index = known.index, look
    assert "does not exist" in await place.refused(put("a"))


async def test_an_index_is_not_made_by_a_document_that_is_refused_either(place: Place) -> None:
    await place.engine.drop(place.index)
    bad, good = await place.write([Change("1-5", {"id": 1.5}, 1), put("b")])
    # Where both are run in one go, the index is not there for the bad one either.
    assert isinstance(bad, Reject | Unavailable)
    assert isinstance(good, Unavailable)
    assert await place.present() == {}


async def test_an_index_that_was_there_before_is_never_taken_for_one_that_was_made(place: Place) -> None:
    at = datetime.fromisoformat((await place.present())[place.index])
    task = Task(1, "succeeded", None, at, at)
    assert not place.engine._writer.was_made_by(task, place.index, at)
    place.engine._writer._created.clear()
    assert place.engine._writer.was_made_by(task, place.index, at)


async def test_an_index_may_be_made_where_that_is_wanted(started: Server) -> None:
    async with opened(started, create_index=True) as engine:
        place = Place(engine, f"documents-{uuid4()}")
        assert await place.kinds([put("a")]) == [Delivered]
        assert list(await place.present()) == [place.index]
        assert kinds(await engine.write(place.building, [put("a")])) == [Unavailable]
        assert list(await place.present()) == [place.index]


async def test_another_primary_key_is_not_blamed_on_a_document(started: Server, place: Place) -> None:
    async with opened(started, id_field="sku") as engine:
        said = await Place(engine, place.index).refused(Change("a", {"sku": "a"}, 1))
    assert "is 'id', not 'sku': set id_field" in said


async def test_an_index_that_exists_is_not_made_again(place: Place) -> None:
    await place.write([put("a")])
    with pytest.raises(Retry, match="index_already_exists"):
        await place.engine.create(place.index)
    assert await place.count() == 1


async def test_a_key_of_one_index_sees_no_other_that_is_built(server: Server, place: Place) -> None:
    server.fault(requests=({"status": 403, "count": 1, "on": f"^GET /indexes/{place.index}__building"},))
    assert list(await place.present()) == [place.index]
    server.fault(requests=({"status": 403, "count": 1, "on": f"^GET /indexes/{place.index}$"},))
    with pytest.raises(Unavailable, match="403"):
        await place.present()


async def test_an_index_without_its_settings_does_not_stay(server: Server, place: Place) -> None:
    server.fault(tasks=({"code": "internal", "count": 1, "type": "settingsUpdate"},))
    with pytest.raises(Retry, match="internal"):
        await place.build()
    assert list(await place.present()) == [place.index]


async def test_a_new_index_takes_the_place_of_the_old_one(started: Server, place: Place) -> None:
    await configure(started, place.index, {"synonyms": {"car": ["auto"]}})
    await place.write([put("old")])
    await place.build()
    settings = started.ask("GET", f"/indexes/{place.building}/settings")
    assert settings == started.ask("GET", f"/indexes/{place.index}/settings")
    assert settings["synonyms"] == {"car": ["auto"]}
    assert started.ask("GET", f"/indexes/{place.building}")["primaryKey"] == "id"
    await place.engine.write(place.building, [put("new")])
    before = await place.present()
    assert before[place.index] != before[place.building]
    await place.replace()
    assert await place.ids() == ["new"]
    assert await place.present() == {place.index: before[place.building]}


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_swap_is_done_once_if_its_answer_is_lost(server: Server, place: Place, when: str) -> None:
    await place.build()
    await place.engine.write(place.building, [put("new")])
    server.fault(requests=({"drop": when, "count": 1, "on": "POST /swap-indexes"},))
    await place.replace()
    assert await place.ids() == ["new"]
    assert list(await place.present()) == [place.index]


async def test_an_index_takes_a_place_where_none_was(place: Place) -> None:
    await place.write([put("new")])
    live = f"live-{uuid4()}"
    await place.engine.replace(live, place.index)
    assert await place.ids(live) == ["new"]
    assert list(await place.present(live, place.index)) == [live]


async def test_an_index_that_does_not_exist_has_no_documents(engine: MeilisearchEngine) -> None:
    never = Place(engine, f"never-{uuid4()}")
    await engine.drop(never.index)
    assert await never.present() == {}
    for asked in (never.count(), never.get(["a"]), never.ids()):
        with pytest.raises(Unavailable, match="not found"):
            await asked


async def test_an_embedders_key_is_not_copied(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = place.engine._server.json

    async def with_embedder(method: str, path: str, *more: Any, **named: Any) -> Any:
        answer = await asking(method, path, *more, **named)
        return {**answer, "embedders": {"ai": {"apiKey": "XXX..."}}} if path.endswith("/settings") else answer

    monkeypatch.setattr(place.engine._server, "json", with_embedder)
    with pytest.raises(Unavailable, match="embedder 'ai' has an apiKey"):
        await place.build()
    assert list(await place.present()) == [place.index]


def test_one_host_is_enough() -> None:
    with pytest.raises(ConfigError, match="more than one host"):
        MeilisearchEngine(Destination("search", "meilisearch://one,two/documents"))


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("meilisearchs://search.example/documents", "search.example:7700"),
        ("meilisearch://key@search.example:80", "search.example:80"),
        ("meilisearch://[::1]:7701/documents", "[::1]:7701"),
    ],
)
def test_where_names_host_and_port(url: str, where: str) -> None:
    assert MeilisearchEngine(Destination("search", url)).where == where


async def test_a_server_without_tls_is_not_reached_with_it(started: Server) -> None:
    url = f"meilisearchs://{started.url.partition('://')[2]}/documents"
    engine = MeilisearchEngine(Destination("search", url, auth=started.key))
    with pytest.raises(Unreachable, match="TLS"):
        await engine.check()
    await engine.close()
