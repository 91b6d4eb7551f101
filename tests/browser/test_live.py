"""Open pages show what is, without being loaded again, and without getting in the way."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from playwright.sync_api import Page, expect

from relaybox.web import live as module
from tests.browser.site import Site, follow
from tests.waiting import wait_for

OpenPage = Callable[..., Page]


def test_a_page_is_updated_without_a_reload_and_keeps_what_was_typed(site: Site, open_page: OpenPage) -> None:
    site.emit("invoice.sent", {"n": 1})
    page = open_page()
    page.goto(f"{site.address}/events")
    page.evaluate("window.here = true")
    page.get_by_label("Event type").fill("invoice")
    page.locator("#events").get_by_role("link", name="invoice.sent").focus()
    page.evaluate("document.querySelector('#events').scrollIntoView()")
    before = page.evaluate("[scrollY, document.activeElement.href]")
    site.emit("order.placed", {"n": 2})
    expect(page.locator("#events tbody tr")).to_have_count(3)
    assert page.evaluate("[scrollY, document.activeElement.href]") == before
    assert page.get_by_label("Event type").input_value() == "invoice"
    assert page.evaluate("window.here") is True
    expect(page.locator("#live")).to_have_text("Live")


def test_nothing_moves_when_numbers_change(site: Site, open_page: OpenPage) -> None:
    page = open_page()
    page.goto(site.address)
    expect(page.locator("#live")).to_have_text("Live")
    all_of_them = "[...document.querySelectorAll('h2, figure, #tiles')]"
    places = f"{all_of_them}.map(e => Math.round(e.getBoundingClientRect().top))"
    before = page.evaluate(places)
    site.emit("order.placed", {"n": 1}, 200)
    expect(page.locator("#tiles")).to_contain_text("400")
    assert page.evaluate(places) == before


def test_one_round_serves_every_page_and_none_runs_for_nobody(site: Site, open_page: OpenPage) -> None:
    pages = [open_page() for _ in range(3)]
    for page in pages:
        page.goto(site.address)
        expect(page.locator("#live")).to_have_text("Live")
    live = site.app.live
    assert len(live._listeners) == 3
    began, rounds = monotonic(), live.rounds
    wait_for(lambda: live.rounds >= rounds + 3)
    assert live.rounds - rounds <= (monotonic() - began) / module.ROUND + 1
    for page in pages:
        page.goto("about:blank")
    wait_for(lambda: live._task is None)


def test_pages_work_without_script(site: Site, open_page: OpenPage) -> None:
    site.billing.status = 422
    site.start_relay()
    site.emit("invoice.sent", {"n": 1})
    page = open_page(java_script_enabled=False)
    wait_for(lambda: page.goto(f"{site.address}/failures") and page.get_by_text("Retry group").count())
    page.get_by_role("link", name="Retry group").click()
    page.get_by_role("button", name="Retry 1 delivery").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Operations")
    assert page.locator("#live").text_content() == "Not live"


def test_the_theme_and_the_zone_are_kept(site: Site, open_page: OpenPage) -> None:
    site.emit("invoice.sent", {"n": 1})
    page = open_page(color_scheme="light", timezone_id="Asia/Kolkata")
    page.goto(f"{site.address}/events")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Dark theme").click()
    page.get_by_role("button", name="Local times").click()
    follow(page, page.get_by_role("link", name="invoice.sent"))
    assert page.evaluate(background) != light
    expect(page.get_by_role("button", name="Light theme")).to_be_visible()
    expect(page.get_by_text("Times in Asia/")).to_be_visible()
    time = page.locator("time[data-moment]").first
    shown, machine = time.text_content(), time.get_attribute("datetime")
    assert shown is not None
    assert machine is not None
    assert shown[11:16] != machine[11:16]
    assert abs(int(shown[14:16]) - int(machine[14:16])) == 30
