"""The admin in a real browser, by an operator who finds a failed delivery and retries it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from playwright.sync_api import Page, Route, expect

from relaybox.contrib.django.models import OutboxEvent
from tests.django import orders
from tests.examples.running import PATIENCE, PICTURES, browsing

STRICT = "default-src 'self'"

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes]


@pytest.fixture
def browse(chromium_path: str) -> Iterator[Any]:
    """Runs a function with a page, in a thread of its own: Playwright's loop would make Django refuse."""
    expect.set_options(timeout=PATIENCE)
    with ThreadPoolExecutor(1) as thread:

        def run(function: Any, *args: Any, **options: Any) -> None:
            def inside() -> None:
                with browsing(chromium_path, 860, 1280, **options) as page:
                    # Room for what the pictures are about.
                    page.add_init_script("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")
                    function(page, *args)

            thread.submit(inside).result()

        yield run


@pytest.fixture
def address(live_server: Any, settings: Any, monkeypatch: Any) -> str:
    """Serve the admin of a shop after a bad morning."""
    orders.open_shop(settings, monkeypatch)
    settings.TIME_ZONE = "UTC"
    get_user_model().objects.create_superuser("ada", password="lovelace")
    orders.morning("default")
    return f"{live_server.url}/admin/"


def log_in(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_label("Username").fill("ada")
    page.get_by_label("Password").fill("lovelace")
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("link", name="Outbox events").first.click()


def picture(page: Page, name: str, height: int = 860) -> None:
    if PICTURES:
        path = Path(PICTURES) / f"django-admin-{name}.png"
        clip = {"x": 0, "y": 0, "width": 1280, "height": height}
        page.screenshot(path=path, clip=clip, full_page=True, animations="disabled")


def retry_a_failed_one(page: Page, address: str) -> None:
    log_in(page, address)
    expect(page.get_by_role("row")).to_have_count(51)
    picture(page, "list")
    page.get_by_role("link", name="failed", exact=True).click()
    expect(page.get_by_role("row")).to_have_count(3)
    page.get_by_role("link", name="order.placed").click()
    expect(page.locator(".relaybox-why")).to_contain_text("failed at")
    expect(page.get_by_text("currency EUX is not known")).to_have_count(2)
    picture(page, "detail", 1180)
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("#content > h1")).to_have_text("Retry 1 delivery?")
    page.get_by_role("button", name="Retry", exact=True).click()
    expect(page.locator(".messagelist")).to_have_text("Retried 1 to billing.")
    page.get_by_role("link", name="Outbox events").first.click()


def retry_all_failed(page: Page, address: str) -> None:
    log_in(page, address)
    page.get_by_role("link", name="failed", exact=True).click()
    expect(page.get_by_role("row")).to_have_count(3)
    for box in page.locator("input.action-select").all():
        box.check()
    page.locator("select[name=action]").select_option("retry")
    page.locator("button[name=index]").click()
    expect(page.get_by_text("1 to billing, 1 to warehouse")).to_be_visible()
    picture(page, "confirm", 360)
    page.get_by_role("link", name="Cancel").click()
    expect(page.get_by_role("row")).to_have_count(3)


def look_in_the_dark(page: Page, address: str) -> None:
    log_in(page, address)
    expect(page.get_by_text("Older")).to_be_visible()
    picture(page, "dark")
    page.get_by_role("link", name="customer.renamed").click()
    assert brightness(page, ".relaybox-why") < 80
    picture(page, "dark-detail", 700)


def brightness(page: Page, selector: str) -> int:
    """Return the brightness of its background, from 0 to 255."""
    colour = page.locator(selector).evaluate("element => getComputedStyle(element).backgroundColor")
    return max(int(part) for part in re.findall(r"\d+", colour)[:3])


def look_under_a_strict_policy(page: Page, address: str) -> None:
    refused: list[str] = []

    def with_policy(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, headers=response.headers | {"content-security-policy": STRICT})

    log_in(page, address)
    page.on("console", lambda message: refused.append(message.text) if "Policy" in message.text else None)
    page.route("**/admin/relaybox/**", with_policy)
    page.reload()
    page.get_by_role("link", name="customer.renamed").click()
    expect(page.locator(".relaybox-why")).to_contain_text("is being sent by relay-7f9c")
    assert brightness(page, ".relaybox-state.sending") > 0
    assert refused == []


def test_an_operator_retries_a_failed_delivery(browse: Any, address: str) -> None:
    browse(retry_a_failed_one, address)
    row = OutboxEvent.objects.get(aggregate_id="1071", event_type="order.placed", destination="billing")
    assert (row.status, row.attempts) == ("pending", 0)


def test_an_operator_chooses_several_and_thinks_better_of_it(browse: Any, address: str) -> None:
    browse(retry_all_failed, address)
    assert OutboxEvent.objects.filter(status="failed").count() == 2


def test_the_pages_are_dark_where_the_browser_is(browse: Any, address: str) -> None:
    browse(look_in_the_dark, address, color_scheme="dark")


def test_the_pages_need_no_script_or_style_of_their_own(browse: Any, address: str) -> None:
    browse(look_under_a_strict_policy, address)
    assert OutboxEvent.objects.exists()
