"""Mounted in other applications, under a prefix, with and without a lifespan."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from relaybox import Destination, Outbox
from relaybox.web import api, dashboard
from tests.web.stage import OPERATOR, USERS, bearer


@pytest.fixture
def outbox(migrated_database: Callable[[str], str]) -> Outbox:
    return Outbox(migrated_database("sqlite"), destinations=[Destination("a/b", "memory:")])


def in_starlette(app: Any) -> Any:
    return Starlette(routes=[Mount("/ops/outbox", app)])


def in_fastapi(app: Any) -> Any:
    fastapi = FastAPI()
    fastapi.mount("/ops/outbox", app)
    return fastapi


def in_both(app: Any) -> Any:
    return Starlette(routes=[Mount("/ops", Starlette(routes=[Mount("/outbox", app)]))])


@pytest.mark.parametrize("mount", [in_starlette, in_fastapi, in_both])
@pytest.mark.parametrize("face", [dashboard, api])
async def test_everything_answers_under_the_prefix(outbox: Outbox, mount: Any, face: Any) -> None:
    web = face(outbox, users=USERS)
    transport = httpx2.ASGITransport(app=mount(web), client=("127.0.0.1", 1))
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://shop.example/ops/outbox", headers=bearer(OPERATOR)
    ) as client:
        assert (await client.get("/stats")).json()["pending"] == 0
        assert (await client.get("/api/events?status=failed&limit=50")).json()["events"] == []
        assert (await client.post("/retry")).json()["retried"] == 0
        assert (await client.post("/destinations/a%2Fb/pause")).json()["destination"] == "a/b"
        document = (await client.get("/api/openapi.json")).json()
        assert document["servers"] == [{"url": "/ops/outbox"}]
        begun = await client.post("/retry", json={"background": True})
        assert begun.headers["location"].startswith("/ops/outbox/api/operations/")
        assert (await client.get("/livez")).status_code == 200
        pages = await client.get("/", headers={"accept": "text/html"})
        assert pages.status_code == (200 if face is dashboard else 404)
    await web.close()


def test_its_own_lifespan_closes_what_was_opened(outbox: Outbox) -> None:
    web = api(outbox, users=USERS)
    with TestClient(web, client=("127.0.0.1", 1)) as client:
        assert client.get("/stats", headers=bearer(OPERATOR)).status_code == 200
        assert web.service._admin is not None
    assert web.service._admin is None


def test_another_event_loop_opens_anew(outbox: Outbox) -> None:
    web = api(outbox, users=USERS)
    for _ in range(2):
        with TestClient(web, client=("127.0.0.1", 1)) as client:
            assert client.get("/stats", headers=bearer(OPERATOR)).status_code == 200


async def test_after_close_it_opens_again(outbox: Outbox) -> None:
    web = api(outbox, users=USERS)
    for _ in range(2):
        async with web:
            transport = httpx2.ASGITransport(app=web)
            async with httpx2.AsyncClient(transport=transport, base_url="http://a.example") as client:
                assert (await client.get("/stats", headers=bearer(OPERATOR))).status_code == 200


def test_the_outbox_brings_its_own_table(outbox: Outbox) -> None:
    own = Outbox(outbox.settings.database, web={"users": USERS, "redact": ["a.b"]})
    assert api(own).settings.redact == ("a.b",)
    assert api(own, redact=["c"]).settings.redact == ("c",)
    assert "token" not in repr(own.settings)


IN_FRONT_OF_DJANGO = """
import asyncio, os, types, sys
import django, httpx2
from django.conf import settings
from relaybox import Outbox

urls = sys.modules["urls"] = types.ModuleType("urls")
urls.urlpatterns = []
settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF="urls", SECRET_KEY="of no use to anybody")
django.setup()
outbox = Outbox(os.environ["DATABASE_URL"])
users = {"ann": {"token": "token-of-ann-alone", "role": "viewer"}}
%s

async def use():
    transport = httpx2.ASGITransport(app=application)
    headers = {"authorization": "Bearer token-of-ann-alone"}
    given = {"transport": transport, "base_url": "http://a.example", "headers": headers}
    async with httpx2.AsyncClient(**given) as client:
        for path in ("/outbox/api/stats", "/outbox/events", "/outbox/", "/of-django"):
            print((await client.get(path)).status_code)
    await application.routes[0].app.close()

asyncio.run(use())
"""


def test_in_front_of_django_as_the_document_has_it(outbox: Outbox) -> None:
    document = (Path(__file__).parents[2] / "docs/how-to/web.md").read_text()
    [block] = re.findall(r"^```py\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "DATABASE_URL": outbox.settings.database}
    code = IN_FRONT_OF_DJANGO % block
    said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert said.split() == ["200", "200", "200", "404"]


def test_the_names_are_what_they_say_whatever_else_was_imported() -> None:
    import relaybox.web
    import relaybox.web.routes

    assert relaybox.web.__all__ == ["api", "dashboard"]
    assert all(callable(getattr(relaybox.web, name)) for name in relaybox.web.__all__)
    assert relaybox.web.routes.ROUTES


@pytest.mark.parametrize("accept", ["*/*", "application/json", "", "text/html,*/*;q=0.8"])
async def test_a_page_is_for_those_who_ask_for_one(outbox: Outbox, accept: str) -> None:
    kind = "text/html; charset=utf-8" if "html" in accept else "application/json"
    web = dashboard(outbox, users=USERS)
    transport = httpx2.ASGITransport(app=web)
    headers = {**bearer(OPERATOR), "accept": accept}
    async with web, httpx2.AsyncClient(transport=transport, base_url="http://a", headers=headers) as client:
        for path in ("/events", "/destinations", "/failures", "/audit", "/relays", "/destinations/a%2Fb"):
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, kind), path
