"""``/livez`` and ``/readyz``, and what a database that is away does to everything else."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime

import pytest

from relaybox import Destination, Outbox
from relaybox.operate.admin import Admin
from relaybox.operate.health import Health, Problem
from relaybox.web import api, dashboard
from tests.web.stage import OPERATOR, USERS, VIEWER, Stage, bearer, is_problem, log_in


async def test_a_quiet_outbox_is_alive_and_ready(stage: Stage) -> None:
    async with stage.client(token=None) as client:
        assert (await client.get("/livez")).json() == {"alive": True}
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "problems": []})


async def test_work_that_nobody_does_shows(stage: Stage) -> None:
    id_ = stage.operated.emit("mail")
    past = datetime(2020, 1, 1, tzinfo=UTC)
    stage.operated.change(id_, next_attempt_at=past, created_at=past)
    async with stage.client(token=None) as client:
        answer = await client.get("/readyz")
    assert answer.status_code == 503
    found = answer.json()
    assert found["ready"] is False
    assert found["problems"]
    assert all(problem["reason"] for problem in found["problems"])


async def test_strangers_do_not_learn_the_reason(quick: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def unhealthy(self: Admin) -> Health:
        nonlocal asked
        asked += 1
        return Health(False, (Problem("mail", "its circuit is open: refused by 10.0.0.9", 5.0),))

    monkeypatch.setattr(Admin, "health", unhealthy)
    async with quick.client(token=None) as stranger, quick.client(VIEWER) as viewer:
        hidden, shown = (await asyncio.gather(stranger.get("/readyz"), viewer.get("/readyz")))[:2]
    [problem] = hidden.json()["problems"]
    assert problem == {"destination": None, "reason": "its circuit is open", "seconds": 5.0}
    assert "mail" not in hidden.text
    assert shown.json()["problems"][0]["reason"] == "its circuit is open: refused by 10.0.0.9"
    assert (hidden.status_code, shown.status_code, asked) == (503, 503, 1)


async def test_a_session_is_a_stranger_to_probes(quick: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unhealthy(self: Admin) -> Health:
        return Health(False, (Problem("mail", "its circuit is open: refused", 5.0),))

    monkeypatch.setattr(Admin, "health", unhealthy)
    async with quick.client(token=None) as client:
        await log_in(client)
        assert "mail" not in (await client.get("/readyz")).text


async def test_a_probe_may_ask_by_any_name(quick: Stage) -> None:
    async with (
        dashboard(quick.outbox, users=USERS, hosts=["outbox.example.org"]) as web,
        quick.client(token=None, web=web, host="10.0.0.9:8811") as client,
    ):
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 200
        is_problem(await client.get("/api/stats", headers=bearer(OPERATOR)), 421)


@pytest.mark.parametrize("path", ["/api/stats", "/api/events", "/api/audit", "/api/failures", "/readyz"])
async def test_a_database_that_is_away_is_a_503_without_its_password(
    quick: Stage, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    away = Outbox("postgresql://me:hunter22@127.0.0.1:1/nowhere", destinations=[Destination("a", "memory:")])
    caplog.set_level(logging.DEBUG, "relaybox")
    async with api(away, users=USERS) as web, quick.client(web=web) as client:
        answer = await client.get(path)
        assert (await client.get("/livez")).status_code == 200
    assert answer.status_code == 503
    if path != "/readyz":
        assert is_problem(answer, 503)["detail"]
        assert int(answer.headers["retry-after"]) > 0
    assert "hunter22" not in answer.text + caplog.text + repr(web.__dict__)


async def test_tables_that_are_missing_are_a_503_that_says_so(quick: Stage, tmp_path: object) -> None:
    empty = Outbox(f"sqlite:///{tmp_path}/empty.db")
    async with api(empty, users=USERS) as web, quick.client(web=web) as client:
        assert "migrate" in is_problem(await client.get("/api/stats"), 503)["detail"]
