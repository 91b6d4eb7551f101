"""What makes no sense or is out of bounds is a 4xx and a problem document, never a 500 or a change."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.requests import Request

from relaybox.core.redact import Rules
from relaybox.operate.admin import Admin
from relaybox.operate.bulk import MOST
from relaybox.stores.ledger import EVERYTHING
from relaybox.web import app, dashboard, read
from relaybox.web.auth import Cursors
from relaybox.web.schemas import Criteria
from relaybox.web.templating import LONGEST_FLASH, read_flash, redirect
from tests.waiting import PATIENCE
from tests.web.stage import HTML, NOBODY, OPERATOR, VIEWER, Stage, csrf_of, is_problem, log_in, status_of

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


async def test_the_answer_to_a_misspelt_name_has_the_right_one(quick: Stage) -> None:
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


async def test_an_invalid_id_is_refused(quick: Stage, subtests: pytest.Subtests) -> None:
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
    *((body, JSON, 400) for body in (b"{", b"{}{}", b"\xff\xfe{}", b'{"a": 1, "a": 2}', b'{"rate": NaN}')),
    (b'{"rate": ' + b"9" * 5_000 + b"}", JSON, 400),
    (b'{"rate": 1e999}', JSON, 422),
    (b"[" * 100_000, JSON, 400),
    *((b'{"filter":' * deep + b"{}" + b"}" * deep, JSON, 400) for deep in (100, 20)),
    (b'{"filter":' * 19 + b"{}" + b"}" * 19, JSON, 422),
    (b'"' + b'\\"' * 100_000, JSON, 400),
    (b'"' + b"[" * 50 + b'"', JSON, 422),
    *((b"{}", kind, 415) for kind in ("text/plain", "application/x-www-form-urlencoded", "")),
    *((b"{}", kind, 415) for kind in ("multipart/form-data", f"{JSON}; charset=utf-16")),
    (b"{}", f"{JSON}; charset=UTF-8", 200),
    (b" \n", "text/plain", 200),
    (b" " * 262_145, JSON, 413),
    (b'{"filter": {"error": "' + b"x" * 262_144 + b'"}}', JSON, 413),
]


async def test_a_body_that_is_not_a_document_is_refused(quick: Stage, subtests: pytest.Subtests) -> None:
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


async def test_a_body_that_does_not_come_is_a_408(quick: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "SLOWEST_BODY", 0.05)

    async def silent() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    assert await _post(quick, silent()) == 408


async def _post(stage: Stage, chunks: AsyncIterator[bytes]) -> int:
    """Return the status of a request whose body comes in pieces."""

    async def receive() -> dict[str, Any]:
        chunk = await anext(chunks, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    headers = {"host": "localhost", "content-type": JSON, "authorization": f"Bearer {OPERATOR}"}
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    asked = status_of(stage.web, "/api/retry", receive, method="POST", headers=sent)
    return await asyncio.wait_for(asked, PATIENCE)


async def test_a_client_that_leaves_is_not_an_error(quick: Stage) -> None:
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
        (b"/api/destinations/a%2Fb/pause", "", "/api/destinations/a%2Fb/pause"),
        (b"/%61pi/destinations/a%2fb+c", "", "/api/destinations/a%2Fb%2Bc"),
        (b"/ops/x/api/stats", "/ops/x", "/ops/x/api/stats"),
        (b"/ops/x", "/ops/x", "/ops/x/"),
        (b"/ops/x/", "/ops/x/", "/ops/x/"),
        (b"/events/?status=failed", "", "/events"),
        (b"/", "", "/"),
        # A server that keeps the prefix to itself.
        (b"/api/stats", "/ops", "/ops/api/stats"),
    ],
)
def test_a_path_is_encoded_part_by_part(raw: bytes, root: str, expected: str) -> None:
    path = unquote(raw.decode().partition("?")[0])
    assert app.located({"raw_path": raw, "root_path": root, "path": path})["path"] == expected


def test_a_path_that_is_not_raw_is_taken_as_it_is() -> None:
    assert app.located({"path": "/events/é", "root_path": ""})["path"] == "/events/%C3%A9"


async def test_a_path_that_is_not_in_utf_8_is_refused(quick: Stage) -> None:
    for path in (b"/%ff", b"/api/events/%ff", b"/events/\xff"):
        headers = [(b"host", b"localhost")]
        assert await status_of(quick.web, "/?", raw_path=path, headers=headers) == 400


def test_a_filter_of_nothing_is_everything() -> None:
    assert read.filter_of(Criteria(), Rules()) == EVERYTHING


async def test_a_browser_is_shown_a_page_and_a_program_a_document(quick: Stage) -> None:
    async with quick.client(VIEWER) as client:
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", "/<img src=x onerror=alert(1)>", 404),
            ("POST", "/actions/pause", 403),
            ("PUT", "/events", 405),
        ):
            page = await client.request(method, path, headers=HTML)
            assert page.status_code == status
            assert page.headers["content-type"].startswith("text/html")
            assert "<img" not in page.text
            assert page.headers["x-frame-options"] == "DENY"
            is_problem(await client.request(method, path), status)
        assert "GET" in page.headers["allow"]


@pytest.mark.parametrize("headers", [{}, HTML])
async def test_a_defect_is_logged_and_tells_the_client_nothing(
    quick: Stage, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: Admin) -> None:
        raise RuntimeError("hunter22")

    monkeypatch.setattr(Admin, "stats", broken)
    async with quick.client() as client:
        answer = await client.get("/api/stats", headers=headers)
    assert answer.status_code == 500
    assert "hunter22" not in answer.text
    assert [record.levelno for record in caplog.records if record.name == "relaybox.web"] == [logging.ERROR]


async def test_an_answer_that_does_not_come_is_a_503(quick: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(self: Admin) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Admin, "stats", slow)
    monkeypatch.setattr(app, "PATIENCE", 0.05)
    async with quick.client() as client:
        answer = await client.get("/api/stats")
    assert "took too long" in is_problem(answer, 503)["detail"]


async def test_a_missing_package_is_a_501(quick: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from relaybox.errors import MissingExtra
    from relaybox.operate import metrics

    async def missing(*_: object, **__: object) -> None:
        raise MissingExtra("prometheus-client", "metrics")

    monkeypatch.setattr(metrics, "exposition", missing)
    async with quick.client() as client:
        problem = is_problem(await client.get("/metrics"), 501)
    assert problem["detail"] == "prometheus-client is not installed: pip install 'relaybox[metrics]'"


async def test_credentials_in_the_address_are_none(quick: Stage) -> None:
    async with quick.client(token=None) as client:
        for query in (f"token={OPERATOR}", f"access_token={OPERATOR}"):
            is_problem(await client.get(f"/api/stats?{query}"), 401)
        assert (
            await client.get("/api/stats", headers={"authorization": f"Bearer {OPERATOR}"})
        ).status_code == 200


async def test_no_more_than_a_few_operations_run_at_once(quick: Stage) -> None:
    for _ in range(3):
        quick.operated.emit("mail")
    await quick.operated.fail("mail")
    slowly = {"background": True, "rate": 0.1}
    for _ in range(MOST):
        await quick.post("/api/retry", slowly, 202)
        quick.operated.emit("mail")
        await quick.operated.fail("mail")
    async with quick.client() as client:
        refused = await client.post("/api/retry", json=slowly)
    assert "operations run in this process already" in is_problem(refused, 429)["detail"]
    assert int(refused.headers["retry-after"]) > 0
    assert len((await quick.get("/api/operations"))["operations"]) == MOST
    async with quick.client(token=None) as client:
        await log_in(client)
        form = {"csrf": await csrf_of(client), "status": "failed", "destination": "mail"}
        answer = await client.post("/actions/retry", data=form, headers=HTML)
        assert answer.status_code == 303
        assert "operations run" in (await client.get(answer.headers["location"], headers=HTML)).text


@pytest.mark.parametrize("rate", [0, -1, 0.09, 1e-9])
async def test_a_rate_that_never_ends_is_refused(quick: Stage, rate: float) -> None:
    async with quick.client() as client:
        is_problem(await client.post("/api/retry", json={"background": True, "rate": rate}), 422)


@pytest.mark.parametrize("rate", ["9" * 5_000, "0", "0000000", "1000000", "-1", "1e9", "٣"])
async def test_an_invalid_rate_in_a_form_is_reported(quick: Stage, rate: str) -> None:
    async with quick.client(token=None) as client:
        await log_in(client)
        form = {"csrf": await csrf_of(client), "status": "failed", "rate": rate}
        answer = await client.post("/actions/retry", data=form, headers=HTML)
        assert answer.status_code == 303
        assert "is not a number from 1 to 999999" in (await client.get("/events", headers=HTML)).text
    assert not (await quick.get("/api/operations"))["operations"]


@pytest.mark.parametrize("place", ["nothing", "", "1" * 5_000, "9" * 19, "-1", "é", "1.5"])
async def test_a_cursor_that_leads_nowhere_is_refused(quick: Stage, place: str) -> None:
    cursors = quick.web.cursors = Cursors(b"known to somebody")
    bad = base64.urlsafe_b64encode(cursors._mac("audit", b"\xff") + b"\xff").rstrip(b"=").decode()
    async with quick.client() as client:
        for path, cursor in (
            ("/api/dead-letters", cursors.seal("dead letters", place)),
            ("/api/audit", cursors.seal("audit", place)),
            ("/api/audit", bad),
        ):
            is_problem(await client.get(path, params={"cursor": cursor}), 422)


async def test_without_users_nobody_knows_the_key_of_cursors(quick: Stage) -> None:
    async with dashboard(quick.outbox) as first, dashboard(quick.outbox) as second:
        assert first.cursors.seal("audit", 1) != second.cursors.seal("audit", 1)


async def test_a_pause_until_a_time_that_is_over_is_refused(quick: Stage) -> None:
    over = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    async with quick.client() as client:
        for until in (over, "2020-01-01T00:00:00Z", "0s"):
            answer = await client.post("/api/destinations/mail/pause", json={"until": until})
            assert is_problem(answer, 422)["parameter"] == "until"
        answer = await client.post("/api/destinations/mail/pause", json={"until": "10m"})
        assert answer.status_code == 200
    async with quick.client(token=None) as client:
        await log_in(client)
        form = {"csrf": await csrf_of(client), "destination": "web", "reason": "x", "for": "0s"}
        await client.post("/actions/pause", data=form, headers=HTML)
        assert "a pause needs a length" in (await client.get("/events", headers=HTML)).text
    assert (await quick.get("/api/destinations/web"))["paused"] is None


@pytest.mark.parametrize("letter", ["a", "é", "\U0001f512", '"', "\\", "\x01", "\ud800"])
def test_a_message_fits_into_a_cookie(letter: str) -> None:
    scope = {"type": "http", "headers": [(b"host", b"x")], "path": "/", "scheme": "http", "query_string": b""}
    cookie = redirect(Request(scope), "/", letter * 5_000).headers["set-cookie"]
    assert len(cookie) < 4_096
    given = cookie.partition(";")[0].encode()
    read = read_flash(Request({**scope, "headers": [(b"cookie", given)]}))
    assert read is not None
    assert read[0] == "done"
    assert 0 < len(read[1]) <= LONGEST_FLASH
