"""What the tests take for Meilisearch answers as its documentation says: names, types, codes and statuses."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from uuid import uuid4

import pytest

from tests.conftest import available
from tests.servers import meilisearch
from tests.servers.meilisearch import Server
from tests.waiting import wait_for

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")
SUMMARY = {"taskUid": int, "indexUid": str, "status": str, "type": str, "enqueuedAt": str}
TASK = {
    "uid": int,
    "indexUid": str,
    "status": str,
    "type": str,
    "details": dict,
    "duration": str,
    **dict.fromkeys(("enqueuedAt", "startedAt", "finishedAt"), str),
    **dict.fromkeys(("canceledBy", "error"), type(None)),
}
ERROR = {"message": str, "code": str, "type": str, "link": str}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with available("Meilisearch", meilisearch.server()) as started:
        yield started


@pytest.fixture
def faulty(server: Server) -> Iterator[Server]:
    if not server.imitated:
        pytest.skip("MEILISEARCH_URL names a real server, which takes no faults")
    yield server
    server.fault()


@pytest.fixture
def index(server: Server) -> str:
    uid = f"books-{uuid4()}"
    do(server, "POST", "/indexes", {"uid": uid, "primaryKey": "id"})
    return uid


def done(server: Server, summary: dict[str, Any]) -> Any:
    """Return the task when it has finished."""

    def finished() -> Any:
        task = server.ask("GET", f"/tasks/{summary['taskUid']}")
        return task if task["status"] in ("succeeded", "failed", "canceled") else None

    return wait_for(finished)


def do(server: Server, method: str, path: str, body: Any = None) -> Any:
    """Send a request and return its task when that has finished."""
    return done(server, server.ask(method, path, body))


def raw(server: Server, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """Status and answer, whatever they are."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{server.url}{path}", body, given, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def refused(
    server: Server, method: str, path: str, body: Any = None, kind: str = "application/json"
) -> tuple[int, str, str]:
    """Status, code and type of an error, which has the documented fields."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    status, error = raw(server, method, path, data, Authorization=f"Bearer {server.key}", Content_Type=kind)
    assert_shape(error, ERROR)
    assert error["link"].endswith(f"#{error['code']}")
    return status, error["code"], error["type"]


def assert_shape(found: dict[str, Any], shape: dict[str, Any]) -> None:
    """Check that it has these fields at least, of these types."""
    assert shape.keys() <= found.keys()
    assert {name: type(found[name]) for name in shape} == shape


def test_health_version_and_stats(server: Server, index: str) -> None:
    assert server.ask("GET", "/health") == {"status": "available"}
    assert_shape(server.ask("GET", "/version"), {"commitSha": str, "commitDate": str, "pkgVersion": str})
    stats = server.ask("GET", "/stats")
    assert_shape(stats, {"databaseSize": int, "lastUpdate": str, "indexes": dict})
    one = {"numberOfDocuments": int, "isIndexing": bool, "fieldDistribution": dict}
    assert_shape(stats["indexes"][index], one)
    assert_shape(server.ask("GET", f"/indexes/{index}/stats"), one)


def test_health_needs_no_key_and_the_rest_does(server: Server) -> None:
    assert raw(server, "GET", "/health")[0] == 200
    if not server.key:
        pytest.skip("the server has no master key")
    wrong = {"Authorization": "Bearer wrong"}
    for headers, expected in (
        ({}, (401, "missing_authorization_header", "auth")),
        (wrong, (403, "invalid_api_key", "auth")),
    ):
        status, error = raw(server, "GET", "/indexes", **headers)
        assert (status, error["code"], error["type"]) == expected


def test_a_task_is_enqueued_and_then_succeeds(server: Server, index: str) -> None:
    summary = server.ask("POST", f"/indexes/{index}/documents", [{"id": 1, "title": "Alice"}, {"id": 2}])
    assert_shape(summary, SUMMARY)
    assert (summary["indexUid"], summary["status"]) == (index, "enqueued")
    assert TIME.fullmatch(summary["enqueuedAt"])
    task = done(server, summary)
    assert_shape(task, TASK)
    assert (task["status"], task["type"]) == ("succeeded", "documentAdditionOrUpdate")
    assert task["details"] == {"receivedDocuments": 2, "indexedDocuments": 2}
    assert task["enqueuedAt"] <= task["startedAt"] <= task["finishedAt"]
    assert re.fullmatch(r"PT[0-9.]+S", task["duration"])


def test_a_failed_task_has_the_error(server: Server, index: str) -> None:
    task = do(server, "POST", f"/indexes/{index}/documents", [{"id": "good"}, {"id": "1@"}])
    assert task["status"] == "failed"
    assert_shape(task["error"], ERROR)
    assert (task["error"]["code"], task["error"]["type"]) == ("invalid_document_id", "invalid_request")
    assert "1@" in task["error"]["message"]
    assert task["details"] == {"receivedDocuments": 2, "indexedDocuments": 0}
    assert server.ask("GET", f"/indexes/{index}/documents")["total"] == 0


def test_documents_need_one_primary_key(server: Server, index: str) -> None:
    for path, document, code in (
        (f"new-{uuid4()}/documents", {"title": "x"}, "index_primary_key_no_candidate_found"),
        (f"new-{uuid4()}/documents", {"aid": 1, "bid": 2}, "index_primary_key_multiple_candidates_found"),
        (f"{index}/documents", {"title": "x"}, "missing_document_id"),
        (f"{index}/documents", {"id": 1}, None),
        (f"{index}/documents?primaryKey=sku", {"id": 2, "sku": 2}, "index_primary_key_already_exists"),
    ):
        assert (do(server, "POST", f"/indexes/{path}", [document])["error"] or {}).get("code") == code


def test_an_addition_makes_the_index(server: Server) -> None:
    uid = f"new-{uuid4()}"
    task = do(server, "POST", f"/indexes/{uid}/documents?primaryKey=sku", [{"sku": "a"}])
    found = server.ask("GET", f"/indexes/{uid}")
    assert_shape(found, {"uid": str, "createdAt": str, "updatedAt": str, "primaryKey": str})
    assert (found["uid"], found["primaryKey"]) == (uid, "sku")
    assert task["startedAt"] <= found["createdAt"] <= task["finishedAt"]


def test_lines_of_json_and_partial_updates(server: Server, index: str) -> None:
    lines = b'{"id": "a", "title": "A", "year": 1}\n{"id": "b"}\n'
    path, key = f"/indexes/{index}/documents", f"Bearer {server.key}"
    status, summary = raw(server, "POST", path, lines, Content_Type="application/x-ndjson", Authorization=key)
    assert status == 202
    assert done(server, summary)["details"]["indexedDocuments"] == 2
    do(server, "PUT", path, [{"id": "a", "year": 2}])
    assert server.ask("GET", f"{path}/a") == {"id": "a", "title": "A", "year": 2}
    do(server, "POST", path, [{"id": "a", "year": 3}])
    assert server.ask("GET", f"{path}/a") == {"id": "a", "year": 3}


def test_documents_are_listed_by_pages_fields_and_ids(server: Server, index: str) -> None:
    path = f"/indexes/{index}/documents"
    do(server, "POST", path, [{"id": n, "title": str(n)} for n in range(5)])
    page = server.ask("GET", f"{path}?limit=2&offset=1&fields=title")
    assert page == {"results": [{"title": "1"}, {"title": "2"}], "offset": 1, "limit": 2, "total": 5}
    fetched = server.ask("POST", f"{path}/fetch", {"ids": ["4", 0, "9"], "fields": ["id"], "limit": 10})
    assert sorted(each["id"] for each in fetched["results"]) == [0, 4]
    assert (fetched["total"], fetched["limit"], fetched["offset"]) == (2, 10, 0)
    assert server.ask("POST", f"{path}/fetch", {})["limit"] == 20


def test_documents_are_deleted(server: Server, index: str) -> None:
    path = f"/indexes/{index}/documents"
    do(server, "POST", path, [{"id": n} for n in range(6)])
    task = do(server, "POST", f"{path}/delete-batch", [0, "1", "none"])
    assert task["type"] == "documentDeletion"
    assert task["details"] == {"providedIds": 3, "originalFilter": None, "deletedDocuments": 2}
    assert do(server, "DELETE", f"{path}/2")["details"]["deletedDocuments"] == 1
    assert do(server, "DELETE", path)["details"]["deletedDocuments"] == 3
    task = do(server, "POST", "/indexes/never-there/documents/delete-batch", [1])
    assert task["error"]["code"] == "index_not_found"


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("text/plain", b"[]", (415, "invalid_content_type")),
        ("application/json", b"[{", (400, "malformed_payload")),
        ("application/json", b'["no object"]', (400, "malformed_payload")),
        ("application/x-ndjson", b'{"id": 1}\n{', (400, "malformed_payload")),
        ("application/json", b"", (400, "missing_payload")),
    ],
)
def test_a_payload_may_be_refused(
    server: Server, index: str, kind: str, body: bytes, expected: tuple[int, str]
) -> None:
    found = refused(server, "POST", f"/indexes/{index}/documents", body, kind)
    assert found == (*expected, "invalid_request")


def test_a_payload_needs_its_type(server: Server, index: str) -> None:
    with closing(http.client.HTTPConnection(server.url.partition("://")[2], timeout=60)) as connection:
        key = {"Authorization": f"Bearer {server.key}"}
        connection.request("POST", f"/indexes/{index}/documents", b'[{"id": 1}]', key)
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["code"]) == (415, "missing_content_type")


def test_a_payload_may_be_too_large() -> None:
    with meilisearch.imitation(limit=1000) as small:
        found = refused(small, "POST", "/indexes/books/documents", [{"id": 1, "text": "x" * 1000}])
        assert found == (413, "payload_too_large", "invalid_request")
        assert small.ask("GET", "/health") == {"status": "available"}


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/indexes/never-there", (404, "index_not_found")),
        ("GET", "/indexes/never-there/documents", (404, "index_not_found")),
        ("GET", "/indexes/never-there/settings", (404, "index_not_found")),
        ("GET", "/indexes/a%20b", (400, "invalid_index_uid")),
        ("GET", "/indexes/{index}/documents/9", (404, "document_not_found")),
        ("GET", "/tasks/123456789", (404, "task_not_found")),
        ("GET", "/tasks?limit=some", (400, "invalid_task_limit")),
        ("GET", "/tasks?uids=one", (400, "invalid_task_uids")),
        ("GET", "/indexes?limit=-1", (400, "invalid_index_limit")),
        ("POST", "/tasks/cancel", (400, "missing_task_filters")),
    ],
)
def test_a_request_may_be_refused(
    server: Server, index: str, method: str, path: str, expected: tuple[int, str]
) -> None:
    assert refused(server, method, path.format(index=index)) == (*expected, "invalid_request")


def test_indexes_are_made_listed_changed_and_deleted(server: Server, index: str) -> None:
    listed = server.ask("GET", "/indexes?limit=1000")
    assert_shape(listed, {"results": list, "offset": int, "limit": int, "total": int})
    assert index in [each["uid"] for each in listed["results"]]
    again = do(server, "POST", "/indexes", {"uid": index})
    assert (again["type"], again["error"]["code"]) == ("indexCreation", "index_already_exists")
    changed = do(server, "PATCH", f"/indexes/{index}", {"primaryKey": "sku"})
    assert (changed["type"], changed["details"]) == ("indexUpdate", {"primaryKey": "sku"})
    deleted = do(server, "DELETE", f"/indexes/{index}")
    assert (deleted["type"], deleted["details"]) == ("indexDeletion", {"deletedDocuments": 0})
    missing = do(server, "DELETE", f"/indexes/{index}")
    assert missing["error"]["code"] == "index_not_found"


def test_settings_are_shown_and_changed_in_part(server: Server, index: str) -> None:
    before = server.ask("GET", f"/indexes/{index}/settings")
    assert before["displayedAttributes"] == ["*"]
    assert before["rankingRules"] == ["words", "typo", "proximity", "attribute", "sort", "exactness"]
    change = {"stopWords": ["the"], "distinctAttribute": "title"}
    task = do(server, "PATCH", f"/indexes/{index}/settings", change)
    assert (task["type"], task["details"]) == ("settingsUpdate", change)
    assert server.ask("GET", f"/indexes/{index}/settings") == {**before, **change}
    do(server, "PATCH", f"/indexes/{index}/settings", {"stopWords": None})
    assert server.ask("GET", f"/indexes/{index}/settings")["stopWords"] == []
    assert refused(server, "PATCH", f"/indexes/{index}/settings", {"colour": 1})[:2] == (400, "bad_request")


def test_indexes_are_swapped_with_their_documents_and_creation(server: Server, index: str) -> None:
    other = f"other-{uuid4()}"
    do(server, "POST", f"/indexes/{other}/documents", [{"id": 1}])
    created = {uid: server.ask("GET", f"/indexes/{uid}")["createdAt"] for uid in (index, other)}
    swaps = [{"indexes": [index, other]}]
    summary = server.ask("POST", "/swap-indexes", swaps)
    assert (summary["indexUid"], summary["type"]) == (None, "indexSwap")
    assert done(server, summary)["details"]["swaps"][0]["indexes"] == [index, other]
    assert server.ask("GET", f"/indexes/{index}/documents")["total"] == 1
    assert server.ask("GET", f"/indexes/{index}")["createdAt"] == created[other]
    assert server.ask("GET", f"/indexes/{other}")["createdAt"] == created[index]


def test_a_swap_may_fail(server: Server, index: str) -> None:
    task = do(server, "POST", "/swap-indexes", [{"indexes": [index, "never-there"]}])
    assert (task["status"], task["error"]["code"]) == ("failed", "index_not_found")
    for indexes, code in (
        ([index, index], "invalid_swap_duplicate_index_found"),
        ([index], "invalid_swap_indexes"),
    ):
        assert refused(server, "POST", "/swap-indexes", [{"indexes": indexes}])[:2] == (400, code)


def test_tasks_are_listed_from_the_newest(server: Server, index: str) -> None:
    path = f"/indexes/{index}/documents"
    made = [do(server, "POST", path, [{"id": n}])["uid"] for n in range(3)]
    asked = f"/tasks?indexUids={index}&types=documentAdditionOrUpdate&statuses=succeeded"
    found = server.ask("GET", f"{asked}&limit=2")
    assert [task["uid"] for task in found["results"]] == [made[2], made[1]]
    assert (found["total"], found["limit"], found["from"], found["next"]) == (3, 2, made[2], made[0])
    rest = server.ask("GET", f"{asked}&limit=2&from={made[0]}")
    assert ([task["uid"] for task in rest["results"]], rest["next"]) == ([made[0]], None)
    some = server.ask("GET", f"/tasks?uids={made[0]},{made[2]},987654321")
    assert [task["uid"] for task in some["results"]] == [made[2], made[0]]


def test_tasks_wait_and_are_canceled(faulty: Server, index: str) -> None:
    faulty.fault(paused=True)
    task = faulty.ask("POST", f"/indexes/{index}/documents", [{"id": 1}])
    waiting = faulty.ask("GET", f"/tasks/{task['taskUid']}")
    assert (waiting["status"], waiting["startedAt"], waiting["duration"]) == ("enqueued", None, None)
    assert waiting["details"] == {"receivedDocuments": 1, "indexedDocuments": None}
    canceling = do(faulty, "POST", f"/tasks/cancel?uids={task['taskUid']}")
    assert (canceling["type"], canceling["indexUid"]) == ("taskCancelation", None)
    assert (canceling["details"]["matchedTasks"], canceling["details"]["canceledTasks"]) == (1, 1)
    canceled = faulty.ask("GET", f"/tasks/{task['taskUid']}")
    assert (canceled["status"], canceled["canceledBy"]) == ("canceled", canceling["uid"])


def test_a_killed_server_keeps_what_it_accepted(faulty: Server, index: str) -> None:
    path = f"/indexes/{index}/documents"
    finished = do(faulty, "POST", path, [{"id": 1}])
    faulty.fault(paused=True)
    enqueued = faulty.ask("POST", path, [{"id": 2}])
    created = faulty.ask("GET", f"/indexes/{index}")["createdAt"]
    faulty.kill()
    faulty.start()
    assert faulty.ask("GET", f"/tasks/{finished['uid']}") == finished
    assert done(faulty, enqueued)["status"] == "succeeded"
    assert faulty.ask("GET", path)["total"] == 2
    assert faulty.ask("GET", f"/indexes/{index}")["createdAt"] == created


def test_words_are_found(server: Server, index: str) -> None:
    books = [{"id": 1, "title": "Alice in Wonderland"}, {"id": 2, "title": "Emma"}]
    do(server, "POST", f"/indexes/{index}/documents", books)
    found = server.ask("POST", f"/indexes/{index}/search", {"q": "wonder", "limit": 5})
    assert found["hits"] == [books[0]]
    shape = {"query": str, "processingTimeMs": int, "limit": int, "offset": int, "estimatedTotalHits": int}
    assert_shape(found, shape)
    assert (found["query"], found["limit"], found["estimatedTotalHits"]) == ("wonder", 5, 1)
