"""What the engine for Meilisearch makes of its tasks, its refusals and its faults."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest

from relaybox.config import Destination
from relaybox.engine import Change
from relaybox.errors import ConfigError
from relaybox.outcome import Delivered, Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.sink import Answer
from relaybox.sinks import meilisearch_piece, meilisearch_tasks
from relaybox.sinks.meilisearch import MeilisearchEngine, open_engine
from relaybox.sinks.meilisearch_tasks import Task
from tests.conftest import available
from tests.servers import meilisearch
from tests.servers.meilisearch import Server, destination_url

LIMIT = 40_000
"""Bytes of a payload that the server takes."""


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    with available("Meilisearch", meilisearch.server(limit=LIMIT)) as started:
        yield started


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    """One that takes faults."""
    if not started.imitated:
        pytest.skip("MEILISEARCH_URL names a real server, which takes no faults")
    yield started
    started.fault()


@pytest.fixture
async def engine(started: Server) -> AsyncIterator[MeilisearchEngine]:
    async with opened(started) as engine:
        yield engine


@pytest.fixture
async def index(engine: MeilisearchEngine) -> str:
    name = f"documents-{uuid4()}"
    await engine.create(name)
    return name


@asynccontextmanager
async def opened(
    server: Server, *, within: str = "10s", auth: str | None = "", **options: Any
) -> AsyncIterator[MeilisearchEngine]:
    """An engine for the server, with its key unless ``auth`` says otherwise."""
    url, key = destination_url(server, "documents"), server.key if auth == "" else auth
    engine = open_engine(Destination("search", url, auth=key, timeout=within, options=options))
    try:
        yield engine
    finally:
        await engine.close()


async def configure(server: Server, index: str, settings: dict[str, Any]) -> None:
    task = server.ask("PATCH", f"/indexes/{index}/settings", settings)
    await until(lambda: server.ask("GET", f"/tasks/{task['taskUid']}")["status"] == "succeeded")


def put(name: str | int, **fields: Any) -> Change:
    return Change(str(name), {"id": name, "title": f"title {name}", **fields}, 1)


def gone(name: str) -> Change:
    return Change(name, None, 1)


def kinds(answers: Sequence[Answer]) -> list[type[Answer]]:
    return [type(answer) for answer in answers]


def reason(answer: Answer) -> str:
    assert isinstance(answer, Retry | Reject | Unavailable)
    return answer.reason


async def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 10
    while not (found := condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return found


async def ids_of(engine: MeilisearchEngine, index: str) -> set[str]:
    return {each async for page in engine.scan(index) for each in page}


async def test_changes_are_done_when_they_are_answered(engine: MeilisearchEngine, index: str) -> None:
    assert kinds(await engine.write(index, [put("a"), put(7), put("c")])) == [Delivered] * 3
    assert kinds(await engine.write(index, [put("a", new=True), gone("c"), gone("never-there")])) == (
        [Delivered] * 3
    )
    assert await engine.get(index, ["a", "7", "c", "no id at all"]) == {
        "a": {"id": "a", "title": "title a", "new": True},
        "7": {"id": 7, "title": "title 7"},
    }
    assert await ids_of(engine, index) == {"a", "7"}
    assert await engine.count(index) == 2


async def test_a_document_is_replaced_and_not_merged(engine: MeilisearchEngine, index: str) -> None:
    await engine.write(index, [put("a", old=1)])
    await engine.write(index, [Change("a", {"id": "a", "new": 2}, 2)])
    assert await engine.get(index, ["a"]) == {"a": {"id": "a", "new": 2}}


async def test_more_documents_than_a_page_are_scanned_and_got(engine: MeilisearchEngine, index: str) -> None:
    names = [f"d{number}" for number in range(2100)]
    for begin in range(0, len(names), 300):
        await engine.write(index, [put(name) for name in names[begin : begin + 300]])
    assert await ids_of(engine, index) == set(names)
    assert (await engine.get(index, names)).keys() == set(names)


@pytest.mark.parametrize("name", ["a b", "", "grün", "a/b", "x" * 512])
async def test_an_id_that_meilisearch_never_takes_is_not_sent(
    engine: MeilisearchEngine, index: str, name: str
) -> None:
    bad, good, deleted = await engine.write(index, [put(name), put("good"), gone(name)])
    assert kinds([bad, good, deleted]) == [Reject, Delivered, Reject]
    assert "is no id for Meilisearch" in reason(bad)
    assert await ids_of(engine, index) == {"good"}


async def test_an_index_name_that_meilisearch_never_takes_is_refused(engine: MeilisearchEngine) -> None:
    with pytest.raises(Reject, match="'a b' is no index"):
        await engine.write("a b", [put("a")])
    with pytest.raises(Reject, match="'a b' is no index"):
        await engine.present(["a b"])


async def test_bad_documents_fail_alone(started: Server, engine: MeilisearchEngine, index: str) -> None:
    await configure(started, index, {"filterableAttributes": ["_geo"]})
    bad = {17, 250, 499}
    changes = [put(f"d{n}", **({"_geo": "nowhere"} if n in bad else {})) for n in range(500)]
    answers = await engine.write(index, changes)
    assert {n for n, answer in enumerate(answers) if isinstance(answer, Reject)} == bad
    assert all(isinstance(answer, Delivered) for n, answer in enumerate(answers) if n not in bad)
    assert "`_geo`" in reason(answers[17])
    assert "(invalid_document_geo_field)" in reason(answers[17])
    assert await engine.count(index) == 497


async def test_a_bad_document_that_is_not_named_is_found(engine: MeilisearchEngine, index: str) -> None:
    # Its id is a number with a fraction; what the message names is not what the change is called.
    changes = [put(f"d{n}") for n in range(20)]
    changes[11] = Change("1-5", {"id": 1.5}, 1)
    answers = await engine.write(index, changes)
    assert [n for n, answer in enumerate(answers) if not isinstance(answer, Delivered)] == [11]
    assert "(invalid_document_id)" in reason(answers[11])
    assert isinstance(answers[11], Reject)
    assert await engine.count(index) == 19


async def test_what_is_no_json_is_rejected(engine: MeilisearchEngine, index: str) -> None:
    bad, good = await engine.write(index, [put("a", value=object()), put("b")])
    assert kinds([bad, good]) == [Reject, Delivered]


async def test_too_large_a_payload_goes_in_parts(
    server: Server, engine: MeilisearchEngine, index: str
) -> None:
    changes = [put(f"d{n}", body="x" * 9_000) for n in range(10)]
    changes[4] = put("d4", body="x" * (LIMIT + 1))
    answers = await engine.write(index, changes)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, Reject)] == [4]
    assert "413" in reason(answers[4])
    assert await engine.count(index) == 9


async def test_a_very_large_request_is_not_even_tried(
    server: Server, engine: MeilisearchEngine, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meilisearch_piece, "LARGEST_BODY", 1000)
    before = server.asked()
    changes = [*(put(f"d{n}", body="x" * 300) for n in range(8)), put("large", body="x" * 2000)]
    assert kinds(await engine.write(index, changes)) == [Delivered] * 9
    sent = Counter(server.asked()) - Counter(before)
    assert sent["POST /indexes/{uid}/documents"] > 4
    assert await engine.count(index) == 9


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("internal", Retry),
        ("index_not_found", Unavailable),
        ("no_space_left_on_device", Throttled),
        ("database_size_limit_reached", Throttled),
        ("io_error", Unavailable),
        ("too_many_open_files", Unavailable),
        ("vector_embedding_error", Retry),
    ],
)
async def test_a_failed_task_means_what_its_code_says(
    server: Server, engine: MeilisearchEngine, index: str, code: str, kind: type[Answer]
) -> None:
    server.fault(tasks=({"code": code, "count": 1000},))
    answers = await engine.write(index, [put("a"), put("b")])
    assert kinds(answers) == [kind] * 2
    assert f"({code})" in reason(answers[0])
    server.fault()
    assert kinds(await engine.write(index, [put("a"), put("b")])) == [Delivered] * 2


async def test_one_of_two_tasks_may_fail(server: Server, engine: MeilisearchEngine, index: str) -> None:
    await engine.write(index, [put("old")])
    server.fault(tasks=({"code": "internal", "count": 1, "type": "documentDeletion"},))
    assert kinds(await engine.write(index, [put("new"), gone("old")])) == [Delivered, Retry]
    assert await ids_of(engine, index) == {"old", "new"}


async def test_an_unexplained_refusal_fails_nobody_for_good(
    server: Server, engine: MeilisearchEngine, index: str
) -> None:
    fault = {"code": "unheard_of", "count": 1}
    server.fault(tasks=(fault,))
    assert kinds(await engine.write(index, [put("a"), put("b")])) == [Delivered] * 2
    server.fault(tasks=(fault,))
    assert kinds(await engine.write(index, [put("c")])) == [Retry]


async def test_a_canceled_task_is_tried_again(server: Server, engine: MeilisearchEngine, index: str) -> None:
    server.fault(paused=True)
    writing = asyncio.create_task(engine.write(index, [put("a")]))
    enqueued = await until(lambda: waiting(server, index))
    server.ask("POST", f"/tasks/cancel?uids={enqueued[0]['uid']}")
    [answer] = await writing
    assert isinstance(answer, Retry)
    assert reason(answer).endswith("was canceled")


async def test_a_task_that_stays_enqueued_is_unavailable(server: Server, index: str) -> None:
    server.fault(paused=True)
    async with opened(server, within="300ms") as engine:
        [answer] = await engine.write(index, [put("a")])
        assert isinstance(answer, Unavailable)
        assert reason(answer).endswith("is still enqueued after 0.3s")
        server.fault()
        await until(lambda: not waiting(server, index))
        assert await ids_of(engine, index) == {"a"}


def waiting(server: Server, index: str) -> Any:
    return server.ask("GET", f"/tasks?indexUids={index}&statuses=enqueued,processing")["results"]


async def test_one_look_is_for_all_tasks(server: Server, engine: MeilisearchEngine, index: str) -> None:
    server.fault(paused=True)
    writing = [asyncio.create_task(engine.write(index, [put(f"d{n}")])) for n in range(20)]
    await until(lambda: len(waiting(server, index)) == 20)
    before = server.asked()["GET /tasks"]
    server.fault()
    answers = await asyncio.gather(*writing)
    assert [kinds(each) for each in answers] == [[Delivered]] * 20
    assert server.asked()["GET /tasks"] - before < 20


async def test_many_tasks_are_looked_at_in_parts(
    server: Server, engine: MeilisearchEngine, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meilisearch_tasks, "AT_A_TIME", 3)
    server.fault(paused=True)
    writing = [asyncio.create_task(engine.write(index, [put(f"d{n}")])) for n in range(10)]
    await until(lambda: len(waiting(server, index)) == 10)
    server.fault()
    assert [kinds(each) for each in await asyncio.gather(*writing)] == [[Delivered]] * 10


async def test_a_task_that_is_forgotten_is_done_again(
    server: Server, engine: MeilisearchEngine, index: str
) -> None:
    server.fault(requests=({"status": 200, "text": '{"results": []}', "count": 1, "on": "GET /tasks"},))
    [answer] = await engine.write(index, [put("a")])
    assert isinstance(answer, Retry)
    assert "knows nothing of its task" in reason(answer)


@pytest.mark.parametrize("on", ["GET /tasks", "POST /indexes"])
async def test_somebody_else_who_answers_is_unavailable(
    server: Server, engine: MeilisearchEngine, index: str, on: str
) -> None:
    server.fault(requests=({"status": 200, "text": "<html>Welcome</html>", "count": 1, "on": on},))
    [answer] = await engine.write(index, [put("a")])
    assert isinstance(answer, Unavailable)
    assert "is it Meilisearch?" in reason(answer)


@pytest.mark.parametrize("on", ["POST /indexes", "GET /tasks"])
async def test_whoever_refuses_a_whole_request_fails_no_event(
    server: Server, engine: MeilisearchEngine, index: str, on: str
) -> None:
    text = "<html>The plain HTTP request was sent to HTTPS port</html>"
    server.fault(requests=({"status": 400, "text": text, "count": 1, "on": on},))
    answers = await engine.write(index, [put("a"), put("b")])
    assert kinds(answers) == [Unavailable] * 2
    assert "400 Bad Request" in reason(answers[0])


async def test_a_look_that_the_server_fails_at_is_no_events_fault(
    server: Server, engine: MeilisearchEngine, index: str
) -> None:
    server.fault(requests=({"status": 500, "text": "{}", "count": 1, "on": "GET /tasks"},))
    assert kinds(await engine.write(index, [put("a")])) == [Unavailable]


@pytest.mark.parametrize("text", ["{}", "[]", '{"createdAt": 1}', '{"createdAt": "now", "primaryKey": "id"}'])
async def test_an_index_that_somebody_else_tells_of_is_unavailable(
    server: Server, engine: MeilisearchEngine, index: str, text: str
) -> None:
    for asked in (engine.write(index, [put("a")]), engine.present([index])):
        server.fault(requests=({"status": 200, "text": text, "count": 1, "on": "GET /indexes"},))
        try:
            [answer] = list(await asked)
        except Unavailable as error:
            answer = error
        assert isinstance(answer, Unavailable)
        assert "is it Meilisearch?" in reason(answer)


async def test_an_internal_failure_that_one_document_causes_is_not_the_others(
    server: Server, engine: MeilisearchEngine, index: str
) -> None:
    server.fault(tasks=({"code": "internal", "count": 2},))
    answers = await engine.write(index, [put("a"), put("b"), put("c"), put("d")])
    assert kinds(answers) == [Delivered] * 4


async def test_a_cancelled_write_leaves_nothing_behind(
    server: Server, engine: MeilisearchEngine, index: str
) -> None:
    server.fault(paused=True)
    before = asyncio.all_tasks()
    writing = asyncio.create_task(engine.write(index, [put("a"), gone("b")]))
    await until(lambda: len(waiting(server, index)) == 2)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await until(lambda: asyncio.all_tasks() <= before)
    server.fault()
    assert kinds(await engine.write(index, [put("c")])) == [Delivered]


async def test_a_closed_engine_lets_go_of_whoever_waits(server: Server, index: str) -> None:
    server.fault(paused=True)
    async with opened(server) as engine:
        writing = asyncio.create_task(engine.write(index, [put("a")]))
        await until(lambda: waiting(server, index))
        await engine.close()
        [answer] = await writing
    assert isinstance(answer, Retry | Unavailable)


async def test_what_a_server_asks_to_wait_is_told(
    server: Server, engine: MeilisearchEngine, index: str
) -> None:
    for status, kind in ((429, Throttled), (503, Unavailable)):
        server.fault(requests=({"status": status, "after": 7, "count": 1, "on": "POST"},))
        [answer] = await engine.write(index, [put("a")])
        assert type(answer) is kind
        assert isinstance(answer, Unavailable)
        assert answer.after == 7


async def test_a_look_that_is_too_much_is_tried_again(
    server: Server, engine: MeilisearchEngine, index: str
) -> None:
    server.fault(requests=({"status": 429, "after": 0, "count": 1, "on": "GET /tasks"},))
    assert kinds(await engine.write(index, [put("a")])) == [Delivered]


async def test_a_full_database_is_unavailable(server: Server, engine: MeilisearchEngine, index: str) -> None:
    server.fault(quota=0)
    [answer] = await engine.write(index, [put("a")])
    assert isinstance(answer, Unavailable)
    assert "database_size_limit_reached" in reason(answer)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_lost_answer_is_unavailable(
    server: Server, engine: MeilisearchEngine, index: str, when: str
) -> None:
    server.fault(requests=({"drop": when, "count": 2, "on": "POST /indexes/.*/documents"},))
    [answer] = await engine.write(index, [put("a")])
    assert isinstance(answer, Unavailable)
    assert kinds(await engine.write(index, [put("a")])) == [Delivered]
    assert await ids_of(engine, index) == {"a"}


async def test_a_wrong_key_is_unavailable_and_not_shown(server: Server, index: str) -> None:
    for key in ("another-key", None):
        async with opened(server, auth=key) as engine:
            [answer] = await engine.write(index, [put("a")])
            assert isinstance(answer, Unavailable)
            assert "auth" in reason(answer)
            assert "another-key" not in reason(answer)
            with pytest.raises(Unavailable, match="auth"):
                await engine.check()


async def test_a_server_that_restarts_meanwhile_keeps_what_it_accepted(
    server: Server, engine: MeilisearchEngine, index: str
) -> None:
    await engine.write(index, [put("before")])
    server.fault(paused=True)
    writing = asyncio.create_task(engine.write(index, [put("during")]))
    await until(lambda: waiting(server, index))
    server.kill()
    [answer] = await writing
    assert isinstance(answer, Unavailable)
    with pytest.raises(Unreachable):
        await engine.check()
    server.start()
    assert kinds(await engine.write(index, [put("after")])) == [Delivered]
    assert await ids_of(engine, index) == {"before", "during", "after"}


async def test_a_silent_server_is_unavailable(server: Server, index: str) -> None:
    async with opened(server, within="200ms") as engine:
        with server.silent():
            [answer] = await engine.write(index, [put("a")])
    assert isinstance(answer, Unavailable)
    assert "within 0.2s" in reason(answer)


async def test_an_index_that_is_gone_is_not_made_by_what_is_written(
    engine: MeilisearchEngine, index: str
) -> None:
    await engine.drop(index)
    [added] = await engine.write(index, [put("a")])
    assert isinstance(added, Unavailable)
    assert "does not exist" in reason(added)
    [deleted] = await engine.write(index, [gone("b")])
    assert isinstance(deleted, Unavailable)
    assert "(index_not_found)" in reason(deleted)
    assert await engine.present([index]) == {}


async def test_an_index_is_not_made_by_a_document_that_is_refused_either(
    engine: MeilisearchEngine, index: str
) -> None:
    await engine.drop(index)
    bad, good = await engine.write(index, [Change("1-5", {"id": 1.5}, 1), put("b")])
    # Where both are run in one go, the index is not there for the bad one either.
    assert isinstance(bad, Reject | Unavailable)
    assert isinstance(good, Unavailable)
    assert await engine.present([index]) == {}


async def test_an_index_that_was_there_before_is_never_taken_for_one_that_was_made(
    engine: MeilisearchEngine, index: str
) -> None:
    at = datetime.fromisoformat((await engine.present([index]))[index])
    task = Task(1, "succeeded", None, at, at)
    assert not engine._was_made_by(task, index, at)
    engine._created.clear()
    assert engine._was_made_by(task, index, at)


async def test_an_index_may_be_made_where_that_is_wanted(started: Server) -> None:
    name = f"documents-{uuid4()}"
    async with opened(started, create_index=True) as engine:
        assert kinds(await engine.write(name, [put("a")])) == [Delivered]
        assert list(await engine.present([name])) == [name]
        building = f"{name}__building"
        assert kinds(await engine.write(building, [put("a")])) == [Unavailable]
        assert list(await engine.present([name, building])) == [name]


async def test_another_primary_key_is_no_documents_fault(started: Server, index: str) -> None:
    async with opened(started, id_field="sku") as engine:
        [answer] = await engine.write(index, [Change("a", {"sku": "a"}, 1)])
    assert isinstance(answer, Unavailable)
    assert "is 'id', not 'sku': set id_field" in reason(answer)


async def test_an_index_that_exists_is_not_made_again(engine: MeilisearchEngine, index: str) -> None:
    await engine.write(index, [put("a")])
    with pytest.raises(Retry, match="index_already_exists"):
        await engine.create(index)
    assert await engine.count(index) == 1


async def test_a_key_of_one_index_sees_no_other_that_is_built(
    server: Server, engine: MeilisearchEngine, index: str
) -> None:
    server.fault(requests=({"status": 403, "count": 1, "on": f"^GET /indexes/{index}__building"},))
    assert list(await engine.present([index, f"{index}__building"])) == [index]
    server.fault(requests=({"status": 403, "count": 1, "on": f"^GET /indexes/{index}$"},))
    with pytest.raises(Unavailable, match="403"):
        await engine.present([index, f"{index}__building"])


async def test_an_index_without_its_settings_does_not_stay(
    server: Server, engine: MeilisearchEngine, index: str
) -> None:
    server.fault(tasks=({"code": "internal", "count": 1, "type": "settingsUpdate"},))
    with pytest.raises(Retry, match="internal"):
        await engine.create(f"{index}__building", like=index)
    assert list(await engine.present([index, f"{index}__building"])) == [index]


async def test_a_new_index_takes_the_place_of_the_old_one(
    started: Server, engine: MeilisearchEngine, index: str
) -> None:
    await configure(started, index, {"synonyms": {"car": ["auto"]}})
    await engine.write(index, [put("old")])
    building = f"{index}__building"
    await engine.create(building, like=index)
    settings = started.ask("GET", f"/indexes/{building}/settings")
    assert settings == started.ask("GET", f"/indexes/{index}/settings")
    assert settings["synonyms"] == {"car": ["auto"]}
    assert started.ask("GET", f"/indexes/{building}")["primaryKey"] == "id"
    await engine.write(building, [put("new")])
    before = await engine.present([index, building])
    assert before[index] != before[building]
    await engine.replace(index, building)
    assert await ids_of(engine, index) == {"new"}
    assert await engine.present([index, building]) == {index: before[building]}


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_swap_is_done_once_whatever_becomes_of_the_answer(
    server: Server, engine: MeilisearchEngine, index: str, when: str
) -> None:
    building = f"{index}__building"
    await engine.create(building, like=index)
    await engine.write(building, [put("new")])
    server.fault(requests=({"drop": when, "count": 1, "on": "POST /swap-indexes"},))
    await engine.replace(index, building)
    assert await ids_of(engine, index) == {"new"}
    assert list(await engine.present([index, building])) == [index]


async def test_an_index_takes_a_place_where_none_was(engine: MeilisearchEngine, index: str) -> None:
    await engine.write(index, [put("new")])
    live = f"live-{uuid4()}"
    await engine.replace(live, index)
    assert await ids_of(engine, live) == {"new"}
    assert list(await engine.present([live, index])) == [live]


async def test_dropping_what_does_not_exist_is_nothing(engine: MeilisearchEngine) -> None:
    name = f"never-{uuid4()}"
    await engine.drop(name)
    assert await engine.present([name]) == {}


async def test_an_index_that_does_not_exist_has_no_documents(engine: MeilisearchEngine) -> None:
    name = f"never-{uuid4()}"
    for asked in (engine.count(name), engine.get(name, ["a"]), ids_of(engine, name)):
        with pytest.raises(Unavailable, match="not found"):
            await asked


async def test_settings_with_an_embedders_key_are_not_copied(
    engine: MeilisearchEngine, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = engine._json

    async def with_embedder(method: str, path: str, *more: Any, **named: Any) -> Any:
        told = await asking(method, path, *more, **named)
        return {**told, "embedders": {"ai": {"apiKey": "XXX..."}}} if path.endswith("/settings") else told

    monkeypatch.setattr(engine, "_json", with_embedder)
    with pytest.raises(Unavailable, match="embedder 'ai' has an apiKey"):
        await engine.create(f"{index}__building", like=index)
    assert list(await engine.present([index, f"{index}__building"])) == [index]


async def test_check_reaches_the_server(engine: MeilisearchEngine) -> None:
    await engine.check()


def test_one_host_is_enough() -> None:
    with pytest.raises(ConfigError, match="more than one host"):
        open_engine(Destination("search", "meilisearch://one,two/documents"))


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("meilisearchs://search.example/documents", "search.example:7700"),
        ("meilisearch://key@search.example:80", "search.example:80"),
        ("meilisearch://[::1]:7701/documents", "[::1]:7701"),
    ],
)
def test_where_names_host_and_port(url: str, where: str) -> None:
    assert open_engine(Destination("search", url)).where == where


async def test_a_server_without_tls_is_not_reached_with_it(started: Server) -> None:
    url = f"meilisearchs://{started.url.partition('://')[2]}/documents"
    engine = open_engine(Destination("search", url, auth=started.key, timeout="5s"))
    with pytest.raises(Unreachable, match="TLS"):
        await engine.check()
    await engine.close()
