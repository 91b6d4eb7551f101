"""The local Algolia answers in the shapes that Algolia's REST documentation shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

from tests.servers import algolia
from tests.servers.algolia import Server
from tests.waiting import wait_for

JSON = {"Content-Type": "application/json"}
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    with algolia.server() as server:
        yield server


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    yield started
    started.faults()
    for item in ask(started, "GET", "")["items"]:
        done(started, "DELETE", f"/{item['name']}")


def ask(server: Server, method: str, path: str, body: Any = None, key: str = algolia.KEY) -> Any:
    request = Request(
        f"http://127.0.0.1:{server.port}/1/indexes{path}",
        None if body is None else json.dumps(body).encode(),
        {**JSON, "X-Algolia-Application-Id": algolia.APPLICATION, "X-Algolia-API-Key": key},
        method=method,
    )
    try:
        with urlopen(request) as answer:
            return json.load(answer)
    except HTTPError as error:
        return {**json.load(error), "code": error.code, "after": error.headers.get("Retry-After")}


def done(server: Server, method: str, path: str, body: Any = None) -> Any:
    """Ask for a change, and wait until its task is published."""
    answer = ask(server, method, path, body)
    task = f"/{path.split('/')[1]}/task/{answer['taskID']}"
    wait_for(lambda: ask(server, "GET", task)["status"] == "published")
    return answer


def write(server: Server, index: str, *requests: tuple[str, dict[str, Any]]) -> Any:
    return done(server, "POST", f"/{index}/batch", batch(*requests))


def batch(*requests: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"requests": [{"action": action, "body": body} for action, body in requests]}


def records(server: Server, index: str, *ids: str) -> Any:
    asked = {"requests": [{"indexName": index, "objectID": id} for id in ids]}
    return ask(server, "POST", "/*/objects", asked)["results"]


def test_a_batch_is_a_task_that_is_published_later(server: Server) -> None:
    server.faults(stuck=True)
    asked = batch(
        ("addObject", {"name": "Betty Jane McCamey", "company": "Vita Foods Inc."}),
        ("updateObject", {"objectID": "myID2", "name": "Gayla geimer"}),
    )
    answer = ask(server, "POST", "/contacts/batch", asked)
    assert set(answer) == {"taskID", "objectIDs"}
    assert isinstance(answer["taskID"], int)
    assert answer["objectIDs"][1] == "myID2"
    path = f"/contacts/task/{answer['taskID']}"
    assert ask(server, "GET", path) == {"status": "notPublished", "pendingTask": True}
    assert ask(server, "GET", "/contacts/settings")["code"] == 404
    server.faults()
    write(
        server,
        "contacts",
    )
    assert ask(server, "GET", path) == {"status": "published", "pendingTask": False}
    assert records(server, "contacts", answer["objectIDs"][0], "myID2", "none") == [
        {"objectID": answer["objectIDs"][0], "name": "Betty Jane McCamey", "company": "Vita Foods Inc."},
        {"objectID": "myID2", "name": "Gayla geimer"},
        None,
    ]


def test_replace_partial_update_and_delete(server: Server) -> None:
    write(server, "i", ("updateObject", {"objectID": "1", "a": 1, "b": 2}))
    write(server, "i", ("partialUpdateObject", {"objectID": "1", "b": 3}))
    assert records(server, "i", "1") == [{"objectID": "1", "a": 1, "b": 3}]
    edits = [("updateObject", {"objectID": "1", "b": 4}), ("partialUpdateObject", {"objectID": "2", "a": 1})]
    write(server, "i", *edits, ("partialUpdateObjectNoCreate", {"objectID": "3", "a": 1}))
    assert records(server, "i", "1", "2", "3") == [{"objectID": "1", "b": 4}, {"objectID": "2", "a": 1}, None]
    write(server, "i", ("deleteObject", {"objectID": "1"}))
    assert records(server, "i", "1") == [None]


@pytest.mark.parametrize(
    ("operation", "value", "before", "after"),
    [
        ("Increment", 2, 5, 7),
        ("Decrement", 2, 5, 3),
        ("Add", "x", ["x"], ["x", "x"]),
        ("AddUnique", "x", ["x"], ["x"]),
        ("Remove", "x", ["x", "y"], ["y"]),
        ("IncrementFrom", 5, 5, 6),
        ("IncrementSet", 6, 5, 6),
        # A version that does not fit has the whole update ignored.
        ("IncrementSet", 5, 5, None),
        ("IncrementSet", 4, 5, None),
        ("IncrementFrom", 4, 5, None),
    ],
)
def test_built_in_operations(server: Server, operation: str, value: Any, before: Any, after: Any) -> None:
    write(server, "i", ("updateObject", {"objectID": "1", "n": before}))
    body = {"objectID": "1", "n": {"_operation": operation, "value": value}, "other": True}
    write(server, "i", ("partialUpdateObject", body))
    expected = {"n": before} if after is None else {"n": after, "other": True}
    assert records(server, "i", "1") == [{"objectID": "1", **expected}]


def test_errors(server: Server) -> None:
    wrong = ask(server, "GET", "", key="wrong")
    said = {"message": "Invalid Application-ID or API key", "status": 403}
    assert wrong == {**said, "code": 403, "after": None}
    assert ask(server, "GET", "/none/settings")["message"] == "Index none does not exist"
    assert ask(server, "POST", "/none/browse", {})["code"] == 404
    assert ask(server, "POST", "/none/query", {})["code"] == 404
    missing = ask(server, "POST", "/i/batch", batch(("updateObject", {"name": "no id"})))
    assert missing["message"].startswith("The 'objectID' attribute is required to use action=updateObject")
    geoloc = ask(server, "POST", "/i/batch", batch(("addObject", {"_geoloc": "1,2"})))
    assert geoloc["code"] == 400
    assert "position" not in geoloc


def test_a_record_too_big_spoils_its_batch(server: Server) -> None:
    asked = batch(("addObject", {"objectID": "a"}), ("addObject", {"objectID": "b", "text": "x" * 14_000}))
    answer = ask(server, "POST", "/i/batch", asked)
    message = "Record at the position 1 objectID=b is too big size=14026/10000 bytes"
    assert answer["message"].startswith(message)
    assert (answer["position"], answer["objectID"], answer["status"]) == (1, "b", 400)
    server.faults(terse=True)
    answer = ask(server, "POST", "/i/batch", asked)
    assert answer["message"].startswith(message)
    assert "position" not in answer
    assert ask(server, "GET", "") == {"items": [], "nbPages": 1}


def test_a_quota_of_records_counts_every_index(server: Server) -> None:
    server.faults(quota=2)
    write(server, "a", ("updateObject", {"objectID": "1"}))
    write(server, "b", ("updateObject", {"objectID": "1"}))
    write(server, "b", ("updateObject", {"objectID": "1", "again": 1}))
    answer = ask(server, "POST", "/a/batch", batch(("updateObject", {"objectID": "2"})))
    assert answer["code"] == 403
    assert answer["message"].startswith("You have exceeded your Record quota.")
    server.faults(quota=0)
    write(server, "a", ("deleteObject", {"objectID": "1"}))
    assert records(server, "a", "1") == [None]


def test_the_list_of_indexes(server: Server) -> None:
    write(server, "a", ("updateObject", {"objectID": "1"}))
    done(server, "PUT", "/b/settings", {"hitsPerPage": 5})
    listed = ask(server, "GET", "")
    assert listed["nbPages"] == 1
    full, empty = listed["items"]
    fields = "name createdAt updatedAt entries dataSize fileSize lastBuildTimeS numberOfPendingTasks"
    assert set(full) == {*fields.split(), "pendingTask"}
    assert (full["name"], full["entries"], full["pendingTask"]) == ("a", 1, False)
    assert DATE.fullmatch(full["createdAt"])
    assert (empty["name"], empty["entries"], empty["createdAt"]) == ("b", 0, "")
    page = ask(server, "GET", "?page=1&hitsPerPage=1")
    assert ([item["name"] for item in page["items"]], page["nbPages"]) == (["b"], 2)


def test_settings_copy_move_and_delete(server: Server) -> None:
    answer = done(server, "PUT", "/a/settings", {"searchableAttributes": ["title"], "replicas": ["r"]})
    assert set(answer) == {"taskID", "updatedAt"}
    write(server, "a", ("updateObject", {"objectID": "1"}))
    copy = {"operation": "copy", "destination": "b", "scope": ["settings", "synonyms", "rules"]}
    assert set(done(server, "POST", "/a/operation", copy)) == {"taskID", "updatedAt"}
    assert ask(server, "GET", "/b/settings")["searchableAttributes"] == ["title"]
    assert "replicas" not in ask(server, "GET", "/b/settings")
    assert ask(server, "POST", "/b/query", {})["nbHits"] == 0
    done(server, "POST", "/a/operation", {"operation": "copy", "destination": "c"})
    assert ask(server, "POST", "/c/query", {})["nbHits"] == 1
    done(server, "POST", "/b/operation", {"operation": "move", "destination": "a"})
    done(server, "POST", "/none/operation", {"operation": "move", "destination": "c"})
    items = ask(server, "GET", "")["items"]
    assert [(item["name"], item["entries"]) for item in items] == [("a", 0), ("c", 1)]
    assert set(done(server, "DELETE", "/a")) == {"taskID", "deletedAt"}
    assert set(done(server, "DELETE", "/a")) == {"taskID", "deletedAt"}
    assert ask(server, "GET", "/a/settings")["code"] == 404


def test_browse_and_query(server: Server) -> None:
    bodies = [{"objectID": str(at), "title": f"Book {at}", "n": at} for at in range(5)]
    write(server, "i", *(("updateObject", body) for body in bodies))
    asked: dict[str, Any] = {"hitsPerPage": 2, "attributesToRetrieve": ["objectID"]}
    first = ask(server, "POST", "/i/browse", asked)
    assert first["hits"] == [{"objectID": "0"}, {"objectID": "1"}]
    assert (first["nbHits"], first["nbPages"], first["hitsPerPage"]) == (5, 3, 2)
    second = ask(server, "POST", "/i/browse", {**asked, "cursor": first["cursor"]})
    last = ask(server, "POST", "/i/browse", {**asked, "cursor": second["cursor"]})
    assert last["hits"] == [{"objectID": "4"}]
    assert "cursor" not in last
    found = ask(server, "POST", "/i/query", {"params": f"query={quote('book 3')}&hitsPerPage=1"})
    assert found["hits"] == [{"objectID": "3", "title": "Book 3", "n": 3}]
    assert (found["nbHits"], found["page"], found["nbPages"], found["query"]) == (1, 0, 1, "book 3")


def test_what_was_accepted_outlives_the_process(server: Server) -> None:
    done(server, "PUT", "/i/settings", {"hitsPerPage": 3})
    server.faults(stuck=True)
    accepted = ask(server, "POST", "/i/batch", batch(("updateObject", {"objectID": "1"})))
    port = server.port
    server.kill()
    server.start()
    assert server.port == port
    assert ask(server, "GET", f"/i/task/{accepted['taskID']}")["status"] == "published"
    assert records(server, "i", "1") == [{"objectID": "1"}]
    assert ask(server, "GET", "/i/settings")["hitsPerPage"] == 3
