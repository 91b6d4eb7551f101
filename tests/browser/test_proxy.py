"""A dashboard without users, as ``relaybox web`` runs it, in a browser and behind a real nginx."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import Page, expect

from relaybox.web.settings import TOKEN
from tests.browser.site import LOCAL, follow
from tests.conftest import available
from tests.integration.project import Project
from tests.servers import nginx

OpenPage = Callable[..., Page]
REFUSED = ("401", "403")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Run ``relaybox web`` without users."""
    project = Project(tmp_path)
    project.write("relaybox.toml", "[destinations.mail]\nsink = 'memory:'\n")
    project.run("migrate")
    with project.running("web", "--port", "0", **{TOKEN: LOCAL}):
        project.until(lambda: "login?token=" in project.read("out"))
        yield project


def printed(project: Project) -> tuple[str, str]:
    """Return the address and the path of the login link."""
    found = re.search(r"Log in, once: (http://[^/]+)(/login\?token=\S+)", project.read("out"))
    assert found
    return found[1], found[2]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_behind_a_bare_nginx_only_the_link_lets_in(
    project: Project, open_page: OpenPage, version: str
) -> None:
    address, link = printed(project)
    with available("nginx", nginx.server(address, version)) as proxy:
        with httpx2.Client(base_url=proxy) as stranger:
            for path in ("/api/stats", "/api/events", "/api/audit", "/metrics"):
                assert stranger.get(path).status_code == 401
            for path in ("/api/retry", "/api/destinations/mail/pause"):
                assert stranger.post(path).status_code == 401
            given = {"authorization": f"Bearer {LOCAL}"}
            assert stranger.get("/api/stats", headers=given).status_code == 200
        page, late = open_page(expected=REFUSED), open_page(expected=REFUSED)
        page.goto(f"{proxy}/system")
        expect(page.get_by_label("Token")).to_be_visible()
        page.goto(proxy + link)
        expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
        expect(page).to_have_url(f"{proxy}/")
        expect(page.locator(".who")).to_contain_text("local (operator)")
        expect(page.locator("#live")).to_have_text("Live")
        late.goto(proxy + link)
        expect(late.get_by_role("alert")).to_contain_text("The link was used already")
        late.goto(f"{proxy}/system")
        expect(late.get_by_label("Token")).to_be_visible()
        page.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_behind_an_nginx_that_passes_the_host_everything_works(
    project: Project, open_page: OpenPage, version: str
) -> None:
    address, link = printed(project)
    host = "proxy_set_header Host $http_host;"
    with available("nginx", nginx.server(address, version, host)) as proxy:
        page = open_page(expected=REFUSED)
        page.goto(proxy + link)
        expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
        page.goto(f"{proxy}/destinations/mail")
        page.get_by_label("Reason for the pause").fill("why not")
        follow(page, page.get_by_role("button", name="Pause"))
        expect(page.get_by_role("status").first).to_have_text("Paused mail.")
        follow(page, page.get_by_role("button", name="Log out"))
        page.goto(f"{proxy}/system")
        page.get_by_label("Token").fill(LOCAL)
        follow(page, page.get_by_role("button", name="Log in"))
        expect(page.get_by_role("heading", level=1)).to_have_text("System")
        page.close()


def test_a_link_on_a_page_of_another_site_lets_in(project: Project, open_page: OpenPage) -> None:
    # As in a terminal in a browser: the cookie is of the strict kind.
    address, link = printed(project)
    page = open_page(expected=REFUSED)
    elsewhere = "http://terminal.example/"
    body = f'<a href="{address}{link}">Log in</a>'
    page.route(elsewhere, lambda route: route.fulfill(content_type="text/html", body=body))
    page.goto(elsewhere)
    page.get_by_role("link", name="Log in").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
