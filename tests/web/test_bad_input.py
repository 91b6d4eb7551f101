"""Whatever a client sends that makes no sense is a 4xx and a problem document; never a 500 or a change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import pytest

from relaybox.ledger import EVERYTHING
from relaybox.web import read
from relaybox.web.route import segments_of
from relaybox.web.schemas import Criteria
from tests.waiting import PATIENCE
from tests.web.stage import NOBODY, OPERATOR, Stage, bearer, is_problem, status_of

HUGE = "9" * 5_000

QUERIES: list[tuple[str, str, list[str]]] = [
    ("events", "limit", ["0", "-1", "501", HUGE, "1e3", "", "ten", "5&limit=6"]),
    ("events", "status", ["lost"]),
    ("events", "staus", ["failed"]),
    ("events", "event_id", ["7"]),
    ("events", "since", ["yesterday", "2026-13-45", "0001-01-01T00:00:00%2B23:59"]),
    ("events", "until", ["99999999999d"]),
    ("events", "cursor", ["abc", str(NOBODY), "%00", "A" * 5_000]),
    ("events", "aggregate_id", ["a%00b"]),
    ("events", "error", ["x" * 1_001]),
    ("audit", "cursor", ["5"]),
    ("audit", "limit", ["x"]),
    ("dead-letters", "cursor", ["AAAA"]),
    ("failures", "status", ["failed"]),
    ("operations", "limit", ["0"]),
    ("series", "hours", ["0", "nan", "inf", "1e9", "-1"]),
    ("stats", "limit", ["5"]),
]
UNKNOWN = ("events?destination=mial", "failures?destination=mial", "series?hours=1&destination=mial")


async def test_a_parameter_that_makes_no_sense(quick: Stage, subtests: pytest.Subtests) -> None:
    asked = [(f"{path}?{name}={value}", name) for path, name, values in QUERIES for value in values]
    async with quick.client() as client:
        for query, parameter in [*asked, *((one, None) for one in UNKNOWN)]:
            with subtests.test(query=query[:60]):
                problem = is_problem(await client.get(f"/api/{query}"), 422)
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


MISSING = {
    "GET": [
        *(f"/api/events/{NOBODY}", f"/api/events/{NOBODY}/why", f"/api/operations/{NOBODY}"),
        *("/api/destinations/nobody", "/api", "/api/api/stats", "/api/nothing", "//api//stats"),
        "/api/events//why",
    ],
    "POST": [
        f"/api/operations/{NOBODY}/cancel",
        *(f"/api/destinations/nobody/{action}" for action in ("pause", "resume", "test")),
        *(f"/api/destinations/{name}/pause" for name in ("a%2Fb", "%00", "%E2%80%AE")),
    ],
}


async def test_what_does_not_exist_is_a_404(stage: Stage, subtests: pytest.Subtests) -> None:
    async with stage.client() as client:
        for method, path in [(method, path) for method, paths in MISSING.items() for path in paths]:
            with subtests.test(method=method, path=path):
                is_problem(await client.request(method, f"http://localhost{path}"), 404)


ID = {"ids": [str(NOBODY)]}
BODIES: dict[str, list[Any]] = {
    "retry": [
        *([], "all", 7, None, {"ids": []}, {"ids": "x"}, {"ids": ["x"]}, {"ids": [7]}),
        *({"ids": [str(NOBODY)] * 101}, {**ID, "all": True}, {**ID, "filter": {"status": "failed"}}),
        *({**ID, "background": True}, {"filter": {"status": "delivered"}}, {"filter": {"status": 5}}),
        *({"filter": {"status": {"$ne": None}}}, {"filter": {"destination": "nobody"}}),
        *({"filter": {"destination": "a\0b"}}, {"filter": {"since": "soon"}}, {"filter": []}),
        *({"all": True, "filter": {"destination": "mail"}}, {"dry_run": "yes"}, {"dry_run": 1}),
        *({"rate": 0}, {"rate": -1}, {"rate": "fast"}, {"to": "mail"}),
    ],
    "replay": [{"all": True, "to": "nobody"}, {"all": True, "to": 5}],
    "discard": [{"all": "true"}],
    "move": [
        *({}, {"from": "mail"}, {"from": "mail", "to": "mail"}, {"from": "mail", "to": "nobody"}),
        *({"from": "nobody", "to": "mail"}, {"from_": "mail", "to": "web"}),
    ],
    "destinations/mail/pause": [
        *({"reason": 5}, {"reason": "x" * 1_001}, {"reason": "a\0"}, {"until": "then"}, {"until": 5}),
    ],
    "destinations/mail/resume": [{"reason": "x"}],
    f"operations/{NOBODY}/cancel": [{"now": True}],
}


async def test_a_body_that_makes_no_sense(quick: Stage, subtests: pytest.Subtests) -> None:
    quick.operated.emit("mail")
    bodies = [(path, body, 422) for path, bodies in BODIES.items() for body in bodies]
    async with quick.client() as client:
        for path, document, status in [*bodies, ("retry", {"filter": {"aggregate_id": "\ud800"}}, 400)]:
            with subtests.test(path=path, body=str(document)[:60]):
                headers = {"content-type": "application/json"}
                answer = await client.post(f"/api/{path}", content=json.dumps(document), headers=headers)
                assert len(is_problem(answer, status)["detail"]) < 600
    assert not quick.operated.audit()


JSON = "application/json"
CONTENTS = [
    *(
        (content, JSON, 400)
        for content in (b"{", b"{}{}", b"\xff\xfe{}", b'{"a": 1, "a": 2}', b'{"rate": NaN}')
    ),
    (b'{"rate": ' + b"9" * 5_000 + b"}", JSON, 400),
    (b'{"rate": 1e999}', JSON, 422),
    (b"[" * 100_000, JSON, 400),
    *((b'{"filter":' * deep + b"{}" + b"}" * deep, JSON, 400) for deep in (100, 20)),
    (b'{"filter":' * 19 + b"{}" + b"}" * 19, JSON, 422),
    (b'"' + b'\\"' * 100_000, JSON, 400),
    (b'"' + b"[" * 50 + b'"', JSON, 422),
    *(
        (b"{}", kind, 415)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
    ),
    *((b"{}", kind, 415) for kind in ("", f"{JSON}; charset=utf-16")),
    (b"{}", f"{JSON}; charset=UTF-8", 200),
    (b" \n", "text/plain", 200),
    (b" " * 262_145, JSON, 413),
    (b'{"filter": {"error": "' + b"x" * 262_144 + b'"}}', JSON, 413),
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

    assert await _post(quick, endless()) == 413
    assert sent < 1_000_000


async def test_a_body_that_does_not_come_is_not_waited_for(
    quick: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "SLOWEST_BODY", 0.05)

    async def silent() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    assert await _post(quick, silent()) == 408


async def _post(stage: Stage, chunks: AsyncIterator[bytes]) -> int:
    """The status of a request whose body comes in pieces."""

    async def receive() -> dict[str, Any]:
        chunk = await anext(chunks, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    headers = {"host": "localhost", "content-type": JSON, **bearer(OPERATOR)}
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    asked = status_of(stage.web, "/api/retry", receive, method="POST", headers=sent)
    return await asyncio.wait_for(asked, PATIENCE)


async def test_a_client_that_leaves_is_no_error(quick: Stage) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {OPERATOR}".encode())]
    await status_of(quick.web, "/api/retry", receive, sent, method="POST", headers=headers)
    assert sent == []


async def test_a_websocket_is_closed(quick: Stage) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await quick.web({"type": "websocket", "path": "/live"}, None, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1000}]


HOSTILE = (
    *("<img src=x onerror=alert(1)>", "'; DROP TABLE outbox_event; --", "{{ 7*7 }}", "\u202egnp.exe"),
    *("a\r\nrefresh: 0;x=1", "%s%n", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢"),
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


@pytest.mark.parametrize(
    ("raw", "root", "expected"),
    [
        (b"/api/destinations/a%2Fb/pause", "", ("api", "destinations", "a/b", "pause")),
        (b"/ops/x/api/stats", "/ops/x", ("api", "stats")),
        (b"/ops/x", "/ops/x", ("",)),
        (b"/ops/x/", "/ops/x", ("",)),
        (b"/events/", "", ("events",)),
        (b"/", "", ("",)),
        # A server that keeps the prefix to itself.
        (b"/api/stats", "/ops", ("api", "stats")),
    ],
)
def test_a_path_is_decoded_part_by_part(raw: bytes, root: str, expected: tuple[str, ...]) -> None:
    assert segments_of({"raw_path": raw, "root_path": root, "path": unquote(raw.decode())}) == expected


def test_a_path_that_is_not_raw_is_taken_as_it_is() -> None:
    assert segments_of({"path": "/events/é", "root_path": ""}) == ("events", "é")


def test_a_filter_of_nothing_is_everything() -> None:
    assert read.filter_of(Criteria()) == EVERYTHING
