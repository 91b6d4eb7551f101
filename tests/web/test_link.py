"""Without users: nobody is let in for being local; the login link opens one session; scripts send a token."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from relaybox import Outbox
from relaybox.errors import ConfigError
from relaybox.web import api, dashboard
from relaybox.web.routes import ROUTES
from relaybox.web.settings import TOKEN
from tests.integration.project import Project
from tests.web.stage import HTML, Stage, bearer, csrf_of, is_problem, log_in, status_of
from tests.web.test_roles import NEEDS_A_ROLE, address

OURS = "a-token-of-the-environment"
ADDRESSES = ("127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "10.0.0.1", None)
LINK = re.compile(r"\S*/login\?token=[\w-]{32}")


@pytest.fixture(autouse=True)
def without_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)


async def test_loopback_alone_never_authenticates(quick: Stage, subtests: pytest.Subtests) -> None:
    async with dashboard(quick.outbox) as web:
        for where, version, route in product(ADDRESSES, ("1.0", "1.1", "2"), NEEDS_A_ROLE):
            with subtests.test(address=where, version=version, route=f"{route.method} {route.path}"):
                scope = {"client": where and (where, 1), "http_version": version, "method": route.method}
                headers = [(b"host", b"localhost:8811")]
                assert await status_of(web, address(route), headers=headers, **scope) == 401
    assert not quick.operated.audit()


async def test_a_bare_proxy_on_this_host_opens_nothing(quick: Stage) -> None:
    # nginx with `proxy_pass` alone: no header of a proxy, and its own address as the host.
    for face in (dashboard, api):
        async with face(quick.outbox) as web, quick.client(None, web=web, host="127.0.0.1:8811") as client:
            problem = is_problem(await client.get("/api/stats"), 401)
            assert TOKEN in problem["detail"]
            is_problem(await client.post("/api/destinations/mail/pause"), 401)
            assert (await client.get("/livez")).json() == {"alive": True}
    assert not quick.operated.audit()


def links(caplog: pytest.LogCaptureFixture) -> list[str]:
    return LINK.findall(caplog.text)


def leads(answer: httpx2.Response) -> str:
    """Return where the page behind a link leads to."""
    found = re.search(r'content="0;url=([^"]*)"', answer.text)
    assert found, answer.text
    return found[1]


async def test_the_link_opens_one_session(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    async with dashboard(stage.outbox) as web:
        async with stage.client(None, web=web, headers=HTML) as client:
            assert (await client.get("/events")).headers["location"] == "/login?next=%2Fevents"
            assert "No users are configured" in (await client.get("/login")).text
            await client.get("/login")
            [link] = links(caplog)
            assert (await client.head(link)).status_code == 200
            opened = await client.get(link)
            assert (opened.status_code, leads(opened)) == (200, "/")
            assert {"HttpOnly", "SameSite=strict"} <= set(opened.headers["set-cookie"].split("; "))
            assert "local <" in (await client.get("/events")).text
            csrf = {"x-csrf-token": await csrf_of(client)}
            paused = await client.post("/api/destinations/mail/pause", headers=csrf)
            assert paused.status_code == 200
        async with stage.client(None, web=web, headers=HTML) as other:
            again = await other.get(link)
            assert again.status_code == 401
            assert "The link was used already" in again.text
            assert "relaybox_session" not in again.headers.get("set-cookie", "")
            assert (await other.get("/events")).status_code == 303
            # The next one was logged for the one that came too late.
            [_, following] = links(caplog)
            assert leads(await other.get(following)) == "/"
            assert (await other.get("/events")).status_code == 200
            await other.post("/logout", data={"csrf": await csrf_of(other)})
            assert (await other.get("/events")).status_code == 303
    audit = [(actor, action) for actor, action, *_ in stage.operated.audit()]
    assert audit == [
        *(("local", "login"), ("local", "pause"), ("unknown", "login refused")),
        *(("local", "login"), ("local", "logout")),
    ]


async def test_the_link_cannot_be_sent_as_a_token_and_guesses_are_limited(quick: Stage) -> None:
    async with dashboard(quick.outbox) as web, quick.client(None, web=web, headers=HTML) as client:
        assert web.gate.link is not None
        code = web.gate.link.url().partition("=")[2]
        is_problem(await client.get("/api/stats", headers={**bearer(code), "accept": ""}), 401)
        statuses = [(await client.get(f"/login?token={text}")).status_code for text in ["", "é", *"x" * 9]]
        assert statuses == [401] * 10 + [429]
        # Guesses through a proxy do not lock out someone who has the link.
        assert leads(await client.get(web.gate.link.url())) == "/"


async def test_scripts_send_the_token_of_the_environment(
    quick: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN, OURS)
    for face in (dashboard, api):
        async with face(quick.outbox) as web:
            async with quick.client(OURS, web=web, address=("10.0.0.1", 1)) as client:
                assert (await client.get("/api/stats")).status_code == 200
                assert (await client.post("/api/destinations/mail/pause")).status_code == 200
            async with quick.client("another-token-of-16", web=web) as client:
                is_problem(await client.get("/api/stats"), 401)
    async with dashboard(quick.outbox) as first, dashboard(quick.outbox) as second:
        async with quick.client(None, web=first) as client:
            assert (await log_in(client, OURS)).status_code == 303
            kept = {"cookie": f"relaybox_session={client.cookies['relaybox_session']}"}
        async with quick.client(None, web=second, headers=kept) as client:
            assert (await client.get("/api/stats")).status_code == 200
    # With several processes a link is good in one of them alone: the token is good in all.
    assert not links(caplog)
    assert {actor for actor, *_ in quick.operated.audit()} == {"local", "unknown"}


def test_a_token_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "too-short")
    with pytest.raises(ConfigError, match=f"{TOKEN} is too short") as raised:
        dashboard(Outbox("sqlite://"))
    assert "too-short" not in str(raised.value)


async def test_mounted_the_link_has_the_prefix(quick: Stage, caplog: pytest.LogCaptureFixture) -> None:
    async with dashboard(quick.outbox) as web:
        mounted = Starlette(routes=[Mount("/ops/outbox", web)])
        transport = httpx2.ASGITransport(app=mounted, client=("127.0.0.1", 1))
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://evil.example", headers=HTML
        ) as client:
            assert (await client.get("/ops/outbox/")).status_code == 303
            await client.get("/ops/outbox/login")
            # The Host header has no say in where an operator sends the code.
            [link] = links(caplog)
            assert link.startswith("/ops/outbox/login?token=")
            assert leads(await client.get(link)) == "/ops/outbox/"
            assert (await client.get("/ops/outbox/")).status_code == 200


def test_users_need_no_link(quick: Stage) -> None:
    assert quick.web.gate.link is None
    assert all(route.role is None for route in ROUTES if route.path == "/login")


def test_the_command_prints_the_link(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("relaybox.toml", "[destinations.a]\nsink = 'memory:'\n")
    project.run("migrate")
    with project.running("web", "--port", "0", **{TOKEN: OURS}):
        project.until(lambda: "login?token=" in project.read("out"))
        said = re.fullmatch(r"relaybox web: (\S+)/\nLog in, once: (\S+)\n", project.read("out"))
        assert said, project.read("out")
        address, link = said.groups()
        assert link.startswith(f"{address}/login?token=")
        with httpx2.Client(base_url=address) as client:
            assert client.get("/api/stats").status_code == 401
            assert client.get("/api/stats", headers=bearer(OURS)).status_code == 200
            assert leads(client.get(link)) == "/"
            assert client.get("/api/stats").status_code == 200
    assert OURS not in project.read("out") + project.read("log")
