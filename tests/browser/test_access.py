"""Who may do what, as a browser meets it."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, expect
from starlette.applications import Starlette
from starlette.routing import Mount

from relaybox import Destination, Outbox
from relaybox.web import dashboard
from tests.browser.site import OPERATOR, USERS, VIEWER, Site, follow, served

OpenPage = Callable[..., Page]
REFUSED = ("401", "403")


def log_in(page: Page, site: Site, token: str, path: str = "/") -> None:
    page.goto(site.address + path)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()


def operating(site: Site, open_page: OpenPage) -> Page:
    """Open the overview as an operator."""
    page = open_page(expected=REFUSED)
    log_in(page, site, OPERATOR)
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    return page


def test_a_login_leads_to_the_page_asked_for_until_a_logout(guarded_site: Site, open_page: OpenPage) -> None:
    page = open_page(expected=REFUSED)
    log_in(page, guarded_site, "a-wrong-token", "/events?status=failed")
    expect(page.get_by_role("alert")).to_have_text("The token is wrong.")
    page.get_by_label("Token").fill(OPERATOR)
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{guarded_site.address}/events?status=failed")
    expect(page.locator(".who")).to_contain_text("ada (operator)")
    follow(page, page.get_by_role("button", name="Log out"))
    page.goto(f"{guarded_site.address}/system")
    expect(page.get_by_label("Token")).to_be_visible()


def test_a_viewer_sees_everything_and_changes_nothing(guarded_site: Site, open_page: OpenPage) -> None:
    guarded_site.billing.status = 422
    guarded_site.start_relay()
    guarded_site.emit("invoice.sent", {"n": 1})
    page = open_page(expected=REFUSED)
    log_in(page, guarded_site, VIEWER, "/failures")
    expect(page.locator("#failures tbody tr")).to_have_count(1)
    expect(page.get_by_role("link", name="Retry")).to_have_count(0)
    page.goto(f"{guarded_site.address}/destinations/billing")
    expect(page.get_by_role("button", name="Pause")).to_have_count(0)
    page.goto(f"{guarded_site.address}/actions/confirm?action=retry&status=failed")
    expect(page.get_by_role("heading", level=1)).to_have_text("Forbidden")
    expect(page.get_by_role("link", name="To the overview")).to_be_visible()
    assert page.evaluate(POST, ["/actions/retry", "status=failed"]) == 403
    assert guarded_site.rows("SELECT status FROM outbox_event WHERE destination = 'billing'") == [("failed",)]


def test_a_form_of_another_site_is_refused(guarded_site: Site, open_page: OpenPage) -> None:
    page = operating(guarded_site, open_page)
    csrf = page.locator("input[name=csrf]").first.get_attribute("value")
    # Another host for the browser, though the same for the network.
    elsewhere = guarded_site.search_url.replace("127.0.0.1", "localhost")
    page.route(
        elsewhere,
        lambda route: route.fulfill(content_type="text/html", body=EVIL.format(guarded_site.address, csrf)),
    )
    page.goto(elsewhere)
    follow(page, page.get_by_role("button"))
    assert guarded_site.rows("SELECT * FROM outbox_destination WHERE paused_at IS NOT NULL") == []


def test_everything_works_with_a_prefix(migrated_database: Callable[[str], str], open_page: OpenPage) -> None:
    outbox = Outbox(migrated_database("postgresql-18"), destinations=[Destination("a/b ü", "memory:")])
    web = dashboard(outbox, users=USERS)
    page = open_page()
    with served(Starlette(routes=[Mount("/ops/outbox", web)]), web) as address:
        page.goto(f"{address}/ops/outbox/destinations/a%2Fb%20%C3%BC")
        page.get_by_label("Token").fill(OPERATOR)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("a/b ü")
        expect(page.locator("#live")).to_have_text("Live")
        follow(page, page.get_by_role("link", name="24 h"))
        page.get_by_label("Reason for the pause").fill("why not")
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("status").first).to_have_text("Paused a/b ü.")
        expect(page).to_have_url(f"{address}/ops/outbox/destinations/a%2Fb%20%C3%BC?period=24h")
        page.get_by_role("link", name="Overview").click()
        expect(page).to_have_url(f"{address}/ops/outbox/")
        expect(page.locator("#destinations")).to_contain_text("paused")
        assert page.locator('a[href^="/"]:not([href^="/ops/outbox"])').count() == 0
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        assert {cookie["path"] for cookie in page.context.cookies()} <= {"/ops/outbox"}


POST = """async ([path, body]) => {
    const headers = {"content-type": "application/x-www-form-urlencoded", "accept": "text/html"};
    return (await fetch(path, {method: "POST", body, headers, redirect: "manual"})).status;
}"""

EVIL = """<form method="post" action="{}/actions/pause"><input name="csrf" value="{}">
<input name="destination" value="billing"><input name="reason" value="evil"><button>Win</button></form>"""
