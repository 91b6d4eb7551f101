"""What a refusal looks like to a program and to a browser, and that a defect tells nothing."""

from __future__ import annotations

import asyncio
import logging

import pytest

from relaybox.admin import Admin
from relaybox.web import app
from tests.web.stage import HTML, OPERATOR, VIEWER, Stage, bearer, is_problem


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


async def test_an_answer_that_does_not_come_is_not_waited_for(
    quick: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(self: Admin) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Admin, "stats", slow)
    monkeypatch.setattr(app, "PATIENCE", 0.05)
    async with quick.client() as client:
        answer = await client.get("/api/stats")
    assert "took too long" in is_problem(answer, 503)["detail"]


async def test_a_missing_package_is_a_501(quick: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from relaybox import metrics
    from relaybox.errors import MissingExtra

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
        assert (await client.get("/api/stats", headers=bearer(OPERATOR))).status_code == 200
