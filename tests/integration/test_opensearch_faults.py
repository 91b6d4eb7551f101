"""OpenSearch in trouble that a small server of the tests cannot be brought into, answered by hand."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from relaybox.core.outcome import Delivered, Reject, Retry, Throttled, Unavailable
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError
from relaybox.search.engine import Change
from relaybox.search.opensearch.engine import OpenSearchEngine
from relaybox.sinks.sink import Answer
from tests.integration.receivers import Receiver, answer, answering
from tests.waiting import PATIENCE

PRESENT = {"documents-000001": {"aliases": {"documents": {}}, "settings": {"index": {"uuid": "u"}}}}
"""What the look for the index is answered."""
CHANGES = [Change("a", {"id": "a"}, 1), Change("b", None, 2)]


def said(status: str, body: Any, *headers: str) -> bytes:
    return answer(status, json.dumps(body).encode(), *headers)


def error(kind: str, reason: str = "so") -> dict[str, Any]:
    return {"error": {"type": kind, "reason": reason}, "status": 0}


FOUND = said("200 OK", PRESENT)


async def write(receiver: Receiver) -> Sequence[Answer]:
    url = f"opensearch://shop:hunter2@127.0.0.1:{receiver.port}"
    engine = OpenSearchEngine(Destination("search", url, timeout=PATIENCE))
    try:
        return await engine.write("documents", CHANGES)
    finally:
        await engine.close()


async def answered(answer: bytes) -> Sequence[Answer]:
    """Write to an index that is found, and answer this."""
    async with answering(FOUND, answer) as receiver:
        return await write(receiver)


WHOLE = {"429 Too Many Requests": Throttled, "500 Internal Server Error": Retry}
WHOLE |= dict.fromkeys(("400 Bad Request", "401 Unauthorized", "403 Forbidden"), Unavailable)
WHOLE |= dict.fromkeys(("404 Not Found", "502 Bad Gateway", "503 Service Unavailable"), Unavailable)


@pytest.mark.parametrize(("status", "expected"), WHOLE.items())
async def test_an_answer_to_the_whole_request_fails_no_event(status: str, expected: type) -> None:
    answers = await answered(said(status, error("some", "told")))
    assert [type(one) for one in answers] == [expected] * 2
    assert "told" in str(answers[0])


async def test_a_wait_that_the_server_asks_for_is_kept() -> None:
    busy = said("429 Too Many Requests", error("rejected_execution_exception"), "Retry-After: 7")
    [first, _] = await answered(busy)
    assert isinstance(first, Throttled)
    assert first.after == 7


async def test_the_user_and_password_are_sent_and_never_shown() -> None:
    refused = said("401 Unauthorized", error("security_exception", "no hunter2 here"))
    async with answering(refused) as receiver:
        with pytest.raises(Unavailable) as raised:
            await write(receiver)
    [request] = receiver.requests
    assert request.headers["authorization"] == "Basic c2hvcDpodW50ZXIy"
    assert "hunter2" not in str(raised.value)


async def test_a_bulk_request_names_versions_and_asks_for_the_alias() -> None:
    done = {"items": [{"index": {"status": 201}}, {"delete": {"status": 404, "result": "not_found"}}]}
    async with answering(FOUND, said("200 OK", done)) as receiver:
        assert await write(receiver) == [Delivered(), Delivered()]
    request = receiver.requests[1]
    assert request.line.startswith("POST /documents/_bulk?require_alias=true ")
    assert [json.loads(line) for line in request.body.splitlines()] == [
        {"index": {"_id": "a", "version": 1, "version_type": "external_gte"}},
        {"id": "a"},
        {"delete": {"_id": "b", "version": 2, "version_type": "external_gte"}},
    ]


ITEMS: Mapping[tuple[int, str], type] = {
    **{(400, f"{kind}_exception"): Reject for kind in ("mapper_parsing", "illegal_argument")},
    **{(429, f"{kind}_exception"): Throttled for kind in ("es_rejected_execution", "rejected_execution")},
    **{(429, f"{kind}_exception"): Throttled for kind in ("circuit_breaking", "cluster_block")},
    (403, "cluster_block_exception"): Throttled,
    (400, "index_closed_exception"): Unavailable,
    (403, "security_exception"): Unavailable,
    (404, "index_not_found_exception"): Unavailable,
    (503, "unavailable_shards_exception"): Unavailable,
    (409, "version_conflict_engine_exception"): Delivered,
    (500, "illegal_state_exception"): Retry,
}


@pytest.mark.parametrize(("status", "kind"), ITEMS)
async def test_each_change_is_answered_by_its_own_error(status: int, kind: str) -> None:
    items = [{"index": {"status": status, "error": error(kind)["error"]}}, {"delete": {"status": 200}}]
    answers = await answered(said("200 OK", {"items": items}))
    assert [type(one) for one in answers] == [ITEMS[status, kind], Delivered]


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"items": [{"index": {"status": 200}}]}'])
async def test_an_answer_that_does_not_tell_of_each_change_is_unavailable(body: bytes) -> None:
    answers = await answered(answer("200 OK", body))
    assert [type(one) for one in answers] == [Unavailable] * 2


async def test_another_server_at_the_address_is_not_taken_for_opensearch() -> None:
    async with answering(answer("200 OK", b'{"hello": "world"}')) as receiver:
        engine = OpenSearchEngine(Destination("search", f"opensearch://127.0.0.1:{receiver.port}"))
        with pytest.raises(Unavailable, match="is not OpenSearch"):
            await engine.check()
        await engine.close()


def test_a_password_without_a_user_is_refused() -> None:
    with pytest.raises(ConfigError, match="no user; name the user in the URL"):
        OpenSearchEngine(Destination("search", "opensearch://localhost/documents", auth="hunter2"))


@pytest.mark.parametrize(
    "look",
    [
        answer("400 Bad Request", b"<html>The plain HTTP request was sent to HTTPS port</html>"),
        answer("200 OK", b'["a", "list"]'),
        answer("200 OK", b'{"documents": "a text"}'),
        answer("200 OK", b'{"documents": {"aliases": {"\xff": {}}}}'),
        answer("200 OK", b'{"_shards": []}'),
    ],
)
async def test_a_look_that_somebody_else_answers_fails_no_event(look: bytes) -> None:
    async with answering(look) as receiver:
        with pytest.raises(Unavailable):
            await write(receiver)


async def test_a_login_that_is_repeated_is_not_shown() -> None:
    login = base64.b64encode(b"shop:hunter2").decode()
    refused = said("403 Forbidden", error("security_exception", f"no permissions for [Basic {login}]"))
    [first, _] = await answered(refused)
    assert login not in str(first)
    assert "no permissions for [Basic ***]" in str(first)
