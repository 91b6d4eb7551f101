"""Whatever a client sends that makes no sense is a 4xx and a problem document; never a 500 or a change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from relaybox.ledger import EVERYTHING
from relaybox.web import read
from relaybox.web.route import segments_of
from tests.web.stage import NOBODY, OPERATOR, Stage, bearer, is_problem

HUGE = "9" * 5_000

QUERIES = [
    ("/api/events", "limit=0", "limit"),
    ("/api/events", "limit=-1", "limit"),
    ("/api/events", "limit=501", "limit"),
    ("/api/events", f"limit={HUGE}", "limit"),
    ("/api/events", "limit=1e3", "limit"),
    ("/api/events", "limit=", "limit"),
    ("/api/events", "limit=ten", "limit"),
    ("/api/events", "limit=5&limit=6", "limit"),
    ("/api/events", "status=lost", "status"),
    ("/api/events", "staus=failed", "staus"),
    ("/api/events", "event_id=7", "event_id"),
    ("/api/events", "since=yesterday", "since"),
    ("/api/events", "since=2026-13-45", "since"),
    ("/api/events", "since=0001-01-01T00:00:00%2B23:59", "since"),
    ("/api/events", "until=99999999999d", "until"),
    ("/api/events", "cursor=abc", "cursor"),
    ("/api/events", f"cursor={NOBODY}", "cursor"),
    ("/api/events", "cursor=%00", "cursor"),
    ("/api/events", "cursor=" + "A" * 5_000, "cursor"),
    ("/api/events", "aggregate_id=a%00b", "aggregate_id"),
    ("/api/events", "error=" + "x" * 1_001, "error"),
    ("/api/events", "destination=mial", None),
    ("/api/audit", "cursor=5", "cursor"),
    ("/api/audit", "limit=x", "limit"),
    ("/api/dead-letters", "cursor=AAAA", "cursor"),
    ("/api/failures", "destination=mial", None),
    ("/api/failures", "status=failed", "status"),
    ("/api/operations", "limit=0", "limit"),
    ("/api/series", "hours=0", "hours"),
    ("/api/series", "hours=nan", "hours"),
    ("/api/series", "hours=inf", "hours"),
    ("/api/series", "hours=1e9", "hours"),
    ("/api/series", "hours=-1", "hours"),
    ("/api/series", "hours=1&destination=mial", None),
    ("/api/stats", "limit=5", "limit"),
]


async def test_a_parameter_that_makes_no_sense(quick: Stage, subtests: pytest.Subtests) -> None:
    async with quick.client() as client:
        for path, query, parameter in QUERIES:
            with subtests.test(path=path, query=query[:60]):
                problem = is_problem(await client.get(f"{path}?{query}"), 422)
                assert problem.get("parameter") == parameter
                assert len(problem["detail"]) < 500


async def test_a_misspelt_name_is_told_the_right_one(quick: Stage) -> None:
    async with quick.client() as client:
        assert "did you mean 'status'" in (await client.get("/api/events?staus=failed")).json()["detail"]
        assert "did you mean 'mail'" in (await client.get("/api/events?destination=mial")).json()["detail"]
        wrong = await client.post("/api/retry", json={"filter": {"destinaton": "mail"}})
        assert "did you mean 'destination'" in is_problem(wrong, 422)["detail"]
        flat = await client.post("/api/retry", json={"destination": "mail"})
        assert "inside of filter" in is_problem(flat, 422)["detail"]


async def test_parameters_that_cannot_be_read(quick: Stage) -> None:
    async with quick.client() as client:
        for query in ("status=%ff", "a=%ed%a0%80", "&".join("a=1" for _ in range(60))):
            is_problem(await client.get(f"/api/events?{query}"), 400)


async def test_a_cursor_is_good_for_its_own_question_alone(quick: Stage) -> None:
    for number in range(3):
        quick.operated.emit("mail", aggregate_id=number)
    cursor = (await quick.get("/api/events", limit=1))["cursor"]
    async with quick.client() as client:
        for path in ("/api/events?status=pending&", "/api/events?destination=mail&", "/api/audit?"):
            problem = is_problem(await client.get(f"{path}cursor={cursor}"), 422)
            assert problem["parameter"] == "cursor"
        spoilt = cursor[:-2] + ("AA" if not cursor.endswith("AA") else "BB")
        is_problem(await client.get(f"/api/events?cursor={spoilt}"), 422)


async def test_an_id_that_is_none(quick: Stage, subtests: pytest.Subtests) -> None:
    async with quick.client() as client:
        for id_ in ("7", "x", "%00", "..", "%2e%2e", HUGE, "0" * 31, "é"):
            for kind in ("events", "operations"):
                with subtests.test(kind=kind, id=id_[:40]):
                    answer = await client.get(f"/api/{kind}/{id_}")
                    assert 400 <= answer.status_code < 500
                    is_problem(answer, answer.status_code)


MISSING = [
    ("GET", f"/api/events/{NOBODY}"),
    ("GET", f"/api/events/{NOBODY}/why"),
    ("GET", f"/api/operations/{NOBODY}"),
    ("POST", f"/api/operations/{NOBODY}/cancel"),
    ("GET", "/api/destinations/nobody"),
    ("POST", "/api/destinations/nobody/pause"),
    ("POST", "/api/destinations/nobody/resume"),
    ("POST", "/api/destinations/nobody/test"),
    ("POST", "/api/destinations/a%2Fb/pause"),
    ("POST", "/api/destinations/%00/pause"),
    ("POST", "/api/destinations/%E2%80%AE/pause"),
    ("GET", "/api"),
    ("GET", "/api/api/stats"),
    ("GET", "/api/nothing"),
    ("GET", "//api//stats"),
    ("GET", "/api/events//why"),
]


async def test_what_does_not_exist_is_a_404(stage: Stage, subtests: pytest.Subtests) -> None:
    async with stage.client() as client:
        for method, path in MISSING:
            with subtests.test(method=method, path=path):
                is_problem(await client.request(method, f"http://localhost{path}"), 404)


BODIES: list[tuple[str, Any, int]] = [
    ("/api/retry", [], 422),
    ("/api/retry", "all", 422),
    ("/api/retry", 7, 422),
    ("/api/retry", None, 422),
    ("/api/retry", {"ids": []}, 422),
    ("/api/retry", {"ids": "x"}, 422),
    ("/api/retry", {"ids": ["x"]}, 422),
    ("/api/retry", {"ids": [7]}, 422),
    ("/api/retry", {"ids": [str(NOBODY)] * 101}, 422),
    ("/api/retry", {"ids": [str(NOBODY)], "all": True}, 422),
    ("/api/retry", {"ids": [str(NOBODY)], "filter": {"status": "failed"}}, 422),
    ("/api/retry", {"ids": [str(NOBODY)], "background": True}, 422),
    ("/api/retry", {"filter": {"status": "delivered"}}, 422),
    ("/api/retry", {"filter": {"status": 5}}, 422),
    ("/api/retry", {"filter": {"status": {"$ne": None}}}, 422),
    ("/api/retry", {"filter": {"destination": "nobody"}}, 422),
    ("/api/retry", {"filter": {"destination": "a\0b"}}, 422),
    ("/api/retry", {"filter": {"aggregate_id": "\ud800"}}, 400),
    ("/api/retry", {"filter": {"since": "soon"}}, 422),
    ("/api/retry", {"filter": []}, 422),
    ("/api/retry", {"all": True, "filter": {"destination": "mail"}}, 422),
    ("/api/retry", {"dry_run": "yes"}, 422),
    ("/api/retry", {"dry_run": 1}, 422),
    ("/api/retry", {"rate": 0}, 422),
    ("/api/retry", {"rate": -1}, 422),
    ("/api/retry", {"rate": "fast"}, 422),
    ("/api/retry", {"to": "mail"}, 422),
    ("/api/replay", {"all": True, "to": "nobody"}, 422),
    ("/api/replay", {"all": True, "to": 5}, 422),
    ("/api/discard", {"all": "true"}, 422),
    ("/api/move", {}, 422),
    ("/api/move", {"from": "mail"}, 422),
    ("/api/move", {"from": "mail", "to": "mail"}, 422),
    ("/api/move", {"from": "mail", "to": "nobody"}, 422),
    ("/api/move", {"from": "nobody", "to": "mail"}, 422),
    ("/api/move", {"from_": "mail", "to": "web"}, 422),
    ("/api/destinations/mail/pause", {"reason": 5}, 422),
    ("/api/destinations/mail/pause", {"reason": "x" * 1_001}, 422),
    ("/api/destinations/mail/pause", {"reason": "a\0"}, 422),
    ("/api/destinations/mail/pause", {"until": "then"}, 422),
    ("/api/destinations/mail/pause", {"until": 5}, 422),
    ("/api/destinations/mail/resume", {"reason": "x"}, 422),
    (f"/api/operations/{NOBODY}/cancel", {"now": True}, 422),
]


async def test_a_body_that_makes_no_sense(quick: Stage, subtests: pytest.Subtests) -> None:
    quick.operated.emit("mail")
    async with quick.client() as client:
        for path, document, status in BODIES:
            with subtests.test(path=path, body=str(document)[:60]):
                data = json.dumps(document).encode()
                answer = await client.post(path, content=data, headers={"content-type": "application/json"})
                problem = is_problem(answer, status)
                assert len(problem["detail"]) < 600
    assert not quick.operated.audit()


CONTENTS = [
    (b"{", "application/json", 400),
    (b"{}{}", "application/json", 400),
    (b"\xff\xfe{}", "application/json", 400),
    (b'{"a": 1, "a": 2}', "application/json", 400),
    (b'{"rate": NaN}', "application/json", 400),
    (b'{"rate": ' + b"9" * 5_000 + b"}", "application/json", 400),
    (b'{"rate": 1e999}', "application/json", 422),
    (b"[" * 100_000, "application/json", 400),
    (b'{"filter":' * 100 + b"{}" + b"}" * 100, "application/json", 400),
    (b'{"filter":' * 20 + b"{}" + b"}" * 20, "application/json", 400),
    (b'{"filter":' * 19 + b"{}" + b"}" * 19, "application/json", 422),
    (b'"' + b'\\"' * 100_000, "application/json", 400),
    (b'"' + b"[" * 50 + b'"', "application/json", 422),
    (b"{}", "text/plain", 415),
    (b"{}", "application/x-www-form-urlencoded", 415),
    (b"{}", "multipart/form-data", 415),
    (b"{}", "", 415),
    (b"{}", "application/json; charset=utf-16", 415),
    (b"{}", "application/json; charset=UTF-8", 200),
    (b" \n", "text/plain", 200),
    (b" " * 262_145, "application/json", 413),
    (b'{"filter": {"error": "' + b"x" * 262_144 + b'"}}', "application/json", 413),
]


async def test_a_body_that_is_no_document(quick: Stage, subtests: pytest.Subtests) -> None:
    async with quick.client() as client:
        for content, kind, status in CONTENTS:
            with subtests.test(content=content[:30], kind=kind):
                answer = await client.post("/api/retry", content=content, headers={"content-type": kind})
                if status == 200:
                    assert answer.json()["retried"] == 0
                else:
                    is_problem(answer, status)


async def test_a_body_in_pieces_ends_where_it_gets_too_long(quick: Stage) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 65_536
            yield b" " * 65_536

    assert await asyncio.wait_for(_post(quick, endless()), 20) == 413
    assert sent < 1_000_000


async def test_a_body_that_does_not_come_is_not_waited_for(
    quick: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "SLOWEST_BODY", 0.05)

    async def silent() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    assert await asyncio.wait_for(_post(quick, silent()), 20) == 408


async def _post(stage: Stage, chunks: AsyncIterator[bytes]) -> int:
    """The status of a request whose body comes in pieces."""
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        chunk = await anext(chunks, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = {"host": "localhost", "content-type": "application/json", **bearer(OPERATOR)}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/retry",
        "raw_path": b"/api/retry",
        "root_path": "",
        "query_string": b"",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    await stage.web(scope, receive, send)  # type: ignore[arg-type]
    return statuses[0]


async def test_a_client_that_leaves_is_no_error(quick: Stage) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {OPERATOR}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/api/retry", "query_string": b"", "headers": headers}
    scope |= {"client": ("127.0.0.1", 1), "scheme": "http"}
    await quick.web(scope, receive, send)  # type: ignore[arg-type]
    assert sent == []


async def test_a_websocket_is_closed(quick: Stage) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await quick.web({"type": "websocket", "path": "/live"}, None, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1000}]


HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "'; DROP TABLE outbox_event; --",
    "{{ 7*7 }}",
    "\u202egnp.exe",
    "a\r\nrefresh: 0;x=1",
    "%s%n",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
)


async def test_hostile_texts_are_texts_everywhere(stage: Stage, subtests: pytest.Subtests) -> None:
    for text in HOSTILE:
        with subtests.test(text=text):
            await stays_a_text(stage, text)


async def stays_a_text(stage: Stage, text: str) -> None:
    await stage.post("/api/destinations/mail/pause", {"reason": text})
    assert (await stage.get("/api/destinations/mail"))["paused"]["reason"] == text
    id_ = stage.operated.emit("mail", aggregate_id=text, payload={text: text}, headers={"note": text})
    [found] = (await stage.get("/api/events", aggregate_id=text))["events"]
    assert found["aggregate_id"] == text
    [shown] = (await stage.get(f"/api/events/{id_}"))["deliveries"]
    assert (shown["payload"], shown["headers"]["note"]) == ({text: text}, text)
    assert (await stage.get("/api/events", error=text))["events"] == []
    async with stage.client() as client:
        answer = await client.get("/api/audit")
        assert "set-cookie" not in answer.headers
        assert answer.json()["audit"][0]["details"]["reason"] == text


PAYLOADS = ("[" * 5_000, '{"a": NaN}', '{"a": "\\ud800"}', "1" * 5_000, "no json", '"é"')


async def test_a_stored_payload_may_be_anything(quick: Stage) -> None:
    id_ = quick.operated.emit("mail")
    for payload in PAYLOADS:
        with quick.operated.engine.begin() as connection:
            connection.exec_driver_sql("UPDATE outbox_event SET payload = ?", (payload,))
        [shown] = (await quick.get(f"/api/events/{id_}"))["deliveries"]
        assert "payload" in shown


def test_a_path_is_decoded_part_by_part() -> None:
    def parts(raw: bytes, root: str = "", path: str = "") -> tuple[str, ...]:
        from urllib.parse import unquote

        return segments_of({"raw_path": raw, "root_path": root, "path": path or unquote(raw.decode())})

    assert parts(b"/api/destinations/a%2Fb/pause") == ("api", "destinations", "a/b", "pause")
    assert parts(b"/ops/x/api/stats", "/ops/x") == ("api", "stats")
    assert parts(b"/ops/x", "/ops/x") == ("",)
    assert parts(b"/ops/x/", "/ops/x") == ("",)
    assert parts(b"/events/") == ("events",)
    assert parts(b"/") == ("",)
    # A server that keeps the prefix to itself.
    assert parts(b"/api/stats", "/ops") == ("api", "stats")
    assert segments_of({"path": "/events/é", "root_path": ""}) == ("events", "é")


async def test_a_filter_of_nothing_is_everything() -> None:
    from relaybox.web.schemas import Criteria

    assert read.filter_of(Criteria()) == EVERYTHING
