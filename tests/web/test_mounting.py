"""Mounted in other applications, and as ``relaybox web`` runs it: a process, a port, signals."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
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
from tests.integration.project import Project
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


def test_its_own_lifespan_closes_what_was_opened_and_another_loop_opens_it_again(outbox: Outbox) -> None:
    web = api(outbox, users=USERS)
    for _ in range(2):
        with TestClient(web, client=("127.0.0.1", 1)) as client:
            assert client.get("/stats", headers=bearer(OPERATOR)).status_code == 200
            assert web.service._admin is not None
        assert web.service._admin is None


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


TOKEN = "a-token-of-some-length"
TABLE = f"[web.users.ann]\ntoken = '{TOKEN}'\nrole = 'operator'\n"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    project.write("relaybox.toml", f"[destinations.a]\nsink = 'memory:'\n[web]\nport = 0\n{TABLE}")
    project.run("migrate")
    return project


def port_of(project: Project) -> int:
    project.until(lambda: "http://" in project.read("out"))
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", project.read("out"))
    assert found, project.read("out")
    return int(found[1])


def ask(port: int, method: str, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={"authorization": f"Bearer {TOKEN}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_it_serves_and_stops_when_it_is_asked_to(project: Project) -> None:
    with project.running("web") as process:
        port = port_of(project)
        assert ask(port, "GET", "/api/stats")[0] == 200
        assert ask(port, "GET", "/", accept="text/html")[0] == 200
        assert ask(port, "GET", "/api/stats", authorization="Bearer wrong-wrong")[0] == 401
        assert ask(port, "POST", "/api/destinations/a%2Fb/pause")[0] == 404
        assert ask(port, "GET", "/static/..%2f..%2fapp.py")[0] == 404
        with socket.create_connection(("127.0.0.1", port), 60) as raw:
            raw.sendall(b"POST /api/retry HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n")
            raw.sendall(f"authorization: Bearer {TOKEN}\r\n\r\n".encode())
            for _ in range(5):
                raw.sendall(b"10000\r\n" + b" " * 65_536 + b"\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 413")
        with socket.create_connection(("127.0.0.1", port), 60) as live:
            live.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n")
            live.sendall(f"authorization: Bearer {TOKEN}\r\n\r\n".encode())
            assert live.recv(1000).startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, project.read("log")
    assert TOKEN not in project.read("log") + project.read("out")
    assert "Traceback" not in project.read("log")


def test_it_refuses_to_serve_everybody_without_users(project: Project) -> None:
    project.write("relaybox.toml", "[destinations.a]\nsink = 'memory:'\n")
    output = project.run("web", "--host", "0.0.0.0", status=2)
    assert "no users are configured; add a [web.users.NAME] table" in output
    output = project.run("web", "--port", "0", "--require-users", status=2)
    assert "--require-users, and no users are configured; add a [web.users.NAME] table" in output


def test_a_port_that_is_taken_is_reported(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        output = project.run("web", "--port", str(other.getsockname()[1]), status=2)
    assert "cannot be listened on" in output
    assert output.count("\n") == 1


def test_missing_tables_are_reported_at_the_start(tmp_path: Path) -> None:
    project = Project(tmp_path)
    assert "migrate" in project.run("web", "--port", "0", status=2)


@pytest.mark.parametrize("package", ["starlette", "jinja2"])
def test_without_the_extra_one_line_says_what_to_install(package: str) -> None:
    code = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name == {package!r} else find(name, *a)\n"
        "from relaybox import Outbox\nfrom relaybox.web import api\n"
        "try:\n    api(Outbox('sqlite:///x.db'))\nexcept ImportError as error:\n    print(error)\n"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said == f"{package} is not installed: pip install 'relaybox[web]'\n"
