"""An operator's day: find what fails, understand it and fix it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.site import Site, follow
from tests.waiting import wait_for

OpenPage = Callable[..., Page]


@pytest.mark.fast
def test_a_failing_destination_is_seen_and_its_group_retried(site: Site, open_page: OpenPage) -> None:
    site.billing.status, site.billing.text = 422, "currency EUX is not known"
    site.start_relay()
    page = open_page()
    page.goto(site.address)
    expect(page.locator("#summary")).to_contain_text("All 3 destinations are healthy.")

    site.emit("order.placed", {"total": 42}, 5)
    row = page.locator("#destinations tr", has_text="billing")
    expect(row).to_contain_text("has failures")
    row.get_by_role("link", name="5", exact=True).click()
    group = page.locator("#failures tbody tr")
    expect(group).to_have_count(1)
    expect(group).to_contain_text("422")
    expect(group).to_contain_text("order.placed")

    site.billing.status = 200
    group.get_by_role("link", name="Retry").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Retry 5 deliveries?")
    page.get_by_role("button", name="Retry 5 deliveries").click()
    expect(page).to_have_url(f"{site.address}/operations")
    expect(page.get_by_role("status").first).to_contain_text("The retry has begun")
    expect(page.locator("#operations tbody tr")).to_contain_text("done")
    expect(page.locator("#operations tbody tr")).to_contain_text("5 of 5")

    page.get_by_role("link", name="Failures").click()
    expect(page.locator("#failures")).to_contain_text("Nothing has failed.")
    delivered = "SELECT count(*) FROM outbox_event WHERE destination = 'billing' AND status = 'delivered'"
    page.get_by_role("link", name="Overview").click()
    expect(page.locator("#summary")).to_contain_text("All 3 destinations are healthy.")
    # The relay finds them when it polls the next time.
    wait_for(lambda: site.rows(delivered) == [(5,)])
    wait_for(lambda: len(site.search.bodies) == 5)


def test_a_destination_that_is_down_is_seen_at_once(site: Site, open_page: OpenPage) -> None:
    site.billing.status = 503
    site.start_relay()
    page = open_page()
    page.goto(site.address)
    expect(page.locator("#live")).to_have_text("Live")
    site.emit("order.placed", {"total": 42}, 12)
    expect(page.locator("#destinations tr", has_text="billing")).to_contain_text("circuit")
    expect(page.locator("#summary")).to_contain_text("503")
    expect(page.locator("#destinations tr", has_text="search")).to_contain_text("healthy")
    expect(page.locator("#spoken")).to_have_text("Deliveries do not flow as they should.")
    wait_for(lambda: len(site.search.bodies) == 12)


def test_a_destination_is_paused_and_resumed(site: Site, open_page: OpenPage) -> None:
    site.start_relay()
    page = open_page()
    page.goto(f"{site.address}/destinations/search")
    page.get_by_label("Reason for the pause").fill("their maintenance")
    page.get_by_label("Until").select_option("1 hour from now")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("status").first).to_have_text("Paused search.")
    expect(page.locator("#health")).to_contain_text("their maintenance")
    site.emit("order.placed", {"total": 1}, 3)
    expect(page.locator("#tiles")).to_contain_text("3")
    assert site.search.bodies == []

    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("status").first).to_have_text("Resumed search.")
    expect(page.locator("#health")).to_contain_text("healthy")
    page.wait_for_function("() => document.querySelector('#tiles dd').textContent === '0'")
    assert len(site.search.bodies) == 3
    follow(page, page.get_by_role("link", name="Audit"))
    assert {"pause", "resume"} <= set(page.locator("#audit tbody th").all_text_contents())


def test_a_test_event_goes_the_whole_way(site: Site, open_page: OpenPage) -> None:
    site.start_relay()
    page = open_page()
    page.goto(f"{site.address}/destinations/billing")
    page.get_by_role("button", name="Send a test event").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("relaybox.test")
    expect(page.locator("#deliveries")).to_contain_text("was delivered at")
    assert len(site.billing.bodies) == 1


def test_one_event_is_found_by_its_filter_explained_and_retried(site: Site, open_page: OpenPage) -> None:
    site.billing.status, site.billing.text = 422, "no such customer"
    site.start_relay()
    site.emit("invoice.sent", {"customer": {"name": "Ann", "password": "hunter2"}}, 2)
    page = open_page()
    page.goto(f"{site.address}/events")
    page.get_by_label("State").select_option("failed")
    page.get_by_label("Aggregate id").fill("2")
    page.get_by_label("Aggregate type").fill("Order")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator("#events tbody tr")).to_have_count(1)
    assert "status=failed" in page.url
    page.get_by_role("link", name="invoice.sent").click()
    expect(page.locator("#deliveries")).to_contain_text("no such customer")
    expect(page.locator("pre[aria-label=Payload]")).to_contain_text('"password": "•••"')
    expect(page.locator("body")).not_to_contain_text("hunter2")
    site.billing.status = 200
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("status").first).to_have_text("Retried 1 delivery to billing.")
    expect(page.locator("#deliveries")).to_contain_text("was delivered at")


def test_a_discard_asks_first(site: Site, open_page: OpenPage) -> None:
    site.emit("invoice.sent", {"n": 1})
    page = open_page()
    page.goto(f"{site.address}/events")
    page.get_by_role("link", name="invoice.sent").click()
    page.get_by_role("link", name="Discard…").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Discard 1 delivery?")
    page.get_by_role("button", name="Discard 1 delivery").click()
    expect(page.locator("#deliveries")).to_contain_text("was discarded by an operator")
    assert site.rows("SELECT status FROM outbox_event") == [("discarded",)]


def test_an_operation_is_cancelled(site: Site, open_page: OpenPage) -> None:
    site.billing.status = 422
    site.start_relay()
    site.emit("invoice.sent", {"n": 1}, 30)
    page = open_page()
    page.goto(f"{site.address}/failures")
    expect(page.locator("#failures tbody td", has_text="30")).to_be_visible()
    page.get_by_role("link", name="Retry group").click()
    page.get_by_label("At most a second").fill("1")
    page.get_by_role("button", name="Retry 30 deliveries").click()
    row = page.locator("#operations tbody tr")
    expect(row).to_contain_text("running")
    expect(row.get_by_role("progressbar")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("status").first).to_have_text("It ends after what it is doing now.")
    expect(row).to_contain_text("cancelled")
    expect(row.get_by_role("button")).to_have_count(0)
