"""What grows, and what is out of bounds: operations, cursors, rates, pauses, messages."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

import pytest
from starlette.requests import Request

from relaybox.bulk import MOST
from relaybox.web import dashboard
from relaybox.web.cursor import Cursors
from relaybox.web.templating import LONGEST_FLASH, read_flash, redirect
from tests.web.stage import HTML, Stage, csrf_of, is_problem, log_in


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
async def test_a_rate_of_a_form_that_is_none_is_told(quick: Stage, rate: str) -> None:
    async with quick.client(token=None) as client:
        await log_in(client)
        form = {"csrf": await csrf_of(client), "status": "failed", "rate": rate}
        answer = await client.post("/actions/retry", data=form, headers=HTML)
        assert answer.status_code == 303
        assert "is no number from 1 to 999999" in (await client.get("/events", headers=HTML)).text
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
        assert "a pause of no time is none" in (await client.get("/events", headers=HTML)).text
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
